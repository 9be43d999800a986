"""The network on a mesh: how each device stores its parameters, gathers them, and sums gradients with respect to them.

`training.build.build` makes it once for a run, and `run.network.Network` once for an evaluation. What needs to
know how parameters are divided asks it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from model.gpt import GPT, abstract_model, map_parameters
from model.parallel import mark_varying
from options.schema import DATA_AXES, ModelConfig
from training.shares import (
    ShardLayout,
    all_gather_data,
    on_each_device,
    reduce_scatter_data,
    replicated_axes,
    shard_layout,
)


class ShardedNetwork(NamedTuple):
    """A network without parameters, and their storage on a mesh."""

    config: ModelConfig
    dtype: jnp.dtype
    """The type of activations, and of the parameters' copy in a step."""
    mesh: Mesh
    graphdef: nnx.GraphDef[GPT]
    layouts: dict
    """A tree like the parameters', with each one's `training.shares.ShardLayout`."""

    @property
    def specs(self) -> dict:
        """Return the axes of the mesh that divide each parameter, for JAX."""
        return jax.tree.map(spec_of, self.layouts)

    @property
    def gathered_specs(self) -> dict:
        """Return the axes of the mesh that divide each parameter after it is gathered over `data`, for JAX."""
        return jax.tree.map(lambda layout: PartitionSpec(*layout.axes), self.layouts)

    def abstract_params(self) -> dict:
        """Return the stored shapes, types and shardings of the float32 parameters."""
        return jax.tree.map(partial(abstract_array, self.mesh, jnp.dtype("float32")), self.layouts)

    def gather(self, shares: dict) -> dict:
        """Return, for one device, the parameters in the compute type, all-gathered over `data`, from its float32
        shares."""
        return all_gather_data(shares, self.layouts, self.dtype)

    def gathered(self, params: dict) -> dict:
        """Return the parameters as `on_gathered` takes them, from the sharded float32 ones: in the compute type,
        all-gathered over `data`. They stay divided over `fsdp` and `tensor`."""
        if self.mesh.size == 1:
            return self.gather(params)
        # JAX cannot tell that all devices along `data` gather the same, so it must not check that.
        gather = jax.shard_map(
            self.gather, mesh=self.mesh, in_specs=(self.specs,), out_specs=self.gathered_specs, check_vma=False
        )
        return gather(params)

    def abstract_gathered(self) -> dict:
        """Return the shapes, types and shardings of `gathered` parameters."""
        shapes = jax.eval_shape(self.gathered, self.abstract_params())
        return jax.tree.map(
            lambda shape, spec: shape.update(sharding=NamedSharding(self.mesh, spec)), shapes, self.gathered_specs
        )

    def reduce_scatter(self, gradients: dict) -> dict:
        """Return, for one device, its shares of the gradients' sums over `data`. `gradients` are with respect to what
        `gather` returned."""
        return reduce_scatter_data(gradients, self.layouts)

    def with_params(self, params: dict) -> GPT:
        """Return, for one device, the network with the parameters that `gather` returned, or others of their type."""
        return nnx.merge(self.graphdef, params)

    def on_mesh(self, function: Callable, in_specs: Sequence[PartitionSpec], out_specs: Any) -> Callable[..., Any]:
        """Return `function(model, *arrays)`, written for one device, as a function of the sharded float32 parameters,
        and of complete arrays or trees of them, which the specs divide over the mesh.

        Parameters are gathered over `data` in the compute type. They stay divided over `fsdp` and `tensor`, as in a
        step.
        """

        def for_one_device(shares: dict, *arrays: Any) -> Any:
            return function(self.with_params(self.gather(shares)), *arrays)

        return on_each_device(for_one_device, self.mesh, self.dtype, (self.specs, *in_specs), out_specs)

    def on_gathered(self, function: Callable, in_specs: Sequence[PartitionSpec], out_specs: Any) -> Callable[..., Any]:
        """Return the same of `gathered` parameters, so that many calls gather them once."""

        def mark(param: Array, layout: ShardLayout) -> Array:
            return mark_varying(param, (*DATA_AXES, *replicated_axes(layout)))

        def for_one_device(params: dict, *arrays: Any) -> Any:
            return function(self.with_params(jax.tree.map(mark, params, self.layouts)), *arrays)

        return on_each_device(for_one_device, self.mesh, self.dtype, (self.gathered_specs, *in_specs), out_specs)


def shard_network(config: ModelConfig, dtype: jnp.dtype, mesh: Mesh) -> ShardedNetwork:
    """Return the network for activations of `dtype`, on a mesh, without compute."""
    graphdef, _ = split_model(config, dtype)
    layouts = map_parameters(lambda param: shard_layout(param.shape, param.get_metadata("axes"), mesh.shape), config)
    return ShardedNetwork(config, dtype, mesh, graphdef, layouts)


def split_model(config: ModelConfig, dtype: jnp.dtype) -> tuple[nnx.GraphDef[GPT], dict]:
    """Return the network's structure, for activations of `dtype`, and the shapes of its parameters, without compute."""
    model = nnx.clone(abstract_model(config))
    model.dtype = dtype
    graphdef, params = nnx.split(model)
    return graphdef, nnx.to_pure_dict(params)


def spec_of(layout: ShardLayout) -> PartitionSpec:
    """Return the axes of the mesh that divide each dimension, for JAX."""
    return PartitionSpec(*layout.spec)


def abstract_array(mesh: Mesh, dtype: jnp.dtype, layout: ShardLayout) -> jax.ShapeDtypeStruct:
    """Return the stored shape, type and sharding of an array with this layout."""
    return jax.ShapeDtypeStruct(layout.stored, dtype, sharding=NamedSharding(mesh, spec_of(layout)))
