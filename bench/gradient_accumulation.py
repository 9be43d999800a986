"""What goes wrong in gradient accumulation, measured: the figures and plots of docs/gradient-accumulation.md.

    python -m bench.gradient_accumulation types      # optax issue 1567: bfloat16 parameters under optax.MultiSteps
    python -m bench.gradient_accumulation means      # the mean of micro-batch means against the sum over tokens
    python -m bench.gradient_accumulation notebook   # optax's own notebook: 9 examples at once, or 3 times 3

A network of 1.8 M parameters (depth 4, width 128, vocabulary 4096) on rows of 128 tokens of the standard library.
"""

import argparse
import json
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from configs.schema import (
    BatchConfig,
    Config,
    DataConfig,
    GroupConfig,
    MatricesConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    UserError,
)
from data.dataset import open_text
from data.loader import StepBatches
from hosts.runtime import cache_dir, run_command, start_jax
from model.loss import loss_sums
from training.build import build
from training.optimizer import parameter_groups, peak_rates
from training.schedule import make_schedule
from training.state import split_model

SCHEDULE = ScheduleConfig("warmup_cosine", warmup_steps=20, final=0.1)
GROUP = partial(GroupConfig, beta1=0.9, beta2=0.95, eps=1e-8, schedule=SCHEDULE)
CONFIG = Config(
    name="gradient-accumulation",
    steps=200,
    model=ModelConfig(depth=4, width=128, heads=4, kv_heads=4, head_dim=32, vocab_size=4096, dtype="float32"),
    batch=BatchConfig(sequence_length=128, tokens_per_step=4096, rows_per_device=8),  # K = 4
    # Layerwise rates in the proportions of the issue's.
    optimizer=OptimizerConfig(
        embed=GROUP(peak_rate=3e-3),
        lm_head=GROUP(peak_rate=3e-4),
        matrices=MatricesConfig(3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, schedule=SCHEDULE),
    ),
)
DTYPE = jnp.dtype("float32")


class Experiment:
    """The network, its batches and its held-out rows, the same for every way of accumulating."""

    def __init__(self, config: Config):
        self.config = config
        self.built = build(config, jax.devices()[:1])
        self.graphdef, _ = split_model(config.model, DTYPE)
        shape = self.built.batch_shape
        text = open_text(DataConfig(), config.model.vocab_size, shape[2], shape[0] * shape[1], cache_dir())
        self.batches = StepBatches(text.train, text.mixture, config.seed, shape, np.arange(shape[1]))
        (val,) = text.val
        rows = [val[i * len(val) // 128] for i in range(128)]
        self.held_out = {name: jnp.stack([row[name] for row in rows]) for name in rows[0]}
        self.measure = jax.jit(self.mean_loss)

    def mean_loss(self, params: dict, rows: dict) -> Float[Array, ""]:
        """Nats a valid token over all rows [B, T], as every other trainer writes it."""
        _, (loss_sum, tokens) = loss_sums(nnx.merge(self.graphdef, params), **rows)
        return loss_sum / tokens

    def ours(self, reweigh: Callable[[dict], Any] = lambda batch: batch) -> tuple[list[float], dict]:
        """Training through this project's step: held-out losses every 10 steps, and the parameters."""
        config = self.config
        state = self.built.create_state()
        losses = []
        for i in range(config.steps):
            state, _ = self.built.train_step(state, reweigh(self.batches[i]))
            if i % 10 == 9:
                losses.append(float(self.measure(state.params, self.held_out)))
        return losses, state.params

    def plain(self, params_dtype: str, moments: str, wrap: Callable, micro_batches: int) -> tuple[list[float], list]:
        """Training as the issue does: parameters of one type, optax's AdamW for each group, one mean loss a call.

        Every 10 steps: the held-out loss, and the share of parameters whose update was not zero but changed nothing.
        """
        config = self.config
        params = self.built.create_state().params
        params = jax.tree.map(lambda p: p.astype(params_dtype), params)
        transform = wrap(plain_adamw(config, moments))
        state = transform.init(params)

        @partial(jax.jit, donate_argnums=(0, 1))
        def update(params: Any, state: optax.OptState, rows: dict) -> tuple[Any, Any, Any]:
            gradients = jax.grad(self.mean_loss)(params, rows)
            updates, state = transform.update(gradients, state, params)
            moved = optax.apply_updates(params, updates)
            lost = jax.tree.map(lambda new, old, u: jnp.sum((new == old) & (u != 0)), moved, params, updates)
            return moved, state, sum(jax.tree.leaves(lost)) / sum(p.size for p in jax.tree.leaves(params))

        losses, lost = [], []
        for i in range(config.steps):
            batch = self.batches[i]
            parts = {name: array.reshape(micro_batches, -1, array.shape[-1]) for name, array in batch.items()}
            for k in range(micro_batches):
                params, state, share = update(params, state, {name: array[k] for name, array in parts.items()})
            if i % 10 == 9:
                lost.append(float(share))
                losses.append(float(self.measure(jax.tree.map(lambda p: p.astype(DTYPE), params), self.held_out)))
        return losses, lost


def plain_adamw(config: Config, moments: str) -> optax.GradientTransformation:
    """optax.adamw for each group with the config's rates; both moments in the type `moments`."""

    def group(name: str) -> optax.GradientTransformation:
        options: GroupConfig = getattr(config.optimizer, name)
        peak, schedule = peak_rates(config.optimizer, config.model.width)[name], make_schedule(SCHEDULE, config.steps)
        adam = optax.scale_by_adam(options.beta1, options.beta2, options.eps)
        in_type = optax.GradientTransformation(  # both moments take their type from what they are given
            lambda params: adam.init(optax.tree.cast(params, moments)),
            lambda updates, state, params=None: adam.update(optax.tree.cast(updates, moments), state, params),
        )
        decay = optax.add_decayed_weights(options.weight_decay)
        return optax.chain(
            in_type, decay, optax.scale_by_learning_rate(lambda count: peak * schedule(jnp.asarray(count)))
        )

    groups = parameter_groups(config.model)
    by_group = optax.partition({name: group(name) for name in set(jax.tree.leaves(groups))}, groups)
    return optax.chain(optax.clip_by_global_norm(config.optimizer.clip_norm), by_group)


def types(steps: int) -> dict:
    """Part (a): what makes the issue's run stick, one type changed at a time."""
    experiment = Experiment(replace(CONFIG, steps=steps))
    multi = lambda accumulator: lambda adamw: optax.MultiSteps(adamw, 4, accumulator_dtype=jnp.dtype(accumulator))
    alone = lambda adamw: adamw
    runs = {
        "tokensum, K = 4": experiment.ours,
        "float32 throughout, MultiSteps(4)": partial(experiment.plain, "float32", "float32", multi("float32"), 4),
        "bfloat16 accumulator": partial(experiment.plain, "float32", "float32", multi("bfloat16"), 4),
        "bfloat16 moments": partial(experiment.plain, "float32", "bfloat16", multi("float32"), 4),
        "bfloat16 parameters": partial(experiment.plain, "bfloat16", "float32", multi("float32"), 4),
        "bfloat16 all three (the issue)": partial(experiment.plain, "bfloat16", "bfloat16", multi("bfloat16"), 4),
        "bfloat16 parameters and moments, no MultiSteps": partial(experiment.plain, "bfloat16", "bfloat16", alone, 1),
    }
    results = {}
    for name, run in runs.items():
        losses, lost = run()
        results[name] = {"losses": losses, "lost": lost if isinstance(lost, list) else []}
        updates = f", {lost[-1]:.0%} of the updates lost" if isinstance(lost, list) else ""
        print(f"{name}: held-out loss {losses[-1]:.4f}{updates}", flush=True)
    return results


def ragged(batch: dict, seed: int, power: float) -> dict:
    """The batch with a random part of each row valid: a share u^power of it, u uniform; at least one token."""
    length = batch["weights"].shape[-1]
    shares = np.random.default_rng(seed).uniform(size=batch["weights"].shape[:-1]) ** power
    valid = np.maximum(np.ceil(shares * length), 1)
    return {**batch, "weights": (np.arange(length) < valid[..., None]).astype(np.float32)}


def means(batch: dict) -> dict:
    """Weights that make the step compute the mean of its micro-batches' means: N / (K n_k) for the k-th's tokens."""
    weights = batch["weights"]
    counts = weights.sum(axis=(1, 2), keepdims=True)
    return {**batch, "weights": weights * counts.sum() / (len(counts) * counts)}


def means_against_sums(steps: int) -> dict:
    """Part (b): the gradient's error by rows of a micro-batch and spread of lengths, and both rules' loss curves."""
    config = replace(CONFIG, steps=steps, batch=replace(CONFIG.batch, rows_per_device=2))  # K = 16 micro-batches of 2
    experiment = Experiment(config)
    curves = {}
    curves["sum over tokens"], params = experiment.ours(lambda batch: ragged(batch, int(batch["inputs"].sum()), 3))
    curves["mean of means"], _ = experiment.ours(lambda batch: means(ragged(batch, int(batch["inputs"].sum()), 3)))

    @jax.jit
    def gradient(params: dict, batch: dict) -> Float[Array, "parameters"]:
        rows = {name: array.reshape(-1, array.shape[-1]) for name, array in batch.items()}
        loss = lambda params: loss_sums(nnx.merge(experiment.graphdef, params), **rows)[0]
        return jnp.concatenate([g.ravel() for g in jax.tree.leaves(jax.grad(loss)(params))])

    errors: dict[str, list[float]] = {}
    for label, power in (("10% to 100%", None), ("u", 1.0), ("u^3", 3.0)):
        for rows in (1, 2, 4, 8, 16, 32):
            found = []
            for seed in range(4):
                batch = {name: array.reshape(32 // rows, rows, -1) for name, array in experiment.batches[seed].items()}
                batch = ragged(batch, seed, power or 1.0)
                if power is None:
                    valid = np.random.default_rng(seed).uniform(0.1, 1, batch["weights"].shape[:-1]) * 128
                    batch["weights"] = (np.arange(128) < valid[..., None]).astype(np.float32)
                exact = gradient(params, batch)
                found.append(float(jnp.linalg.norm(gradient(params, means(batch)) - exact) / jnp.linalg.norm(exact)))
            errors.setdefault(label, []).append(float(np.mean(found)))
        print(f"lengths {label}: relative error of the gradient {[f'{e:.3f}' for e in errors[label]]}", flush=True)
    for name, losses in curves.items():
        print(f"{name}: held-out loss {losses[-1]:.4f}", flush=True)
    return {"curves": curves, "errors": errors}


def notebook(schedule: str) -> float:
    """Part (c): the relative difference, after 2 updates, of 9 rows through our step with K = 3, and of 3 x 3 rows
    under MultiSteps(3) over their means; `schedule` is a ScheduleConfig kind, counted in updates by both."""
    # An eps above the gradients' rounding, which Adam would otherwise blow up to whole updates.
    group = GroupConfig(peak_rate=0.01, eps=1e-4, schedule=ScheduleConfig(schedule, warmup_steps=0, warmdown=1.0))  # pyright: ignore
    config = replace(
        CONFIG,
        steps=4,
        batch=BatchConfig(sequence_length=16, tokens_per_step=144, rows_per_device=3),
        optimizer=OptimizerConfig(group, MatricesConfig(**vars(group)), group, clip_norm=1e9),
    )
    built = build(config, jax.devices()[:1])
    graphdef, _ = split_model(config.model, DTYPE)
    state = built.create_state()
    generator = np.random.default_rng(0)
    params = jax.tree.map(lambda p: p + 0.05 * generator.standard_normal(p.shape, np.float32), state.params)
    state = state._replace(params=jax.tree.map(jnp.array, params))
    peaks, course = peak_rates(config.optimizer, config.model.width), make_schedule(group.schedule, config.steps)
    groups = parameter_groups(config.model)
    adamw: dict[Hashable, optax.GradientTransformation] = {
        name: optax.adamw(lambda count, p=peak: p * course(jnp.asarray(count)), 0.8, 0.95, 1e-4, weight_decay=0.0)
        for name, peak in peaks.items()
    }
    theirs = optax.MultiSteps(optax.partition(adamw, groups), 3)
    their_state = theirs.init(params)

    @jax.jit
    def update(params: dict, state: optax.MultiStepsState, rows: dict) -> tuple:
        def mean(params: dict) -> Array:
            objective, (_, tokens) = loss_sums(nnx.merge(graphdef, params), **rows)
            return objective / tokens

        updates, state = theirs.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        tokens = generator.integers(0, config.model.vocab_size, (2, 3, 3, 16), np.int32)
        batch: Any = {"inputs": tokens[0], "targets": tokens[1], "weights": np.ones((3, 3, 16), np.float32)}
        state, _ = built.train_step(state, batch)
        for k in range(3):
            params, their_state = update(params, their_state, {name: array[k] for name, array in batch.items()})
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, state.params, params))
    return float(difference / optax.tree.norm(params))


def plot_types(results: dict, path: Path) -> None:
    """Held-out losses of part (a), from the middle on, and what share of the updates was lost."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, run in sorted(results.items(), key=lambda item: -item[1]["losses"][-1]):
        losses, lost = run["losses"], run["lost"]
        steps, style = 10 * np.arange(1, len(losses) + 1), "--" if "no Multi" in name or "tokensum" in name else "-"
        half = len(losses) // 2
        (line,) = left.plot(steps[half:], losses[half:], style, label=f"{losses[-1]:.3f}  {name}")
        if lost:
            right.plot(steps, lost, style, color=line.get_color())
    left.set(xlabel="optimizer steps of 4,096 tokens", ylabel="nats a token", title="Held-out loss, second half")
    right.set(
        xlabel="optimizer steps", ylabel="share of all parameters", title="Updates too small to change their parameter"
    )
    left.legend(fontsize=7)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def plot_means(results: dict, path: Path) -> None:
    """Errors and loss curves of part (b)."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label, errors in results["errors"].items():
        shown = [(rows, error) for rows, error in zip((1, 2, 4, 8, 16, 32), errors) if error > 1e-5]
        left.plot(*zip(*shown), marker="o", label=f"valid share of a row: {label}")
    left.set(xscale="log", yscale="log", xlabel="rows of a micro-batch, of 32 a step", ylabel="relative error")
    left.set_title("Gradient: mean of means against token sums")
    for name, losses in results["curves"].items():
        right.plot(10 * np.arange(1, len(losses) + 1), losses, label=f"{losses[-1]:.3f}  {name}")
    right.set(xlabel="optimizer steps", ylabel="held-out loss (nats a token)", title="16 micro-batches of 2 rows, u^3")
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["types", "means", "notebook"])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each training run")
    parser.add_argument("--out", type=Path, default=Path("runs/gradient-accumulation"), help="folder of the results")
    arguments = parser.parse_args()
    if arguments.steps < 10:
        raise UserError(f"--steps={arguments.steps} cannot work: the held-out loss is measured every 10 steps")
    start_jax()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.part == "notebook":
        results = {kind: notebook(kind) for kind in ("constant", "warmup_cosine", "warmup_constant_warmdown")}
        print(json.dumps(results))
    elif arguments.part == "types":
        results = types(arguments.steps)
        plot_types(results, arguments.out / "gradient-accumulation-types.png")
    else:
        results = means_against_sums(arguments.steps)
        plot_means(results, arguments.out / "gradient-accumulation-means.png")
    (arguments.out / f"{arguments.part}.json").write_text(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    run_command(main)
