"""One optimizer step: sum over tokens, divide once.

    cast, all-gather  parameters to the compute type, then over `data`                once a step
    scan              K micro-batches: float32 sums of gradients, losses, tokens      no communication over `data`
    reduce-scatter    the sums over `data`; each device keeps its share               once a step
    divide, clip      by the step's valid tokens; by the global norm                  once a step
    update            one tick of the optimizer and of every schedule                 once a step

Everything up to the reduction is written for one device (`jax.shard_map`), so what crosses the mesh, and when, is
decided here and in model/parallel.py, and not by a compiler pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from configs.schema import DiagnosticsConfig, ModelConfig
from model.gpt import map_parameters
from model.layers import Table, accumulate_onto
from model.loss import loss_sums
from model.parallel import in_shard_map, mark_varying, psum, psum_scatter
from training.diagnostics import Layout, Metric, Units, UnitSums, adam_metric, measure, sum_units, unit
from training.mesh import ROWS, dimension_over, xla_options
from training.optimizer import parameter_groups
from training.schedule import Schedule
from training.state import TrainState, abstract_params, split_model


class Batch(TypedDict):
    """A step's rows: K micro-batches of B rows of T tokens."""

    inputs: Int[Array, "K B T"]
    targets: Int[Array, "K B T"]
    weights: Float[Array, "K B T"]
    segment_ids: NotRequired[Int[Array, "K B T"]]


Metrics = dict[str, Any]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
EvalStep = Callable[[dict, Batch], tuple[Float[Array, ""], Int[Array, ""]]]


def all_gather_data(params: dict, specs: dict, dtype: jnp.dtype) -> dict:
    """For one device: its shares of the parameters cast to the compute type and all-gathered over `data`."""

    def whole(share: Array, spec: PartitionSpec) -> Array:
        # Single numbers keep their type: they cost nothing, and what they multiply is large.
        share = share if share.ndim == 1 else share.astype(dtype)
        axis = dimension_over(spec, "data")
        if axis is not None and in_shard_map():
            share = jax.lax.all_gather(share, "data", axis=axis, tiled=True)
        # Marked here, outside of the scan: otherwise every micro-batch would end in a psum of the gradient.
        return mark_varying(share, replicated_axes(spec))

    return jax.tree.map(whole, params, specs)


def reduce_scatter_data(gradients: dict, specs: dict) -> dict:
    """For one device: the gradients reduce-scattered over `data`; summed over `fsdp` too where that divides nothing."""

    def share(gradient: Array, spec: PartitionSpec) -> Array:
        axis = dimension_over(spec, "data")
        if axis is not None and in_shard_map():
            gradient = psum_scatter(gradient, "data", axis)
        return psum(gradient, replicated_axes(spec))

    return jax.tree.map(share, gradients, specs)


def replicated_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The axes along which this parameter is replicated though the rows of a batch are divided."""
    return tuple(axis for axis in ("data", "fsdp") if dimension_over(spec, axis) is None)


def zero_sums() -> tuple[Float[Array, ""], Int[Array, ""]]:
    """For one device: the loss sum and the token count that a scan starts from."""
    return mark_varying((jnp.float32(0), jnp.int32(0)), ("data", "fsdp"))


def on_each_device(function: Callable, mesh: Mesh, dtype: jnp.dtype, in_specs: Any, out_specs: Any) -> Callable:
    """`function`, which is written for one device, as a function of whole arrays: in `jax.shard_map`, manual over all
    axes of the mesh. `dtype`: the type of its activations."""

    def with_precision(*arrays: Any) -> Any:
        # By default a product of float32 arrays rounds them: to bfloat16 on a TPU, to TF32 on a GPU from Ampere on.
        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else None):
            return function(*arrays)

    if mesh.size == 1:  # XLA on CPU copies whatever a collective among one device takes
        return with_precision
    return jax.shard_map(with_precision, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def make_train_step(
    config: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh,
    abstract_state: TrainState,
    optimizer: optax.GradientTransformationExtraArgs,
    rates: Mapping[str, Schedule],
    clip_norm: float,
    diagnose: DiagnosticsConfig | None = None,
    deterministic: bool = True,
) -> TrainStep:
    """`train_step(state, batch) -> (state, metrics)`, jitted. `state` lies as `abstract_state` says, and is donated.

    Metrics are scalars: `loss` (nats a valid token), `grad_norm` (before the clip), `grad_norms` and `learning_rate`
    (of each group), `valid_tokens`, and `skipped_steps`: how many so far changed nothing, for want of a valid token or
    of a finite gradient; and, if it is to `diagnose`, `diagnostics` (training/diagnostics.py) with these options.
    `deterministic`: the same bits in every execution, on GPUs too.
    """
    graphdef, _ = split_model(config, dtype)
    tables = map_parameters(lambda param: isinstance(param, Table), config)
    groups = jax.tree.leaves(parameter_groups(config))
    placed = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    specs = jax.tree.map(lambda sharding: sharding.spec, placed.params)
    layout = Layout.of(specs, groups)

    def gradient_sums(params: dict, batch: Batch, metric: Metric) -> tuple[Array, Array, dict, UnitSums | None]:
        """For one device: (loss_sum, token_count, gradient of loss_sum) of the whole step, and sums over its units.

        `params` are its float32 shares, `batch` its rows [K, B / (data fsdp), T]; the gradient comes in like shares.
        """
        compute_params = all_gather_data(params, specs, dtype)
        metric = all_gather_data(metric, metric_specs, dtype)

        def micro_batch(sums: tuple, rows: Batch) -> tuple[tuple, Units | None]:
            # Widened so that gradients are float32 (model/layers.py); the compiler drops the round trip of types.
            wide = jax.tree.map(lambda p: p.astype(jnp.float32), compute_params)
            loss_before, tokens_before, so_far, *before = sums

            def loss(params: dict) -> tuple[Array, Array]:
                model = nnx.merge(graphdef, params)
                accumulate_onto(nnx.merge(graphdef, so_far), model)
                return loss_sums(model, **rows)

            (loss_sum, tokens), gradients = jax.value_and_grad(loss, has_aux=True)(wide)
            summed = jax.tree.map(lambda table, a, g: g if table else a + g, tables, so_far, gradients)
            sums = loss_before + loss_sum, tokens_before + tokens, summed
            if not diagnose:
                return sums, None
            own = jax.tree.map(lambda table, a, g: g - a if table else g, tables, so_far, gradients)
            return (*sums, *(own for _ in before)), unit(tokens, own, summed, layout, metric, *before)

        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), compute_params)
        kept = (zeros,) if diagnose and diagnose.successive else ()
        (loss_sum, tokens, gradients, *_), units = jax.lax.scan(micro_batch, (*zero_sums(), zeros, *kept), batch)
        whole = reduce_scatter_data(gradients, specs)
        return *psum((loss_sum, tokens), ("data", "fsdp")), whole, sum_units(units) if units else None

    everywhere = PartitionSpec()
    metric_of = lambda opt_state: adam_metric(opt_state, layout, dtype) if diagnose and diagnose.adam_metric else {}
    metric_specs = {i: layout.specs[i] for i in jax.eval_shape(metric_of, abstract_state.opt_state)}
    summed = on_each_device(
        gradient_sums, mesh, dtype, (specs, ROWS, metric_specs), (everywhere, everywhere, specs, everywhere)
    )

    # With the shardings given: the compiler could choose others, which the next step would not take.
    @partial(jax.jit, donate_argnums=0, out_shardings=(placed, None), compiler_options=xla_options(mesh, deterministic))
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        metric = metric_of(state.opt_state)
        loss_sum, tokens, gradients, units = summed(state.params, batch, metric)
        whole = gradients = jax.tree.map(lambda g: g / jnp.maximum(tokens, 1), gradients)
        leaves = jax.tree.leaves(gradients)
        grad_norms = {name: optax.tree.norm([g for g, of in zip(leaves, groups) if of == name]) for name in rates}
        grad_norm = optax.tree.norm(grad_norms)
        sound = (tokens > 0) & jnp.isfinite(grad_norm)
        clip = jnp.minimum(1.0, clip_norm / jnp.maximum(grad_norm, 1e-30))
        gradients = jax.tree.map(lambda g: clip * g, gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params, step=state.step)
        params = optax.apply_updates(state.params, updates)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(sound, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        metrics = {
            "loss": loss_sum / jnp.maximum(tokens, 1),
            "grad_norm": grad_norm,
            "grad_norms": grad_norms,
            "valid_tokens": tokens,
            "learning_rate": {group: rate(state.step) for group, rate in rates.items()},
            "skipped_steps": state.skipped_steps + jnp.where(sound, 0, 1),
        }
        if units is not None:
            metrics["diagnostics"] = measure(
                whole, tokens, units, clip, state.params, updates, opt_state, layout, metric
            )
        return TrainState(state.step + 1, params, opt_state, metrics["skipped_steps"]), metrics

    return train_step


def make_eval_step(config: ModelConfig, dtype: jnp.dtype, mesh: Mesh) -> EvalStep:
    """`eval_step(params, batch) -> (loss_sum, token_count)` over a whole batch [K, B, T], jitted; without z-loss."""
    graphdef, _ = split_model(config, dtype)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, abstract_params(config, mesh))

    def sums(params: dict, batch: Batch) -> tuple[Array, Array]:
        model = nnx.merge(graphdef, all_gather_data(params, specs, dtype))
        model.config = replace(config, z_loss=0.0)
        micro_batch = lambda sums, rows: (jax.tree.map(jnp.add, sums, loss_sums(model, **rows)), None)
        return psum(jax.lax.scan(micro_batch, zero_sums(), batch)[0], ("data", "fsdp"))

    return jax.jit(on_each_device(sums, mesh, dtype, (specs, ROWS), PartitionSpec()))
