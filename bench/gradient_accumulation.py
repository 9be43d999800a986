"""Measure what goes wrong in gradient accumulation: figures of docs/fine-tuning.md.

    python -m bench.gradient_accumulation   # optax issue 1567: bfloat16 parameters under optax.MultiSteps

A network of 1.8 M parameters (depth 4, width 128, vocabulary 4096) learns rows of 128 tokens of the standard library.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from data.dataset import open_text
from data.loader import StepBatches
from hosts.runtime import cache_dir, run_command, start_jax
from model.loss import loss_sums
from options.command_line import parse_arguments
from options.schema import (
    BatchConfig,
    Config,
    DataConfig,
    GroupConfig,
    MatricesConfig,
    ModelConfig,
    OptimizerConfig,
    Positive,
    ScheduleConfig,
)
from training.build import build
from training.optimizer import make_schedule, parameter_groups, peak_rates
from training.sharded import split_model

SCHEDULE = ScheduleConfig("warmup_cosine", warmup_steps=20, final=0.1)
GROUP = partial(GroupConfig, beta1=0.9, beta2=0.95, eps=1e-8)
CONFIG = Config(
    name="gradient-accumulation",
    steps=200,
    model=ModelConfig(depth=4, width=128, heads=4, kv_heads=4, head_dim=32, vocab_size=4096, dtype="float32"),
    batch=BatchConfig(sequence_length=128, tokens_per_step=4096, rows_per_device=8),  # K = 4
    # Layerwise rates in the proportions of the issue's.
    optimizer=OptimizerConfig(
        embed=GROUP(peak_rate=3e-3),
        lm_head=GROUP(peak_rate=3e-4),
        matrices=MatricesConfig(3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1),
        schedule=SCHEDULE,
    ),
)
DTYPE = jnp.dtype("float32")


@dataclass(frozen=True)
class Arguments:
    """The length of the measurement."""

    steps: Positive[int] = 200
    """Optimizer steps of each training run."""


def mean_loss(graphdef: Any, params: dict, rows: dict) -> Float[Array, ""]:
    """Return the nats a valid token over all rows [B, T], as every other trainer computes it."""
    loss, tokens = loss_sums(nnx.merge(graphdef, params), **rows)
    return loss / tokens


def plain_update(graphdef: Any, transform: Any) -> Callable[[Any, Any, dict], tuple]:
    """Return a jitted update of parameters and optax state by the mean loss of rows. It also returns the share of the
    parameters whose update was not zero but changed nothing."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, rows: dict) -> tuple[Any, Any, Any]:
        gradients = jax.grad(partial(mean_loss, graphdef))(params, rows)
        updates, state = transform.update(gradients, state, params)
        moved = optax.apply_updates(params, updates)
        lost = jax.tree.map(lambda new, old, u: jnp.sum((new == old) & (u != 0)), moved, params, updates)
        return moved, state, sum(jax.tree.leaves(lost)) / sum(p.size for p in jax.tree.leaves(params))

    return update


class Experiment:
    """The network, its batches and its held-out rows, equal for every way of accumulating."""

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

    def held_out_loss(self, params: dict) -> float:
        params = jax.tree.map(lambda p: p.astype(DTYPE), params)
        return float(jax.jit(partial(mean_loss, self.graphdef))(params, self.held_out))

    def ours(self) -> dict:
        """Train through this project's step. Return the parameters."""
        state = self.built.create_state()
        for i in range(self.config.steps):
            batch: Any = self.batches[i]
            state, _ = self.built.train_step(state, batch)
        return state.params

    def plain(self, params_type: str, moments: str, accumulator: str, micro_batches: int = 4) -> tuple[dict, float]:
        """Train as in the issue: parameters of one type, optax's AdamW for each group, one mean loss per call, and
        optax.MultiSteps over several micro-batches. Return the parameters, and the share that the last update lost."""
        params = jax.tree.map(lambda p: p.astype(params_type), self.built.create_state().params)
        transform = plain_adamw(self.config, moments)
        if micro_batches > 1:
            transform = optax.MultiSteps(transform, micro_batches, accumulator_dtype=jnp.dtype(accumulator))
        state, update, lost = transform.init(params), plain_update(self.graphdef, transform), 0.0
        for i in range(self.config.steps):
            batch = self.batches[i]
            parts = {name: array.reshape(micro_batches, -1, array.shape[-1]) for name, array in batch.items()}
            for k in range(micro_batches):
                params, state, lost = update(params, state, {name: array[k] for name, array in parts.items()})
        return params, float(lost)


def plain_adamw(config: Config, moments: str = "float32") -> optax.GradientTransformation:
    """Return optax's AdamW for each group with the config's options, with both moments in the type `moments`."""

    def group(name: str) -> optax.GradientTransformation:
        options: GroupConfig = getattr(config.optimizer, name)
        peak = peak_rates(config.optimizer, config.model.width)[name]
        schedule = make_schedule(config.optimizer.schedule, config.steps)
        adam = optax.scale_by_adam(options.beta1, options.beta2, options.eps)
        in_type = optax.GradientTransformation(  # both moments take the type of their input
            lambda params: adam.init(optax.tree.cast(params, moments)),
            lambda updates, state, params=None: adam.update(optax.tree.cast(updates, moments), state, params),
        )
        decay = optax.add_decayed_weights(options.weight_decay)
        rate = optax.scale_by_learning_rate(lambda count: peak * schedule(jnp.asarray(count)))
        return optax.chain(in_type, decay, rate)

    groups = parameter_groups(config.model)
    by_group = optax.partition({name: group(name) for name in set(jax.tree.leaves(groups))}, groups)
    return optax.chain(optax.clip_by_global_norm(config.optimizer.clip_norm), by_group)


def types(steps: int) -> dict:
    """Return the held-out loss, and the share of updates that changed nothing, with one type changed at a time."""
    experiment = Experiment(replace(CONFIG, steps=steps))
    runs = {
        "float32 throughout, MultiSteps(4)": ("float32", "float32", "float32"),
        "bfloat16 accumulator": ("float32", "float32", "bfloat16"),
        "bfloat16 moments": ("float32", "bfloat16", "float32"),
        "bfloat16 parameters": ("bfloat16", "float32", "float32"),
        "bfloat16 all three (the issue)": ("bfloat16", "bfloat16", "bfloat16"),
        "bfloat16 parameters and moments, no MultiSteps": ("bfloat16", "bfloat16", "", 1),
    }
    results = {"tokensum, K = 4": {"loss": experiment.held_out_loss(experiment.ours())}}
    for name, options in runs.items():
        params, lost = experiment.plain(*options)
        results[name] = {"loss": experiment.held_out_loss(params), "lost": lost}
        print(f"{name}: held-out loss {results[name]['loss']:.4f}, {lost:.0%} of the updates lost", flush=True)
    return results


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    start_jax()
    print(json.dumps(types(arguments.steps)))
    return 0


if __name__ == "__main__":
    run_command(main)
