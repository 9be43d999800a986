"""The state of a run: one pytree, created already sharded."""

import hashlib
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
from model.gpt import GPT
from training.mesh import parameter_spec
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
    """The type of activations: as configured, or float32 on CPU and bfloat16 elsewhere."""
    if config.dtype == "auto":
        return jnp.dtype("float32" if platform == "cpu" else "bfloat16")
    return jnp.dtype(config.dtype)


def split_model(config: ModelConfig, dtype: jnp.dtype) -> tuple[nnx.GraphDef[GPT], dict]:
    """The network's structure, and the shapes of its parameters; nothing is computed."""
    graphdef, params = nnx.split(_abstract_model(config, dtype))
    return graphdef, nnx.to_pure_dict(params)


def parameter_specs(config: ModelConfig, mesh: Mesh) -> dict:
    """Where each parameter lies on the mesh."""
    state = nnx.state(_abstract_model(config, jnp.dtype(jnp.float32)))
    find = lambda param: parameter_spec(param.shape, param.get_metadata("axes"), mesh)
    return nnx.to_pure_dict(jax.tree.map(find, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


def _abstract_model(config: ModelConfig, dtype: jnp.dtype) -> GPT:
    return nnx.eval_shape(lambda: GPT(config, dtype, rngs=nnx.Rngs(0)))


def abstract_params(config: ModelConfig, mesh: Mesh) -> dict:
    """Shapes, types and shardings of the float32 parameters."""
    specs = parameter_specs(config, mesh)
    shapes = split_model(config, jnp.dtype(jnp.float32))[1]
    return jax.tree.map(lambda p, spec: _placed(p, mesh, spec), shapes, specs)


def abstract_state(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, types and shardings of the whole state: a moment of its parameter's shape lies where the parameter does,
    the rest everywhere."""
    params = {_keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(config, mesh))}

    def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        keys = _keys(path)
        # A moment's path in the optimizer state ends with its parameter's.
        found = [params[keys[i:]] for i in range(len(keys)) if keys[i:] in params]
        alike = found and found[0].shape == leaf.shape
        return _placed(leaf, mesh, found[0].sharding.spec if alike else PartitionSpec())

    shapes = jax.eval_shape(lambda: _initial_state(config, optimizer, 0))
    return jax.tree_util.tree_map_with_path(place, shapes)


def _keys(path: tuple) -> tuple:
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def _placed(leaf: jax.ShapeDtypeStruct, mesh: Mesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def create_state(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int) -> TrainState:
    """The state before step 0. It depends on the seed and the sizes, not on the mesh."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, optimizer, mesh))
    return jax.jit(lambda: _initial_state(config, optimizer, seed), out_shardings=shardings)()


def _initial_state(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    model = GPT(config, jnp.dtype(jnp.float32), rngs=nnx.Rngs(seed))
    params = nnx.to_pure_dict(nnx.state(model))
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
