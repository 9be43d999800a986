"""One group for each kind of parameter, which it declares where it is made: AdamW, or Muon for the matrices."""

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from configs.schema import GroupConfig, ModelConfig, MuonConfig, OptimizerConfig, UserError
from model.gpt import map_parameters
from training.mesh import parameter_sharding
from training.muon import muon
from training.schedule import Schedule, make_schedule


def path_name(path: tuple) -> str:
    """`blocks.0.mlp.up.kernel` for a key path of a tree of parameters."""
    return ".".join(str(getattr(key, "key", key)) for key in path)


def parameter_groups(model: ModelConfig) -> dict:
    """A tree like the parameters', with the name of each one's group."""
    return map_parameters(lambda param: param.get_metadata("group"), model)


def group_names(config: OptimizerConfig) -> list[str]:
    """The groups there are: the fields of the config that are one."""
    return [f.name for f in dataclasses.fields(config) if isinstance(getattr(config, f.name), GroupConfig)]


def peak_rates(config: OptimizerConfig, width: int) -> dict[str, float]:
    """Each group's peak rate. Those of tables and of the head are given for width 768 and scale as width^-0.5."""
    scaled = lambda group: (width / 768) ** -0.5 if group in ("embed", "value_embeds", "lm_head") else 1.0
    return {group: group_config(config, group).peak_rate * scaled(group) for group in group_names(config)}


def group_config(config: OptimizerConfig, group: str) -> GroupConfig | MuonConfig:
    """The options that hold for a group."""
    return config.muon if group == "matrices" and config.matrices.kind == "muon" else getattr(config, group)


def scale_by_rate(rate: Schedule) -> optax.GradientTransformationExtraArgs:
    """Multiplies by minus the rate at `step`, which `update` is given. optax's own would count its calls, and fall
    behind the run wherever a step was skipped."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, *, step: Int[Array, ""]
    ) -> tuple[optax.Updates, optax.OptState]:
        factor = -rate(step)
        return jax.tree.map(lambda u: factor * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)  # pyright: ignore


def make_optimizer(
    config: OptimizerConfig, model: ModelConfig, steps: int, mesh: Mesh | None = None
) -> tuple[optax.GradientTransformationExtraArgs, Mapping[str, Schedule]]:
    """The transformation of a network's parameters, and the learning rate of each group that it has as a function of
    the step, for the log. UserError where a parameter declares a group that there is not.

    `update(gradients, state, params, step=...)` expects the divided and clipped gradient in float32. The devices of
    `mesh` share Muon's work.
    """
    groups = parameter_groups(model)
    for path, name in jax.tree_util.tree_leaves_with_path(groups):
        if name not in group_names(config):
            raise UserError(
                f"the parameter {path_name(path)} declares the optimizer group {name!r}, but OptimizerConfig in "
                f"configs/schema.py has only {', '.join(group_names(config))}"
            )
    present = sorted(set(jax.tree.leaves(groups)))
    peaks = peak_rates(config, model.width)
    shardings = map_parameters(partial(parameter_sharding, mesh=mesh), model) if mesh else None

    def group(name: str) -> tuple[optax.GradientTransformation, Schedule]:
        options = group_config(config, name)
        schedule = make_schedule(options.schedule, steps)
        rate = lambda step: peaks[name] * schedule(step)
        if isinstance(options, MuonConfig):
            mine = [where for where, of in zip(jax.tree.leaves(shardings), jax.tree.leaves(groups)) if of == name]
            return muon(options, rate, steps, mine or None), rate
        adamw = optax.chain(
            optax.scale_by_adam(options.beta1, options.beta2, options.eps, mu_dtype=jnp.float32),
            optax.add_decayed_weights(options.weight_decay),
            scale_by_rate(rate),
        )
        return adamw, rate

    built = {name: group(name) for name in present}
    transform = optax.partition({name: transform for name, (transform, _) in built.items()}, groups)
    return transform, {name: rate for name, (_, rate) in built.items()}
