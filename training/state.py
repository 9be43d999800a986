"""The state of a run: one pytree, created already sharded."""

import hashlib
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jaxtyping import Array, Int

from model.gpt import GPT, map_parameters, parameter_shapes
from model.keys import random_key
from options.schema import ModelConfig
from training.mesh import resized
from training.optimizer import path_name
from training.sharded import ShardedNetwork, abstract_array
from training.shares import shard_layout, summed_layout

T = TypeVar("T")


class TrainState(NamedTuple):
    """Everything that a step changes."""

    step: Int[Array, ""]
    """Steps so far, skipped ones included: the number of the next batch and of its learning rates."""
    params: dict
    """Float32 parameters, a tree of arrays, padded with zeros for the mesh (`training.shares.ShardLayout`)."""
    opt_state: optax.OptState
    """Float32 moments, padded like the parameters."""
    skipped_steps: Int[Array, ""]
    """Steps skipped so far: no valid token, or a gradient that is not finite."""


def abstract_state(network: ShardedNetwork, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the stored shapes, types and shardings of the state.

    A moment is divided as its parameter; one that summed a dimension to one number, along the other one, over all axes
    that divide its parameter. Single numbers are replicated.
    """
    mesh = network.mesh
    layouts = {_keys(path): layout for path, layout in jax.tree_util.tree_leaves_with_path(network.layouts)}

    def stored(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        keys = _keys(path)
        # The path of a moment ends with its parameter's.
        layout = next((layouts[keys[i:]] for i in range(len(keys)) if keys[i:] in layouts), None)
        if layout is None:
            layout = shard_layout(leaf.shape, (None,) * leaf.ndim, mesh.shape)
        elif leaf.shape != layout.shape:
            layout = summed_layout(layout, leaf.shape, mesh.shape)
        return abstract_array(mesh, leaf.dtype, layout)

    params = map_parameters(lambda param: jax.ShapeDtypeStruct(param.shape, param.dtype), network.config)
    shapes = jax.eval_shape(partial(_initial_state, optimizer=optimizer), params)
    return jax.tree_util.tree_map_with_path(stored, shapes)


def _keys(path: tuple) -> tuple:
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def create_state(network: ShardedNetwork, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """Return the state before step 0. It depends on the seed and the sizes, not on the mesh."""
    abstract = abstract_state(network, optimizer)

    def create() -> TrainState:
        model = GPT(network.config, jnp.dtype(jnp.float32), rngs=nnx.Rngs(random_key(seed)))
        state = _initial_state(nnx.to_pure_dict(nnx.state(model)), optimizer)
        return jax.tree.map(lambda leaf, stored: resized(leaf, stored.shape), state, abstract)

    return jax.jit(create, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))()


def _initial_state(params: dict, optimizer: optax.GradientTransformation) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, optimizer.init(params), zero)


def stored_as(tree: T, abstract: Any) -> T:
    """Return a tree of arrays on the devices, padded and sharded as `abstract` is. The arrays may be on the host or on
    another mesh, with or without its padding."""
    return jax.tree.map(lambda leaf, like: jax.device_put(resized(leaf, like.shape), like.sharding), tree, abstract)


def params_sha256(params: dict, config: ModelConfig) -> str:
    """Return the SHA-256 over each parameter's dotted name and its bytes without padding, in the order of the names.
    Every process calls it."""
    digest = hashlib.sha256()
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    for name, shape in sorted(parameter_shapes(config).items()):
        leaf = leaves[name]
        array = leaf if leaf.is_fully_addressable else multihost_utils.process_allgather(leaf, tiled=True)
        array = np.asarray(array)[tuple(map(slice, shape))]
        digest.update(name.encode() + b"\0" + array.tobytes())
    return digest.hexdigest()
