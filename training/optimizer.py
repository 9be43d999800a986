"""The optimizer: one group for each kind of parameter, with AdamW, or Muon for the matrices, and their schedules."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Num

from model.gpt import map_parameters
from options.schema import GroupConfig, ModelConfig, MuonConfig, OptimizerConfig, ScheduleConfig, X0LambdasConfig
from system.errors import UserError
from training.muon import muon
from training.sharded import ShardedNetwork

Schedule = Callable[[Num[Array, ""] | int], Float[Array, ""]]
"""The learning rate of a step, as a function of its number alone: without a counter that could drift."""


def path_name(path: tuple) -> str:
    """Return the dotted name of a key path of a tree of parameters: `blocks.0.mlp.up.kernel`."""
    return ".".join(str(getattr(key, "key", key)) for key in path)


def parameter_groups(model: ModelConfig) -> dict:
    """Return a tree like the parameters', with the name of each one's group."""
    return map_parameters(lambda param: param.get_metadata("group"), model)


def group_names(config: OptimizerConfig) -> list[str]:
    """Return the names of all groups: the config's fields that are groups."""
    return [f.name for f in dataclasses.fields(config) if isinstance(getattr(config, f.name), GroupConfig)]


def peak_rates(config: OptimizerConfig, width: int) -> dict[str, float]:
    """Return each group's peak rate. Rates of tables and of the head are for width 768, and scale as width^-0.5."""
    scaled = lambda group: (width / 768) ** -0.5 if group in ("embed", "value_embeds", "lm_head") else 1.0
    peak = lambda group: config.rate_factor * group_config(config, group).peak_rate
    return {group: peak(group) * scaled(group) for group in group_names(config)}


def group_config(config: OptimizerConfig, group: str) -> GroupConfig | MuonConfig:
    """Return the options of a group."""
    return config.muon if group == "matrices" and config.matrices.kind == "muon" else getattr(config, group)


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


def scale_by_rate(rate: Schedule) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that multiplies by minus the rate at `step`, an argument of `update`. optax's own counts
    its calls, and would fall behind after a skipped step."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, *, step: Num[Array, ""]
    ) -> tuple[optax.Updates, optax.OptState]:
        factor = -rate(step)
        return jax.tree.map(lambda u: factor * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)  # pyright: ignore


class AdamState(NamedTuple):
    """Adam's state, float32."""

    mu: Any
    """First moments, in the parameters' shapes: weighted sums of the gradients so far."""
    nu: Any
    """Second moments: weighted sums of the gradients' squares."""
    mu_weight: Float[Array, ""]
    """The sum of the weights in `mu`."""
    nu_weight: Float[Array, ""]
    """The sum of the weights in `nu`."""


def scale_by_adam(beta1: float, beta2: float, eps: float) -> optax.GradientTransformation:
    """Return the transformation to Adam's direction (arXiv:1412.6980). It divides each moment by the sum of its
    weights, which the state keeps.

    With constant betas the sum is 1 - beta^updates, and this is optax.scale_by_adam. The next update may have others.
    """

    def init(params: optax.Params) -> AdamState:
        zeros = lambda: jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        return AdamState(zeros(), zeros(), jnp.float32(0), jnp.float32(0))

    def update(
        updates: optax.Updates, state: AdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AdamState]:
        mix = lambda beta, old, new: beta * old + (1 - beta) * new
        mu = jax.tree.map(lambda m, g: mix(beta1, m, g), state.mu, updates)
        nu = jax.tree.map(lambda v, g: mix(beta2, v, g**2), state.nu, updates)
        state = AdamState(mu, nu, mix(beta1, state.mu_weight, 1), mix(beta2, state.nu_weight, 1))
        direction = lambda m, v: (m / state.mu_weight) / (jnp.sqrt(v / state.nu_weight) + eps)
        return jax.tree.map(direction, mu, nu), state

    return optax.GradientTransformation(init, update)  # pyright: ignore


def make_optimizer(
    config: OptimizerConfig, network: ShardedNetwork, steps: int
) -> tuple[optax.GradientTransformationExtraArgs, Mapping[str, Schedule]]:
    """Return the transformation of a network's parameters, and each group's learning rate as a function of the step,
    for the log. Raise UserError if a parameter declares an unknown group.

    `update(gradients, state, params, step=...)` expects the divided and clipped gradient in float32. The devices of
    the network's mesh share Muon's work.
    """
    groups = parameter_groups(network.config)
    for path, name in jax.tree_util.tree_leaves_with_path(groups):
        if name not in group_names(config):
            raise UserError(
                f"the parameter {path_name(path)} declares the optimizer group {name!r}, but OptimizerConfig in "
                f"options/schema.py has only {', '.join(group_names(config))}"
            )
    present = sorted(set(jax.tree.leaves(groups)))
    peaks = peak_rates(config, network.config.width)
    layouts = jax.tree.leaves(network.layouts)

    def group(name: str) -> tuple[optax.GradientTransformation, Schedule]:
        options = group_config(config, name)
        course = config.schedule
        if isinstance(options, X0LambdasConfig):
            course = dataclasses.replace(course, warmup_steps=max(options.warmup_steps, course.warmup_steps))
        if name == "matrices" and course.matrices_warmdown:
            course = dataclasses.replace(course, warmdown=course.matrices_warmdown)
        schedule = make_schedule(course, steps)
        rate = lambda step: peaks[name] * schedule(step)
        if isinstance(options, MuonConfig):
            mine = [layout for layout, group in zip(layouts, jax.tree.leaves(groups)) if group == name]
            return muon(options, course, rate, steps, mine, network.mesh), rate
        adam = scale_by_adam(options.beta1, options.beta2, options.eps)
        adamw = optax.chain(adam, optax.add_decayed_weights(options.weight_decay), scale_by_rate(rate))
        return adamw, rate

    built = {name: group(name) for name in present}
    transform = optax.partition({name: transform for name, (transform, _) in built.items()}, groups)
    return transform, {name: rate for name, (_, rate) in built.items()}
