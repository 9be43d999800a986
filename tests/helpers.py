"""Make small networks and batches, and run steps, for all tests."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from options.schema import (
    BatchConfig,
    Config,
    GroupConfig,
    MatricesConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    X0LambdasConfig,
)
from training.build import Build, build
from training.mesh import make_mesh, resized
from training.optimizer import path_name
from training.sharded import ShardedNetwork, shard_network
from training.state import TrainState, stored_as

TINY = ModelConfig(depth=2, width=32, heads=4, kv_heads=2, head_dim=8, vocab_size=272, dtype="float32")
FEATURES = {
    "qk_scale": {"qk_scale": 1.2},
    "windows": {"window_pattern": "SSL", "short_window": 5},
    "value_embeddings": {"value_embeddings": True},
    "resid_lambdas": {"resid_lambdas": True},
    "x0_lambdas": {"x0_lambdas": True},
    "smear": {"smear": True},
    "backout": {"backout": True, "depth": 3},
}
"""nanochat's later features, each alone."""


def together(features: dict[str, dict]) -> dict:
    """Return the options of a network that has all of these features."""
    return {name: value for options in features.values() for name, value in options.items()} | {"depth": 4}


ALL_FEATURES = together(FEATURES)
# eps is well above the noise of gradients near zero. Otherwise Adam's direction would be noise there.
SCHEDULE = ScheduleConfig(warmup_steps=2, warmdown=0.5)
GROUP = GroupConfig(peak_rate=0.01, eps=1e-4)
OPTIMIZER = OptimizerConfig(
    embed=GROUP,
    matrices=MatricesConfig(0.01, eps=1e-4, weight_decay=0.1),
    value_embeds=GROUP,
    resid_lambdas=GROUP,
    x0_lambdas=X0LambdasConfig(**vars(GROUP)),
    scalars=GROUP,
    lm_head=replace(GROUP, peak_rate=0.002),
    schedule=SCHEDULE,
    clip_norm=0.2,
)


def tiny_config(rows: int = 16, rows_per_device: int = 16, length: int = 16, **model) -> Config:
    """Return the config of a run whose step has `rows` rows of `length` tokens."""
    batch = BatchConfig(sequence_length=length, tokens_per_step=rows * length, rows_per_device=rows_per_device)
    return Config(name="tiny", steps=8, model=replace(TINY, **model), optimizer=OPTIMIZER, batch=batch)


def random_rows(config: Config, seed: int, weights: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Return random tokens as rows [rows, T]. All targets are valid unless `weights` [rows, T] says otherwise."""
    rows = config.batch.tokens_per_step // config.batch.sequence_length
    shape = (rows, config.batch.sequence_length)
    inputs, targets = np.random.default_rng(seed).integers(0, config.model.vocab_size, (2, *shape), np.int32)
    return {"inputs": inputs, "targets": targets, "weights": np.ones(shape, np.float32) if weights is None else weights}


def perturbed(params: dict, seed: int = 0) -> dict:
    """Return parameters moved off the zeros of initialisation, so that every gradient counts."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda p: p + 0.1 * generator.standard_normal(p.shape, np.float32), params)


@cache
def initial_state(model: ModelConfig, optimizer: OptimizerConfig):
    """Return the state before step 0, on the host. It is the same on every mesh (test_state.py)."""
    return jax.device_get(
        build(replace(tiny_config(), model=model, optimizer=optimizer), jax.devices()[:1]).create_state()
    )


@cache
def built_on(config: Config, devices: int) -> Build:
    """Return the build of a config on this many devices. Equal configs share their programs."""
    return build(config, jax.devices()[:devices])


def sharded(model: ModelConfig, sizes: tuple[int, int, int] = (1, 1, 1)) -> ShardedNetwork:
    """Return a float32 network on a mesh of these sizes."""
    mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])
    return shard_network(model, jnp.dtype("float32"), mesh)


def placed(built: Build, rows: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Return a step's rows as its batch on the devices."""
    batch = {name: array.reshape(built.batch_shape) for name, array in rows.items()}
    return jax.device_put(batch, built.batch_sharding)


def start_params(config: Config) -> dict:
    """Return the parameters that `run_steps` starts from."""
    return perturbed(initial_state(config.model, config.optimizer).params)


def states(config: Config, rows: list[dict], devices: int = 1) -> Iterator[tuple[TrainState, dict]]:
    """Yield state and metrics after a step on each of `rows` from the perturbed start. The next step donates the
    state."""
    built = built_on(config, devices)
    state = initial_state(config.model, config.optimizer)._replace(params=start_params(config))
    state = stored_as(state, built.abstract_state)
    for step_rows in rows:
        state, metrics = built.train_step(state, placed(built, step_rows))
        yield state, jax.device_get(metrics)


def run_steps(config: Config, rows: list[dict], devices: int = 1) -> tuple[dict, list[dict]]:
    """Return the parameters after a step on each of `rows` from the perturbed start, and the steps' metrics."""
    steps = list(states(config, rows, devices))
    state, metrics = steps[-1][0], [metrics for _, metrics in steps]
    params = jax.tree.map(lambda leaf, like: resized(leaf, like.shape), state.params, start_params(config))
    return jax.device_get(params), metrics


def distance(a: dict, b: dict) -> float:
    """Return the norm of the difference over the norm of `b`, with each tree as one vector in float64."""
    a, b = (np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(t)]) for t in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def arrays_of(params: dict) -> dict[str, np.ndarray]:
    """Return the parameters by their dotted names, as in files."""
    return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
