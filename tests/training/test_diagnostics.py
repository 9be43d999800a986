"""Compare a step's diagnostics with float64 sums of each unit's gradient."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.loss import loss_sums
from options.schema import GroupConfig, MeshConfig, MuonConfig, with_options
from tests.helpers import ALL_FEATURES, built_on, initial_state, perturbed, placed, random_rows, tiny_config
from training.mesh import resized
from training.muon import MuonState, momentum_at
from training.optimizer import AdamState, group_config, parameter_groups
from training.sharded import split_model
from training.shares import ShardLayout
from training.state import TrainState, stored_as

ROWS, DATA, FSDP, STEPS = 32, 2, 2, 4
CONFIG = with_options(
    tiny_config(rows=ROWS, rows_per_device=2, **ALL_FEATURES | {"depth": 3}),
    {"mesh": MeshConfig(DATA, FSDP, 2), "optimizer.matrices.kind": "muon", "diagnostics.every_steps": 1},
)


@cache
def rows_of_random_lengths() -> dict[str, np.ndarray]:
    """Return rows of random lengths, some without a valid token."""
    lengths = np.random.default_rng(1).integers(0, 17, ROWS)
    return random_rows(CONFIG, 0, (np.arange(16) < lengths[:, None]).astype(np.float32))


@cache
def start() -> TrainState:
    """Return the initial state, moved off its zeros, with moments as of earlier steps. Some of them are too small."""
    state, generator = initial_state(CONFIG.model, CONFIG.optimizer), np.random.default_rng(2)
    draw = lambda leaf: np.float32(generator.uniform(0, 1e-6, leaf.shape) ** generator.choice([1, 3], leaf.shape))
    keeps = lambda node: isinstance(node, AdamState | MuonState)
    moments = lambda node: (
        node._replace(mu=jax.tree.map(draw, node.mu), nu=jax.tree.map(draw, node.nu)) if keeps(node) else node
    )
    return state._replace(
        params=perturbed(state.params), opt_state=jax.tree.map(moments, state.opt_state, is_leaf=keeps)
    )


def measured() -> tuple[dict, list[ShardLayout], dict]:
    """Return a measuring step's metrics, the parameters' layouts, and the parameters after it. Require that the state
    stays in its place: XLA would choose another one for Muon's second moments."""
    built = built_on(CONFIG, 8)
    state = stored_as(start(), built.abstract_state)
    after, metrics = built.measuring_step(state, placed(built, rows_of_random_lengths()))
    for leaf, expected in zip(jax.tree.leaves(after), jax.tree.leaves(built.abstract_state), strict=True):
        assert leaf.sharding == expected.sharding
    layouts = built.network.layouts
    after = jax.tree.map(lambda leaf, of: np.asarray(resized(leaf, of.shape)), after.params, layouts)
    return jax.device_get(metrics), jax.tree.leaves(layouts), after


def moments(state: TrainState, group: str, kind: type = AdamState) -> list[Any]:
    """Return a group's moments in float64 (mu's leaves, nu's), or [] if its optimizer state is of another kind."""
    nodes = jax.tree.leaves(state.opt_state.inner_states[group], is_leaf=lambda node: isinstance(node, kind))
    leaves = lambda tree: [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return next(([leaves(node.mu), leaves(node.nu)] for node in nodes if isinstance(node, kind)), [])


def unit_gradients(units: int) -> list[tuple[int, list[np.ndarray]]]:
    """Return the valid tokens and the gradient's leaves in float64, for each of `units` parts of the rows in order."""
    graphdef, _ = split_model(CONFIG.model, jnp.dtype("float32"))
    loss = lambda params, rows: loss_sums(nnx.merge(graphdef, params), **rows)
    program, params, gradients = jax.jit(jax.value_and_grad(loss, has_aux=True)), start().params, []
    for part in range(units):
        rows = {name: array.reshape(units, -1, 16)[part] for name, array in rows_of_random_lengths().items()}
        (_, tokens), gradient = program(params, rows)
        gradients.append((int(tokens), [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(gradient)]))
    return gradients


def snr(group: str, gradients: list[np.ndarray]) -> float:
    """Return |m| / sqrt(v) of a group after a step with these gradients, most of which the clip scales down."""
    norm = lambda leaves: np.sqrt(sum(np.sum(leaf**2) for leaf in leaves))
    options = group_config(CONFIG.optimizer, group)
    if muon := moments(start(), group, MuonState):
        assert isinstance(options, MuonConfig)
        beta = float(momentum_at(options, CONFIG.optimizer.schedule, 0, CONFIG.steps))
        return norm([beta * m + (1 - beta) * g for m, g in zip(muon[0], gradients)]) / norm(gradients)
    assert isinstance(options, GroupConfig)
    adam = list(zip(*moments(start(), group), gradients))
    first = [options.beta1 * m + (1 - options.beta1) * g for m, _, g in adam]
    second = [options.beta2 * v + (1 - options.beta2) * g**2 for _, v, g in adam]
    return norm(first) / np.sqrt(sum(np.sum(leaf) for leaf in second))


@pytest.mark.medium
def test_every_quantity_equals_the_float64_reference():
    metrics, layouts, after = measured()
    measures, groups = metrics["diagnostics"], jax.tree.leaves(parameter_groups(CONFIG.model))
    signal, noise = dict.fromkeys(groups, 0.0), dict.fromkeys(groups, 0.0)
    by_devices, by_replicas = unit_gradients(STEPS * DATA * FSDP), unit_gradients(STEPS * DATA)
    whole = [sum(leaves) for leaves in zip(*(gradient for _, gradient in by_devices))]
    total = sum(tokens for tokens, _ in by_devices)
    for i, (group, of) in enumerate(zip(groups, layouts)):
        units = by_devices if "fsdp" not in of.axes else by_replicas
        pairs = total**2 - sum(tokens**2 for tokens, _ in units)
        square = np.sum(whole[i] ** 2)
        truth = (square - sum(np.sum(gradient[i] ** 2) for _, gradient in units)) / pairs
        signal[group] += truth
        noise[group] += square / total - total * truth
    scale = sum(noise.values()) / total
    assert measures["signal"].keys() == {*signal, "all"}
    for group in signal:
        assert measures["signal"][group] == pytest.approx(signal[group], rel=2e-4, abs=1e-6 * scale), group
        assert measures["noise"][group] == pytest.approx(noise[group], rel=2e-4, abs=1e-6 * scale * total)
    assert measures["noise"]["all"] == pytest.approx(sum(noise.values()), rel=2e-4)

    divided = [i for i, of in enumerate(layouts) if "fsdp" in of.axes]
    flat = [np.concatenate([gradient[i].ravel() for i in divided]) for _, gradient in by_replicas]
    cosines = []
    for replica in range(DATA):
        ours = flat[replica::DATA]
        for before_it, mine in zip(np.cumsum(ours, axis=0), ours[1:]):
            lengths = np.linalg.norm(before_it) * np.linalg.norm(mine)
            cosines.append(before_it @ mine / lengths if lengths else 0.0)
    assert measures["coherence_running"] == pytest.approx(np.mean(cosines), abs=1e-5)

    clip = min(1.0, CONFIG.optimizer.clip_norm / float(metrics["grad_norm"]))
    for group in signal:
        of = [i for i, name in enumerate(groups) if name == group]
        norm = lambda leaves, of=of: np.sqrt(sum(np.sum(np.asarray(leaves[i], np.float64) ** 2) for i in of))
        old, new = jax.tree.leaves(start().params), jax.tree.leaves(after)
        values = measures["groups"][group]
        assert values["gradient_norm"] == pytest.approx(norm(whole) / total, rel=1e-4, abs=1e-9)
        assert values["parameter_norm"] == pytest.approx(norm(old), rel=1e-5)
        moved = [np.asarray(b, np.float64) - a for a, b in zip(old, new)]
        assert values["update_norm"] == pytest.approx(norm(moved), rel=1e-3)
        same = sum(np.sum(old[i] == new[i]) for i in of) / sum(old[i].size for i in of)
        assert values["unchanged_share"] == pytest.approx(same, abs=1e-6)
        assert values["snr"] == pytest.approx(snr(group, [clip * whole[i] / total for i in of]), rel=1e-4)
    assert measures["clipped"] == float(metrics["grad_norm"] > CONFIG.optimizer.clip_norm)
    assert sorted(measures["blocks"]) == [str(block) for block in range(CONFIG.model.depth)]
