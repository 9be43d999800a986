"""Learning rates as functions of the step number, without a counter that could drift."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from configs.schema import ScheduleConfig

Schedule = Callable[[Num[Array, ""] | int], Float[Array, ""]]


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
