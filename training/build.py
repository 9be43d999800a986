"""The build of a run: from a config and devices, the mesh, sizes, optimizer and programs of a step; and its memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from options.schema import Config
from training.diagnostics import make_measure
from training.dtype import compute_dtype
from training.mesh import batch_devices, batch_shape, batch_sharding, make_mesh, sizes_of, step_shape
from training.optimizer import Schedule, make_optimizer
from training.sharded import ShardedNetwork, shard_network
from training.state import TrainState, abstract_state, create_state
from training.step import EvalStep, TrainStep, make_eval_step, make_train_step

SMALLER = {"model.loss_chunks": 8, "model.remat": "block"}
"""Options that take less memory and more time."""


class Build(NamedTuple):
    """The mesh, sizes and programs of a config. Nothing in it is compiled or on a device yet."""

    config: Config
    """The config, with `model.dtype` resolved."""
    network: ShardedNetwork
    batch_shape: tuple[int, int, int]
    """(K, B, T): micro-batches of a step, rows of a micro-batch over the mesh, tokens of a row."""
    optimizer: optax.GradientTransformationExtraArgs
    rates: Mapping[str, Schedule]
    """Each parameter group's learning rate as a function of the step."""
    abstract_state: TrainState
    """Shapes, types and shardings of the state."""
    train_step: TrainStep
    measuring_step: TrainStep
    """The same step with `diagnostics` in its metrics."""
    eval_step: EvalStep

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the run's devices."""
        return self.network.mesh

    @property
    def dtype(self) -> jnp.dtype:
        """Return the type of the activations."""
        return self.network.dtype

    @property
    def batch_sharding(self) -> NamedSharding:
        """Return the sharding of a batch's arrays [K, B, T]."""
        return batch_sharding(self.mesh)

    def create_state(self) -> TrainState:
        """Return the state before step 0, already sharded."""
        return create_state(self.network, self.optimizer, self.config.seed)

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes, types and shardings of a step's batch."""
        types = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
        types |= {"segment_ids": jnp.int32} if self.config.data.mask_documents else {}
        shape, sharding = self.batch_shape, self.batch_sharding
        return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in types.items()}


def build(config: Config, devices: Sequence[Any] | None = None) -> Build:
    """Return the build for all devices here, or those given. Raise UserError if the config does not fit them."""
    mesh = make_mesh(config.mesh, devices)
    dtype = compute_dtype(config.model, mesh.devices.flat[0].platform)
    config = replace(config, model=replace(config.model, dtype=dtype.name))
    network = shard_network(config.model, dtype, mesh)
    optimizer, rates = make_optimizer(config.optimizer, network, config.steps)
    state = abstract_state(network, optimizer)
    make_step = partial(make_train_step, network, state, optimizer, rates, config)
    return Build(
        config=config,
        network=network,
        batch_shape=batch_shape(config.batch, mesh),
        optimizer=optimizer,
        rates=rates,
        abstract_state=state,
        train_step=make_step(),
        measuring_step=make_step(make_measure(network)),
        eval_step=make_eval_step(network),
    )


def device_bytes(tree: Any) -> int:
    """Return the bytes that one device stores of a tree of abstract arrays."""
    return sum(leaf.dtype.itemsize * prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))


def stored_bytes(built: Build) -> dict[str, int]:
    """Return the bytes on a device that follow from shapes alone, by part, while a run trains."""
    state, mesh, batch = built.abstract_state, built.mesh, device_bytes(built.abstract_batch())
    layouts = jax.tree.leaves(built.network.layouts)
    summed = sum(prod(p.shape) // prod(mesh.shape[axis] for axis in p.axes if axis) for p in layouts)
    return {
        "parameters": device_bytes(state.params),
        "moments": device_bytes(state.opt_state),
        "gradients": 4 * summed,  # float32 sums of a replica
        "batch": batch,
        "held-out rows": ceil(built.config.eval.tokens / prod(built.batch_shape)) * batch,
    }


def expected_row_bytes(built: Build) -> int:
    """Return the bytes on a device that a row of a micro-batch takes, roughly, from shapes alone: what the backward
    pass reads of each block, and three arrays of logits, all in float32. A compiled program says what it really needs.
    """
    model = built.config.model
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    of_blocks = model.depth * (12 * model.width + 2 * heads)
    return 4 * built.batch_shape[2] * (of_blocks + 3 * model.vocab_size // model.loss_chunks)


def program_bytes(compiled: Any) -> int:
    """Return the bytes on a device that a compiled program asks for, by its own analysis: arguments, results,
    temporaries."""
    analysis: Any = compiled.memory_analysis()
    # Donated arguments and the outputs that replace them count once.
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + outputs + analysis.temp_size_in_bytes


def row_counts(built: Build) -> list[int]:
    """Return the rows_per_device that divide the step, the most first."""
    config, replicas = built.config.batch, batch_devices(built.mesh)
    micro_batches, rows, _ = step_shape(config, sizes_of(built.mesh))
    share = micro_batches * rows // replicas
    return [n for n in range(share, 0, -1) if share % n == 0]


def interpolate(points: Mapping[int, float | int], x: int) -> float:
    """Return the value at `x` of the line through the outermost of the points; of one point, its value."""
    low, high = min(points), max(points)
    slope = (points[high] - points[low]) / (high - low) if high > low else 0.0
    return float(points[low] + slope * (x - low))
