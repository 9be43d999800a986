"""What a step measures of itself, against float64 sums of each unit's own gradient, and against a known truth."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from configs.schema import Config, MeshConfig
from model.loss import loss_sums
from program.collectives import collectives
from tests.helpers import ALL_FEATURES, initial_state, perturbed, random_rows, tiny_config
from training.build import build
from training.diagnostics import Layout, signal_and_noise, sum_units, unit
from training.mesh import dimension_over
from training.optimizer import parameter_groups
from training.state import split_model

MESHES = [(d, f, 8 // d // f) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if d * f <= 8 and 8 // d // f <= 2]
QUICK = [(1, 1, 1), (2, 2, 2)]
ROWS = 32


def config_on(mesh: tuple[int, int, int], rows_per_device: int = 2) -> Config:
    config = tiny_config(rows=ROWS, rows_per_device=rows_per_device, **ALL_FEATURES)
    return replace(config, mesh=MeshConfig(*mesh))


@cache
def rows_of_random_lengths() -> dict[str, np.ndarray]:
    """Some rows without any valid token."""
    lengths = np.random.default_rng(1).integers(0, 17, ROWS)
    return random_rows(config_on((1, 1, 1)), 0, (np.arange(16) < lengths[:, None]).astype(np.float32))


def measured(config: Config) -> tuple[dict, list[PartitionSpec], dict, dict]:
    """A measuring step's metrics, the parameters' specs, and the parameters before and after it."""
    devices = jax.devices()[: int(np.prod([config.mesh.data, config.mesh.fsdp, config.mesh.tensor]))]
    built = build(config, devices)
    state = initial_state(config.model, config.optimizer)
    start = state._replace(params=perturbed(state.params))
    placed = jax.device_put(start, jax.tree.map(lambda leaf: leaf.sharding, built.abstract_state))
    batch = {name: array.reshape(built.batch_shape) for name, array in rows_of_random_lengths().items()}
    after, metrics = built.measuring_step(placed, jax.device_put(batch, built.batch_sharding))
    specs = jax.tree.leaves(
        jax.tree.map(lambda leaf: leaf.sharding.spec, built.abstract_state.params),
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
    return jax.device_get(metrics), specs, start.params, jax.device_get(after.params)


@cache
def gradient_program(config: Config):
    """The sum of the losses of some rows, its gradient, and the tokens."""
    graphdef, _ = split_model(config.model, jnp.dtype("float32"))
    loss = lambda params, rows: loss_sums(nnx.merge(graphdef, params), **rows)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def unit_gradients(config: Config, units: int) -> list[tuple[int, list[np.ndarray]]]:
    """Of so many parts of the rows, in order: the valid tokens and the gradient's leaves, in float64."""
    params = perturbed(initial_state(config.model, config.optimizer).params)
    found = []
    for part in range(units):
        rows = {name: array.reshape(units, -1, 16)[part] for name, array in rows_of_random_lengths().items()}
        (_, tokens), gradient = gradient_program(config)(params, rows)
        found.append((int(tokens), [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(gradient)]))
    return found


@pytest.mark.parametrize(
    "mesh", [*QUICK, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES if mesh not in QUICK)]
)
def test_every_quantity_equals_the_float64_reference(mesh):
    config, (data, fsdp, _) = config_on(mesh), mesh
    metrics, specs, before, after = measured(config)
    found, groups = metrics["diagnostics"], jax.tree.leaves(parameter_groups(config.model))
    steps = ROWS // (2 * data * fsdp)
    signal, noise = dict.fromkeys(groups, 0.0), dict.fromkeys(groups, 0.0)
    by_devices, by_replicas = unit_gradients(config, steps * data * fsdp), unit_gradients(config, steps * data)
    whole = [sum(leaves) for leaves in zip(*(gradient for _, gradient in by_devices))]
    total = sum(tokens for tokens, _ in by_devices)
    for i, (group, spec) in enumerate(zip(groups, specs)):
        units = by_devices if dimension_over(spec, "fsdp") is None else by_replicas
        square, squares = np.sum(whole[i] ** 2), sum(np.sum(gradient[i] ** 2) for _, gradient in units)
        truth = (square - squares) / (total**2 - sum(tokens**2 for tokens, _ in units))
        signal[group] += truth
        noise[group] += square / total - total * truth
    scale = sum(np.sum(leaf**2) for leaf in whole) / total**2
    for group in signal:
        assert found["signal"][group] == pytest.approx(signal[group], rel=2e-4, abs=1e-6 * scale), group
        assert found["noise"][group] == pytest.approx(noise[group], rel=2e-4, abs=1e-6 * scale * total), group
    assert found["noise"]["all"] == pytest.approx(sum(noise.values()), rel=2e-4)

    divided = [i for i, spec in enumerate(specs) if dimension_over(spec, "fsdp") is not None]
    flat = [np.concatenate([gradient[i].ravel() for i in divided]) for _, gradient in by_replicas]
    cosines = []
    for replica in range(data):
        ours = flat[replica::data]
        sums = np.cumsum(ours, axis=0)
        for before_it, mine in zip(sums, ours[1:]):
            lengths = np.linalg.norm(before_it) * np.linalg.norm(mine)
            cosines.append(before_it @ mine / lengths if lengths else 0.0)
    assert found["coherence_running"] == pytest.approx(np.mean(cosines), abs=1e-5)

    for group in signal:
        of = [i for i, name in enumerate(groups) if name == group]
        norm = lambda leaves, of=of: np.sqrt(sum(np.sum(np.asarray(leaves[i], np.float64) ** 2) for i in of))
        old, new = jax.tree.leaves(before), jax.tree.leaves(after)
        values = found["groups"]
        assert values["gradient_norm"][group] == pytest.approx(norm(whole) / total, rel=1e-4, abs=1e-9)
        assert values["parameter_norm"][group] == pytest.approx(norm(old), rel=1e-5)
        moved = [np.asarray(b, np.float64) - a for a, b in zip(old, new)]
        assert values["update_norm"][group] == pytest.approx(norm(moved), rel=1e-3)
        same = sum(np.sum(old[i] == new[i]) for i in of) / sum(old[i].size for i in of)
        assert values["unchanged_share"][group] == pytest.approx(same, abs=1e-6)
    assert found["clipped"] == float(metrics["grad_norm"] > config.optimizer.clip_norm)
    assert sorted(found["blocks"]["gradient_norm"]) == [str(block) for block in range(config.model.depth)]


def test_the_estimates_are_right_on_average():
    """Units of random sizes, whose gradients have a known mean and covariance: over 4,000 steps the mean estimates lie
    within four standard errors of the truth."""
    generator = np.random.default_rng(0)
    truth, deviation = generator.standard_normal(20), generator.uniform(1, 3, 20)
    specs, groups = {"a": PartitionSpec(), "b": PartitionSpec()}, ["embed", "scalars"]
    layout = Layout.of(specs, groups)

    @jax.jit
    @jax.vmap
    def estimates(gradients, tokens):
        def add(sums, this):
            mine = {"a": this[0][:12], "b": this[0][12:]}
            sums = jax.tree.map(jnp.add, sums, mine)
            return sums, unit(this[1], mine, sums, layout)

        sums, units = jax.lax.scan(add, {"a": jnp.zeros(12), "b": jnp.zeros(8)}, (gradients, tokens))
        count = tokens.sum()
        mean = jax.tree.map(lambda leaf: leaf / count, sums)
        return signal_and_noise(mean, count, sum_units(units), layout)

    tokens = generator.integers(1, 50, (4000, 6))
    draws = generator.standard_normal((4000, 6, 20)) * deviation * np.sqrt(tokens)[..., None]
    signal, noise = estimates((tokens[..., None] * truth + draws).astype(np.float32), tokens.astype(np.int32))
    parts = {"embed": slice(0, 12), "scalars": slice(12, 20), "all": slice(0, 20)}
    for name, part in parts.items():
        for found, known in ((signal, np.sum(truth[part] ** 2)), (noise, np.sum(deviation[part] ** 2))):
            error = np.std(found[name]) / np.sqrt(len(found[name]))
            assert abs(np.mean(found[name]) - known) < 4 * error, name
            assert error < 0.05 * known  # so that a wrong estimate would be seen


def test_scalars_alone_cross_the_mesh_once_after_the_scan():
    built = build(config_on((2, 2, 2)), jax.devices())
    compiled = lambda step: step.lower(built.abstract_state, built.abstract_batch()).compile().as_text()
    shape = dict(built.mesh.shape)
    plain, measuring = (collectives(compiled(step), shape) for step in (built.train_step, built.measuring_step))
    size = lambda found, in_loop: sum(c.times * c.bytes_each for c in found if c.in_loop == in_loop)
    assert size(measuring, True) == size(plain, True)
    assert 0 < size(measuring, False) - size(plain, False) < 8192
