"""One optimizer step: sum over tokens, divide once.

    cast, all-gather  parameters to the compute type, then over `data`                once a step
    scan              K micro-batches: float32 sums of gradients, losses, tokens      no communication over `data`
    reduce-scatter    the sums over `data`; each device keeps its share               once a step
    divide, clip      by the step's valid tokens; by the global norm                  once a step
    update            one tick of the optimizer and of every schedule                 once a step

Everything up to the reduction is written for one device (`jax.shard_map`), so what crosses the mesh, and when, is
decided here and in model/parallel.py, and not by a compiler pass.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from configs.schema import DiagnosticsConfig, ModelConfig
from model.loss import loss_sums
from model.parallel import BATCH_AXES, in_shard_map, mark_varying, psum, psum_scatter
from model.shapes import DATA
from training.diagnostics import Layout, Metric, Units, UnitSums, adam_metric, measure, sum_units, unit
from training.layout import Place
from training.mesh import ROWS, joined, parameter_places, parted, spec_of, xla_options
from training.optimizer import parameter_groups
from training.schedule import Schedule
from training.state import TrainState, split_model

ACROSS, WITHIN = DATA[0], DATA[1:]


class Batch(TypedDict):
    """A step's rows: K micro-batches of B rows of T tokens."""

    inputs: Int[Array, "K B T"]
    targets: Int[Array, "K B T"]
    weights: Float[Array, "K B T"]
    segment_ids: NotRequired[Int[Array, "K B T"]]


Metrics = dict[str, Any]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
EvalStep = Callable[[dict, Batch], tuple[Float[Array, "K"], Int[Array, "K"]]]


def all_gather_data(params: dict, places: dict, dtype: jnp.dtype) -> dict:
    """For one device: its shares of the parameters cast to the compute type and all-gathered over `data`, each as the
    network divides it over `fsdp` and `tensor`, without padding."""

    def whole(share: Array, place: Place) -> Array:
        # Single numbers keep their type: they cost nothing, and what they multiply is large.
        share = share if share.ndim == 1 else share.astype(dtype)
        if not in_shard_map():
            return share
        # First between slices or nodes: their slow links carry each device's share alone.
        if jax.lax.axis_size(ACROSS) > 1:
            share = jax.lax.all_gather(share, ACROSS, axis=place.dimension(ACROSS), tiled=True)
        if jax.lax.axis_size(WITHIN) > 1:
            share = joined(jax.lax.all_gather(share, WITHIN), factors_within(place))
        for axis, dimension, start, size in padded_dimensions(place):
            if axis:
                share = jax.lax.all_gather(share, axis, axis=dimension, tiled=True)
            share = jax.lax.dynamic_slice_in_dim(share, start, size, dimension)
        # Marked here, outside of the scan: otherwise every micro-batch would end in a psum of the gradient.
        return mark_varying(share, replicated_axes(place))

    return jax.tree.map(whole, params, places)


def reduce_scatter_data(gradients: dict, places: dict) -> dict:
    """For one device: the gradients padded as their parameters are and reduce-scattered over `data`; summed over `fsdp`
    too where that divides nothing."""

    def share(gradient: Array, place: Place) -> Array:
        if not in_shard_map():
            return gradient
        for axis, dimension, start, size in padded_dimensions(place):
            widths = [(0, place.stored[dimension] - size if i == dimension else 0) for i in range(gradient.ndim)]
            gradient = jnp.pad(gradient, widths)
            if axis:
                gradient = psum_scatter(jnp.roll(gradient, start, dimension), axis, dimension)
        if jax.lax.axis_size(WITHIN) > 1:
            gradient = psum_scatter(parted(gradient, factors_within(place)), WITHIN, 0)[0]
        if jax.lax.axis_size(ACROSS) > 1:
            gradient = psum_scatter(gradient, ACROSS, place.dimension(ACROSS))
        return psum(gradient, replicated_axes(place))

    return jax.tree.map(share, gradients, places)


def factors_within(place: Place) -> list[tuple[int, int]]:
    """For one device: the sizes of the axes of `data` inside a slice or node, and the dimension that each divides."""
    return [(jax.lax.axis_size(axis), place.dimension(axis)) for axis in WITHIN]


def padded_dimensions(place: Place) -> Iterator[tuple[str | None, int, Array | int, int]]:
    """For one device, of each dimension that is padded: the axis that the network divides it over, if it has more than
    one device; the dimension; where this device's part of the parameter begins in it, and its size. Padding moves the
    borders between the devices along that axis, so the whole dimension is gathered to find them."""
    for dimension, (axis, size, stored) in enumerate(zip(place.axes, place.shape, place.stored)):
        if size == stored:
            continue
        if axis is None or jax.lax.axis_size(axis) == 1:
            yield None, dimension, 0, size
        else:
            part = size // jax.lax.axis_size(axis)
            yield axis, dimension, part * jax.lax.axis_index(axis), part


def replicated_axes(place: Place) -> tuple[str, ...]:
    """The axes along which this parameter is replicated though the rows of a batch are divided."""
    return () if "fsdp" in place.axes else ("fsdp",)


def zero_sums() -> tuple[Float[Array, ""], tuple[Float[Array, ""], Int[Array, ""]]]:
    """For one device: the sums of `loss_sums` that a scan starts from."""
    return mark_varying((jnp.float32(0), (jnp.float32(0), jnp.int32(0))), BATCH_AXES)


def on_each_device(function: Callable, mesh: Mesh, dtype: jnp.dtype, in_specs: Any, out_specs: Any) -> Callable:
    """`function`, which is written for one device, as a function of whole arrays: in `jax.shard_map`, manual over all
    axes of the mesh. `dtype`: the type of its activations."""

    @wraps(function)
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

    Metrics are scalars: `loss` (nats a valid token), `z_loss` (what it adds, if it is on), `grad_norm` (before the
    clip), `grad_norms` and `learning_rate` (of each group), `valid_tokens`, and `skipped_steps`: how many so far
    changed nothing, for want of a valid token or of a finite gradient; and, if it is to `diagnose`, `diagnostics`
    (training/diagnostics.py) with these options.
    `deterministic`: the same bits in every execution, on GPUs too.
    """
    graphdef, _ = split_model(config, dtype)
    groups = jax.tree.leaves(parameter_groups(config))
    placed = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    places = parameter_places(config, mesh)
    specs = jax.tree.map(spec_of, places)
    layout = Layout.of(places, groups)
    tables = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "table", places)

    def gradient_sums(params: dict, batch: Batch, metric: Metric) -> tuple[tuple, dict, UnitSums | None]:
        """For one device: the sums of `loss_sums` and the objective's gradient of the whole step, and sums over units.

        `params` are its float32 shares, `batch` its rows [K, B / (data fsdp), T]; the gradient comes in like shares.
        """
        compute_params = all_gather_data(params, places, dtype)
        metric = all_gather_data(metric, metric_places, dtype)

        def micro_batch(sums: tuple, rows: Batch) -> tuple[tuple, Units | None]:
            # Widened so that gradients are float32 (model/layers.py); the compiler drops the round trip of types.
            wide = jax.tree.map(lambda p: p.astype(jnp.float32), compute_params)
            losses, so_far, *before = sums
            loss = lambda params: loss_sums(nnx.merge(graphdef, params), **rows)
            of_rows, gradients = jax.value_and_grad(loss, has_aux=True)(wide)
            summed = jax.tree.map(jnp.add, so_far, gradients)
            sums = jax.tree.map(jnp.add, losses, of_rows), summed
            if not diagnose:
                return sums, None
            _, (_, tokens) = of_rows
            # XLA scatters a table's gradient into the sum, unless something else reads it: then it rounds otherwise.
            own = jax.tree.map(lambda table, a, s, g: s - a if table else g, tables, so_far, summed, gradients)
            return (*sums, *(own for _ in before)), unit(tokens, own, summed, layout, metric, *before)

        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), compute_params)
        kept = (zeros,) if diagnose and diagnose.successive else ()
        (losses, gradients, *_), units = jax.lax.scan(micro_batch, (zero_sums(), zeros, *kept), batch)
        whole = reduce_scatter_data(gradients, places)
        return psum(losses, BATCH_AXES), whole, sum_units(units) if units else None

    everywhere = PartitionSpec()
    metric_of = lambda opt_state: adam_metric(opt_state, layout, dtype) if diagnose and diagnose.adam_metric else {}
    metric_places = {i: layout.places[i] for i in jax.eval_shape(metric_of, abstract_state.opt_state)}
    metric_specs = jax.tree.map(spec_of, metric_places)
    summed = on_each_device(gradient_sums, mesh, dtype, (specs, ROWS, metric_specs), (everywhere, specs, everywhere))

    # With the shardings given: the compiler could choose others, which the next step would not take.
    @partial(jax.jit, donate_argnums=0, out_shardings=(placed, None), compiler_options=xla_options(mesh, deterministic))
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        metric = metric_of(state.opt_state)
        (objective, (loss_sum, tokens)), gradients, units = summed(state.params, batch, metric)
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
        if config.z_loss:
            metrics["z_loss"] = (objective - loss_sum) / jnp.maximum(tokens, 1)
        if units is not None:
            metrics["diagnostics"] = measure(
                whole, tokens, units, clip, state.params, updates, opt_state, layout, metric
            )
        return TrainState(state.step + 1, params, opt_state, metrics["skipped_steps"]), metrics

    return train_step


def make_eval_step(config: ModelConfig, dtype: jnp.dtype, mesh: Mesh) -> EvalStep:
    """Return `eval_step(params, batch) -> (loss_sums, token_counts)`, jitted: of each micro-batch of [K, B, T], without
    z-loss."""
    graphdef, _ = split_model(config, dtype)
    places = parameter_places(config, mesh)

    def sums(params: dict, batch: Batch) -> tuple[Array, Array]:
        model = nnx.merge(graphdef, all_gather_data(params, places, dtype))
        _, (_, losses) = jax.lax.scan(lambda _, rows: ((), loss_sums(model, **rows)), (), batch)
        return psum(losses, BATCH_AXES)

    return jax.jit(on_each_device(sums, mesh, dtype, (jax.tree.map(spec_of, places), ROWS), PartitionSpec()))
