"""The build of a run: from a config and devices, the mesh, sizes, optimizer and programs of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from configs.schema import Config
from training.diagnostics import make_measure
from training.mesh import batch_shape, batch_sharding, make_mesh
from training.optimizer import make_optimizer
from training.schedule import Schedule
from training.state import TrainState, abstract_state, compute_dtype, create_state
from training.step import EvalStep, TrainStep, make_eval_step, make_train_step


class Build(NamedTuple):
    """The mesh, sizes and programs of a config. Nothing in it is compiled or on a device yet. Nine fields, which
    `build` makes from one config."""

    config: Config
    """The config, with `model.dtype` resolved."""
    mesh: Mesh
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
    def dtype(self) -> jnp.dtype:
        """Return the type of the activations."""
        return jnp.dtype(self.config.model.dtype)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Return the sharding of a batch's arrays [K, B, T]."""
        return batch_sharding(self.mesh)

    def create_state(self) -> TrainState:
        """Return the state before step 0, already sharded."""
        return create_state(self.config.model, self.optimizer, self.mesh, self.config.seed)

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
    optimizer, rates = make_optimizer(config.optimizer, config.model, config.steps, mesh)
    state = abstract_state(config.model, optimizer, mesh)
    of_step = (config.model, dtype, mesh, state, optimizer, rates, config.optimizer.clip_norm, config.seed)
    train_step, measuring_step = (
        make_train_step(*of_step, measure, config.deterministic) for measure in (None, make_measure(config.model, mesh))
    )
    shape, eval_step = batch_shape(config.batch, mesh), make_eval_step(config.model, dtype, mesh)
    return Build(config, mesh, shape, optimizer, rates, state, train_step, measuring_step, eval_step)
