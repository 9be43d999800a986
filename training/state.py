"""The state of a run: one pytree, created already sharded."""

import hashlib
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from configs.schema import ModelConfig
from model.gpt import GPT, abstract_model, map_parameters
from training.mesh import parameter_sharding
from training.optimizer import path_name


class TrainState(NamedTuple):
    """Everything that a step changes."""

    step: Int[Array, ""]
    """Steps taken, skipped ones included: the number of the next batch and of its learning rates."""
    params: dict
    """Float32 parameters, a tree of arrays."""
    opt_state: optax.OptState
    """Float32 moments."""
    skipped_steps: Int[Array, ""]
    """Steps that changed nothing, for want of a valid token or of a finite gradient."""


def compute_dtype(config: ModelConfig, platform: str) -> jnp.dtype:
    """The type of activations: as configured, or bfloat16, but float32 where that is no slower."""
    if config.dtype == "auto":
        float32_is_as_fast = platform == "cpu" and jax.__version_info__ < (0, 12)  # docs/performance.md
        return jnp.dtype("float32" if float32_is_as_fast else "bfloat16")
    return jnp.dtype(config.dtype)


def split_model(config: ModelConfig, dtype: jnp.dtype) -> tuple[nnx.GraphDef[GPT], dict]:
    """The network's structure, for activations of `dtype`, and the shapes of its parameters; nothing is computed."""
    model = nnx.clone(abstract_model(config))
    model.dtype = dtype
    graphdef, params = nnx.split(model)
    return graphdef, nnx.to_pure_dict(params)


def abstract_params(config: ModelConfig, mesh: Mesh) -> dict:
    """Shapes, types and shardings of the float32 parameters."""
    place = lambda param: jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=parameter_sharding(param, mesh))
    return map_parameters(place, config)


def abstract_state(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, types and shardings of the whole state: a moment of its parameter's shape lies where the parameter does,
    the rest everywhere."""
    params = abstract_params(config, mesh)
    by_path = {_keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        keys = _keys(path)
        # A moment's path in the optimizer state ends with its parameter's.
        found = [by_path[keys[i:]] for i in range(len(keys)) if keys[i:] in by_path]
        alike = found and found[0].shape == leaf.shape
        lies = found[0].sharding if alike else NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies)

    shapes = jax.eval_shape(partial(_initial_state, optimizer=optimizer), params)
    return jax.tree_util.tree_map_with_path(place, shapes)


def _keys(path: tuple) -> tuple:
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def create_state(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int) -> TrainState:
    """The state before step 0. It depends on the seed and the sizes, not on the mesh."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, optimizer, mesh))

    def create() -> TrainState:
        model = GPT(config, jnp.dtype(jnp.float32), rngs=nnx.Rngs(seed))
        return _initial_state(nnx.to_pure_dict(nnx.state(model)), optimizer)

    return jax.jit(create, out_shardings=shardings)()


def _initial_state(params: dict, optimizer: optax.GradientTransformation) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, optimizer.init(params), zero)


def params_sha256(params: dict) -> str:
    """SHA-256 over each parameter's dotted name and its bytes, in the order of the names. Every process calls it."""
    digest = hashlib.sha256()
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    for name in sorted(leaves):
        leaf = leaves[name]
        whole = leaf if leaf.is_fully_addressable else multihost_utils.process_allgather(leaf, tiled=True)
        digest.update(name.encode() + b"\0" + np.asarray(whole).tobytes())
    return digest.hexdigest()
