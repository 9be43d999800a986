"""One optimizer step: sum over tokens, divide once.

    cast, all-gather  parameters to the compute type, then over `data`                once a step
    scan              K micro-batches: float32 sums of gradients, losses, tokens      no communication over `data`
    reduce-scatter    the sums over `data`; each device keeps its share               once a step
    divide, clip      by the step's valid tokens; by the global norm                  once a step
    update            one tick of the optimizer and of every schedule                 once a step

All of it is written for one device (`jax.shard_map`), so this file, training/shares.py, training/deal.py and
model/parallel.py decide what crosses the mesh, and when. No compiler pass does.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key

from model.gpt import GPT
from model.keys import random_key
from model.loss import loss_sums
from model.parallel import mark_varying, psum, varying_as
from options.schema import BATCH_AXES, DATA_AXES, Config
from training.mesh import ROWS, xla_options
from training.optimizer import Schedule, parameter_groups
from training.sharded import ShardedNetwork
from training.shares import copies, on_each_device
from training.state import TrainState


class Batch(TypedDict):
    """A step's rows: K micro-batches of B rows of T tokens."""

    inputs: Int[Array, "K B T"]
    targets: Int[Array, "K B T"]
    weights: Float[Array, "K B T"]
    segment_ids: NotRequired[Int[Array, "K B T"]]
    dropout_keys: NotRequired[Key[Array, "K B"]]
    """Only inside a training step, if the network has dropout."""


class Squares(NamedTuple):
    """Squares of each micro-batch's gradients on each device, by leaf, from a step with diagnostics."""

    tokens: Int[Array, "data fsdp tensor K"]
    """Valid tokens of the micro-batch."""
    own: Float[Array, "data fsdp tensor K leaves"]
    """Sums of squares of the micro-batch's gradient."""
    running: Float[Array, "data fsdp tensor K leaves"]
    """Sums of squares of the sum of the gradients so far, this micro-batch included."""


class StepSums(NamedTuple):
    """Sums over all valid tokens of a step."""

    loss: Float[Array, ""]
    """In nats."""
    tokens: Int[Array, ""]
    gradients: dict
    """The loss's gradient in float32, divided over the mesh as the parameters are."""
    squares: Squares | None
    """None unless the step is measured."""


class Update(NamedTuple):
    """A step's update of the state."""

    state: TrainState
    """After the step."""
    gradients: dict
    """The mean gradient over the step's valid tokens, before the clip."""
    grad_norms: dict[str, Float[Array, ""]]
    """The gradient's norm in each parameter group."""
    grad_norm: Float[Array, ""]
    clip: Float[Array, ""]
    """The factor of the gradients."""
    updates: optax.Updates
    """The change of the parameters, unless the step was skipped."""


Metrics = dict[str, Any]
Measure = Callable[[TrainState, StepSums, Update], Metrics]
"""The function from the state before a step to the step's diagnostics."""
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
EvalStep = Callable[[dict, Batch], tuple[Float[Array, "K"], Int[Array, "K"]]]


def gradient_sums(shares: dict, batch: Batch, network: ShardedNetwork, measured: bool) -> StepSums:
    """Return, for one device, the sums over the step, with `squares` if the step is `measured`.

    `shares` are of the float32 parameters, `batch` its rows [K, B / (data fsdp), T]. The gradients have the same
    shares.
    """
    compute_params = network.gather(shares)

    def micro_batch(sums: tuple, rows: Batch) -> tuple[tuple, Squares | None]:
        # A gradient has its parameter's type, so the network takes float32; each product casts back (model/layers.py).
        # The compiler drops the round trip.
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), compute_params)
        loss_of = lambda params: loss_sums(network.with_params(params), **rows)
        (loss, tokens), gradients = jax.value_and_grad(loss_of, has_aux=True)(wide)
        total = jax.tree.map(jnp.add, sums, (loss, tokens, gradients))
        return total, squares_of(tokens, gradients, sums[2], total[2]) if measured else None

    # The losses vary over these axes of the mesh; the gradients do as their parameters, which are marked already.
    no_loss, no_tokens = mark_varying((jnp.float32(0), jnp.int32(0)), BATCH_AXES)
    no_gradients = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), compute_params)
    (loss, tokens, gradients), squares = jax.lax.scan(micro_batch, (no_loss, no_tokens, no_gradients), batch)
    gradients = network.reduce_scatter(gradients)
    loss, tokens = psum((loss, tokens), BATCH_AXES)
    # One cell of the squares' [data, fsdp, tensor].
    return StepSums(loss, tokens, gradients, jax.tree.map(lambda sums: sums[None, None, None], squares))


def squares_of(tokens: Int[Array, ""], gradients: dict, before: dict, total: dict) -> Squares:
    """Return, for one device, the squares of a micro-batch with `tokens` valid tokens. Its `gradients` are the
    difference between the sums `before` and `total`."""
    tokens = mark_varying(tokens, ("tensor",))
    square_sums = lambda tree: jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)])
    # XLA scatters a table's gradient into the sum, unless another operation reads it: then it rounds otherwise.
    own = lambda path, gradient, old, new: new - old if path[-1].key == "table" else gradient
    of_own = square_sums(jax.tree_util.tree_map_with_path(own, gradients, before, total))
    return Squares(tokens, *varying_as(tokens, (of_own, square_sums(total))))


def dropout_keys(seed: int, step: Int[Array, ""], shape: tuple[int, int]) -> Key[Array, "K B"]:
    """Return a random key for each of a step's rows [K, B]. It is a function of seed, step and the row's number in the
    step, so it depends neither on the number of micro-batches nor on the mesh."""
    of_step = jax.random.fold_in(random_key(seed), step)
    return jax.vmap(partial(jax.random.fold_in, of_step))(jnp.arange(prod(shape))).reshape(shape)


def apply_update(
    state: TrainState,
    sums: StepSums,
    optimizer: optax.GradientTransformationExtraArgs,
    network: ShardedNetwork,
    clip_norm: float,
) -> Update:
    """Divide, clip and update, on one device's shares. A step without a valid token, or with a gradient that is not
    finite, changes only the counts."""
    gradients = jax.tree.map(lambda g: g / jnp.maximum(sums.tokens, 1), sums.gradients)
    grad_norms = group_norms(gradients, network)
    grad_norm = optax.tree.norm(grad_norms)
    sound = (sums.tokens > 0) & jnp.isfinite(grad_norm)
    clip = jnp.minimum(1.0, clip_norm / jnp.maximum(grad_norm, 1e-30))
    clipped = jax.tree.map(lambda g: clip * g, gradients)
    updates, opt_state = optimizer.update(clipped, state.opt_state, state.params, step=state.step)
    params = optax.apply_updates(state.params, updates)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(sound, new, old), (params, opt_state), (state.params, state.opt_state)
    )
    after = TrainState(state.step + 1, params, opt_state, state.skipped_steps + jnp.where(sound, 0, 1))
    return Update(after, gradients, grad_norms, grad_norm, clip, updates)


def group_norms(gradients: dict, network: ShardedNetwork) -> dict[str, Float[Array, ""]]:
    """Return the norm of each group's gradient, from one device's shares, in one sum over the mesh."""
    groups = jax.tree.leaves(parameter_groups(network.config))
    squares: dict[str, Array] = {name: jnp.float32(0) for name in sorted(set(groups))}
    for name, leaf, layout in zip(groups, jax.tree.leaves(gradients), jax.tree.leaves(network.layouts)):
        squares[name] += jnp.sum(jnp.square(leaf)) / copies(layout, network.mesh.shape)
    sums = psum(jnp.stack(list(squares.values())), (*BATCH_AXES, "tensor"))
    return dict(zip(squares, jnp.sqrt(sums)))


def make_train_step(
    network: ShardedNetwork,
    abstract_state: TrainState,
    optimizer: optax.GradientTransformationExtraArgs,
    rates: Mapping[str, Schedule],
    config: Config,
    measure: Measure | None = None,
) -> TrainStep:
    """Return `train_step(state, batch) -> (state, metrics)`, jitted. `state` is sharded as `abstract_state`, and
    donated.

    Metrics are scalars: `loss` (nats a valid token), `grad_norm` (before the clip), `grad_norms` and `learning_rate`
    (of each group), `valid_tokens`, and `skipped_steps` (steps skipped so far: no valid token, or a gradient that is
    not finite). With `measure`, they include its `diagnostics`. Of `config` it takes the clip, dropout's seed, and
    whether each execution must give the same bits on GPUs too.
    """
    mesh, specs, replicated = network.mesh, network.specs, PartitionSpec()
    state_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, abstract_state)
    stacked = PartitionSpec(DATA_AXES, "fsdp", "tensor")

    def on_device(state: TrainState, batch: Batch) -> tuple[StepSums, Update]:
        sums = gradient_sums(state.params, batch, network, measured=measure is not None)
        return sums, apply_update(state, sums, optimizer, network, config.optimizer.clip_norm)

    of_sums = StepSums(replicated, replicated, specs, stacked)  # pyright: ignore[reportArgumentType]
    of_update = Update(state_specs, specs, replicated, replicated, replicated, specs)  # pyright: ignore
    step_of = on_each_device(on_device, mesh, network.dtype, (state_specs, ROWS), (of_sums, of_update))
    # Shardings are given, since the compiler could choose others, which the next step would not accept.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state), None
    options = xla_options(mesh, config.deterministic)

    @partial(jax.jit, donate_argnums=0, out_shardings=shardings, compiler_options=options)
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if network.config.dropout:
            micro_batches, rows, _ = batch["inputs"].shape
            batch = {**batch, "dropout_keys": dropout_keys(config.seed, state.step, (micro_batches, rows))}
        sums, update = step_of(state, batch)
        metrics = {
            "loss": sums.loss / jnp.maximum(sums.tokens, 1),
            "grad_norm": update.grad_norm,
            "grad_norms": update.grad_norms,
            "valid_tokens": sums.tokens,
            "learning_rate": {group: rate(state.step) for group, rate in rates.items()},
            "skipped_steps": update.state.skipped_steps,
        }
        if measure:
            metrics["diagnostics"] = measure(state, sums, update)
        return update.state, metrics

    return train_step


def make_eval_step(network: ShardedNetwork) -> EvalStep:
    """Return `eval_step(params, batch) -> (loss_sums, token_counts)`, jitted: for each micro-batch of [K, B, T]."""

    def sums(model: GPT, batch: Batch) -> tuple[Array, Array]:
        _, losses = jax.lax.scan(lambda _, rows: ((), loss_sums(model, **rows)), (), batch)
        return psum(losses, BATCH_AXES)

    evaluated = network.on_mesh(sums, [ROWS], PartitionSpec())
    return jax.jit(evaluated, compiler_options=xla_options(network.mesh))
