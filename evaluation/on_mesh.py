"""A network as a function on a mesh."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from configs.schema import ModelConfig
from training.mesh import parameter_places, spec_of
from training.shares import all_gather_data, on_each_device
from training.state import split_model


def on_mesh(
    function: Callable,
    config: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh,
    in_specs: Sequence[PartitionSpec],
    out_specs: Any,
) -> Callable[..., Any]:
    """Return `function(model, *arrays)`, written for one device, as a function on the mesh. It takes the sharded
    float32 parameters, and complete arrays or trees of them, which the specs divide over the mesh.

    Parameters are gathered over `data` in the compute type. They stay divided over `fsdp` and `tensor`, as in a step.
    """
    graphdef, _ = split_model(config, dtype)
    places = parameter_places(config, mesh)

    def for_one_device(params: dict, *arrays: Any) -> Any:
        return function(nnx.merge(graphdef, all_gather_data(params, places, dtype)), *arrays)

    return on_each_device(for_one_device, mesh, dtype, (jax.tree.map(spec_of, places), *in_specs), out_specs)
