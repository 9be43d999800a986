"""One group for each kind of parameter, chosen by the parameter's path: AdamW, or Muon for the matrices."""

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from configs.schema import GroupConfig, MuonConfig, OptimizerConfig, UserError
from training.muon import muon
from training.schedule import Schedule, make_schedule

# The first pattern that a parameter's dotted path matches from its start names its group.
GROUP_PATTERNS = {
    "embed": r"embed\.table$",
    "lm_head": r"lm_head\.kernel$",
    "matrices": r"blocks\.\d+\.(attention|mlp)\.\w+\.kernel$",
    "value_embeds": r"blocks\.\d+\.attention\.value_embedding\.table$",
    "resid_lambdas": r"resid_lambdas\.values$",
    "x0_lambdas": r"x0_lambdas\.values$",
    "scalars": r"(smear_gate\.kernel|smear_lambda\.values|backout_lambda\.values)$",
}


def path_name(path: tuple) -> str:
    """`blocks.0.mlp.up.kernel` for a key path of a tree of parameters."""
    return ".".join(str(getattr(key, "key", key)) for key in path)


def parameter_groups(params: dict) -> dict:
    """The tree of `params` with each parameter's group name in its place. UserError names those that fit none."""

    def group(path: tuple, leaf: jax.ShapeDtypeStruct | Array) -> str | None:
        return next((g for g, pattern in GROUP_PATTERNS.items() if re.match(pattern, path_name(path))), None)

    groups = jax.tree_util.tree_map_with_path(group, params)
    leaves = jax.tree_util.tree_leaves_with_path(groups, is_leaf=lambda g: g is None)
    homeless = [path_name(path) for path, g in leaves if g is None]
    if homeless:
        raise UserError(f"no optimizer group takes {', '.join(homeless)}; see GROUP_PATTERNS in training/optimizer.py")
    return groups


def peak_rates(config: OptimizerConfig, width: int) -> dict[str, float]:
    """Each group's peak rate. Those of tables and of the head are given for width 768 and scale as width^-0.5."""
    scaled = lambda group: (width / 768) ** -0.5 if group in ("embed", "value_embeds", "lm_head") else 1.0
    return {group: group_config(config, group).peak_rate * scaled(group) for group in GROUP_PATTERNS}


def group_config(config: OptimizerConfig, group: str) -> GroupConfig | MuonConfig:
    """The options that hold for a group."""
    return config.muon if group == "matrices" and config.matrices.kind == "muon" else getattr(config, group)


def scale_by_rate(rate: Schedule) -> optax.GradientTransformationExtraArgs:
    """Multiplies by minus the rate at `step`, which `update` is given. optax's own would count its calls, and fall
    behind the run wherever a step was skipped."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, *, step: Int[Array, ""]
    ) -> tuple[optax.Updates, optax.OptState]:
        return jax.tree.map(lambda u: -rate(step) * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)  # pyright: ignore


def make_optimizer(
    config: OptimizerConfig, params: dict, width: int, steps: int, mesh: Mesh | None = None
) -> tuple[optax.GradientTransformationExtraArgs, Mapping[str, Schedule]]:
    """The transformation, and each present group's learning rate as a function of the step, for the log.

    `update(gradients, state, params, step=...)` expects the divided and clipped gradient in float32. The devices of
    `mesh` share Muon's work.
    """
    groups = parameter_groups(params)
    present = sorted(set(jax.tree.leaves(groups)))
    peaks = peak_rates(config, width)

    def group(name: str) -> tuple[optax.GradientTransformation, Schedule]:
        options = group_config(config, name)
        schedule = make_schedule(options.schedule, steps)
        rate = lambda step: peaks[name] * schedule(step)
        if isinstance(options, MuonConfig):
            return muon(options, rate, steps, mesh), rate
        adamw = optax.chain(
            optax.scale_by_adam(options.beta1, options.beta2, options.eps, mu_dtype=jnp.float32),
            optax.add_decayed_weights(options.weight_decay),
            scale_by_rate(rate),
        )
        return adamw, rate

    built = {name: group(name) for name in present}
    transform = optax.partition({name: transform for name, (transform, _) in built.items()}, groups)
    return transform, {name: rate for name, (_, rate) in built.items()}
