"""Learning rates as functions of the step number, without a counter that could drift; and configs scaled to other
rates or to another batch."""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from configs.schema import Config, ScheduleConfig, options, with_options

Schedule = Callable[[Num[Array, ""] | int], Float[Array, ""]]
Rule = Literal["root", "linear"]


def make_schedule(config: ScheduleConfig, steps: int) -> Schedule:
    """Return the factor of the peak rate at step 0 <= t < steps: in (0, 1]. It reaches `final` at t = steps."""

    def schedule(step: Num[Array, ""] | int) -> Float[Array, ""]:
        t = jnp.asarray(step, jnp.float32)
        rise = jnp.minimum(1.0, (t + 1) / max(config.warmup_steps, 1))
        if config.kind == "constant":
            return rise
        if config.kind == "warmup_cosine":
            progress = jnp.clip((t - config.warmup_steps) / max(steps - config.warmup_steps, 1), 0, 1)
            fall = 0.5 * (1 + jnp.cos(jnp.pi * progress))
        else:
            fall = jnp.clip((steps - t) / max(config.warmdown * steps, 1), 0, 1)
        return rise * (config.final + (1 - config.final) * fall)

    return schedule


def with_rates(config: Config, factor: float) -> Config:
    """Return the config with every group's peak rate times `factor`."""
    return each(config, "peak_rate", lambda rate: rate * factor)


def for_batch(config: Config, factor: float, rule: Rule) -> Config:
    """Return the config with rates and second moments for `factor` times as many tokens per step. Rates are scaled by
    the factor's root or by the factor (`linear`). Second moments keep their half-life in tokens: beta2 to the power of
    the factor (arXiv:2507.07101). First moments and decay are unchanged."""
    config = with_rates(config, factor if rule == "linear" else factor**0.5)
    return each(config, "beta2", lambda beta2: beta2**factor)


def each(config: Config, field: str, change: Callable) -> Config:
    """Return the config with every option of the optimizer of this name changed."""
    values = options(config.optimizer, "optimizer.")
    return with_options(config, {n: change(value) for n, value in values.items() if n.rpartition(".")[2] == field})
