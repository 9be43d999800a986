"""One group for each kind of parameter, which it declares where it is made: AdamW, or Muon for the matrices."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Num

from configs.ramp import Stage
from configs.schema import GroupConfig, MeshConfig, ModelConfig, MuonConfig, OptimizerConfig, UserError
from model.gpt import map_parameters
from training.mesh import make_mesh, parameter_places
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
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, *, step: Num[Array, ""]
    ) -> tuple[optax.Updates, optax.OptState]:
        factor = -rate(step)
        return jax.tree.map(lambda u: factor * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)  # pyright: ignore


class Handover(NamedTuple):
    """What a stage of a ramp takes over from the one before."""

    stage: Stage
    """The one that takes over."""
    earlier: OptimizerConfig
    """The options of the one before."""

    @property
    def step(self) -> float:
        """The stage's first step, counted in steps of its size."""
        return self.stage.tokens / self.stage.tokens_per_step


def handed_over(
    adam: optax.GradientTransformation, beta2: float, earlier: float, first: float
) -> optax.GradientTransformationExtraArgs:
    """Adam that from the step `first` on goes on with second moments of another decay, `earlier`, which are brought to
    the new one's weights once, before the first update. (Where just that step is skipped, they stay as they were.)"""

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, *, step: Num[Array, ""]
    ) -> tuple[optax.Updates, optax.OptState]:
        change = jnp.where(jnp.abs(step - first) < 0.5, change_of_weights(state.count, beta2, earlier), 1.0)
        return adam.update(updates, state._replace(nu=jax.tree.map(lambda v: change * v, state.nu)), params)

    return optax.GradientTransformationExtraArgs(adam.init, update)  # pyright: ignore


def change_of_weights(updates: Int[Array, ""], beta2: float, earlier: float) -> Float[Array, ""]:
    """What second moments of the decay `earlier` are multiplied by to go on with `beta2`. Adam divides them by
    1 - beta2^updates, the sum of their weights had beta2 never been another; so they are brought to that sum."""
    weights = lambda decay: 1 - decay**updates
    return weights(beta2) / jnp.maximum(weights(earlier), 1e-30)


def with_moments_of(opt_state: Any, config: OptimizerConfig, earlier: OptimizerConfig) -> Any:
    """The state of `earlier`'s optimizer, for that of `config`: Adam's second moments are brought to the weights that
    its `beta2` gives them. Muon's stay: it restores a matrix's norm afterwards, so a common factor of all of its second
    moments cancels."""
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)

    def of_group(name: str, state: Any) -> Any:
        decays = group_config(config, name).beta2, group_config(earlier, name).beta2
        change = lambda adam: adam._replace(
            nu=jax.tree.map(lambda v: change_of_weights(adam.count, *decays) * v, adam.nu)
        )
        return jax.tree.map(lambda node: change(node) if is_adam(node) else node, state, is_leaf=is_adam)

    return opt_state._replace(inner_states={name: of_group(name, of) for name, of in opt_state.inner_states.items()})


def make_optimizer(
    config: OptimizerConfig,
    model: ModelConfig,
    steps: int | float,
    mesh: Mesh | None = None,
    handover: Handover | None = None,
) -> tuple[optax.GradientTransformationExtraArgs, Mapping[str, Schedule]]:
    """The transformation of a network's parameters, and the learning rate of each group that it has as a function of
    the step, for the log. UserError where a parameter declares a group that there is not.

    `update(gradients, state, params, step=...)` expects the divided and clipped gradient in float32. The devices of
    `mesh` share Muon's work (None: the first device does all). For a later stage of a ramp (`handover`), `steps` and
    the config's warmups count steps of the stage's size, and `step` is the run's number nevertheless.
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
    mesh = mesh or make_mesh(MeshConfig(data=1), jax.devices()[:1])
    places = jax.tree.leaves(parameter_places(model, mesh))

    def group(name: str) -> tuple[optax.GradientTransformation, Schedule]:
        options = group_config(config, name)
        schedule = make_schedule(options.schedule, steps)
        rate = lambda step: peaks[name] * schedule(step)
        if isinstance(options, MuonConfig):
            mine = [place for place, of in zip(places, jax.tree.leaves(groups)) if of == name]
            return muon(options, rate, steps, mine, mesh), rate
        adam = optax.scale_by_adam(options.beta1, options.beta2, options.eps, mu_dtype=jnp.float32)
        if handover and (earlier := group_config(handover.earlier, name).beta2) != options.beta2:
            adam = handed_over(adam, options.beta2, earlier, handover.step)
        adamw = optax.chain(adam, optax.add_decayed_weights(options.weight_decay), scale_by_rate(rate))
        return adamw, rate

    built = {name: group(name) for name in present}
    transform = optax.partition({name: transform for name, (transform, _) in built.items()}, groups)
    rates = {name: rate for name, (_, rate) in built.items()}
    if handover is None:
        return transform, rates
    counted = lambda step: step + (handover.step - handover.stage.step)
    update = lambda updates, state, params=None, *, step: transform.update(updates, state, params, step=counted(step))
    later = {name: lambda step, rate=rate: rate(counted(step)) for name, rate in rates.items()}
    return optax.GradientTransformationExtraArgs(transform.init, update), later  # pyright: ignore
