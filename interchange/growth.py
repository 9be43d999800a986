"""The state that a run with `init_from` starts with, which may have rows for tokens that the network there lacks."""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from configs.schema import Config, ModelConfig, UserError, with_options
from data.tokenizer import TextTokenizer, load_tokenizer
from hosts.runtime import Damaged, NoCheckpoint
from interchange.init_from import is_run, network_config, origin, read_params, tokenizer_in
from model.gpt import parameters
from run.checkpoint import Checkpoints
from training.build import Build, build
from training.mesh import resized
from training.optimizer import path_name
from training.state import TrainState

T = TypeVar("T")
VOCABULARY = {"embed": 0, "value_embeds": 0, "lm_head": 1}
"""The tokens' dimension in these groups' tables."""


def new_tokens(config: Config, tokenizer: TextTokenizer) -> dict[str, int]:
    """Return the tokens that the network in `config.init_from` lacks, and their ids."""
    folder = tokenizer_in(origin(config.init_from))
    known = load_tokenizer(folder).library.get_vocab() if folder else tokenizer.library.get_vocab()
    return {token: i for token, i in tokenizer.library.get_vocab().items() if token not in known}


def describe_growth(config: Config, tokenizer: TextTokenizer) -> str:
    """Return a line on the rows added to the network in `config.init_from`; empty if none."""
    if not (new := new_tokens(config, tokenizer)):
        return ""
    before, after = network_config(origin(config.init_from)).model.vocab_size, config.model.vocab_size
    size = f"; --model.vocab_size: {before:,} -> {after:,}" * (before != after)
    tokens = ", ".join(sorted(new, key=lambda token: new[token]))
    return f"rows are added for {tokens}: the mean of the {tokenizer.vocab_size - len(new):,} that were trained{size}"


def initial_state(built: Build, tokenizer: TextTokenizer) -> TrainState:
    """Return the state before step 0: from the seed, or from the network in `init_from`. The tokens that it lacks get
    the mean of the rows that its tokenizer uses, and moments of 0; so do rows beyond its vocabulary."""
    config = built.config
    if not config.init_from:
        return built.create_state()
    folder = origin(config.init_from)
    theirs, size = network_config(folder), config.model.vocab_size
    # As the folder has them, on this mesh.
    there = with_options(config, {"model.vocab_size": theirs.model.vocab_size})
    stored = build(there, list(built.mesh.devices.flat)).abstract_state
    new = np.arange(size) >= theirs.model.vocab_size
    used = np.isin(np.arange(size), list(tokenizer.library.get_vocab().values()))
    added = list(new_tokens(config, tokenizer).values())
    new[added], used[added] = True, False
    grown = lambda tree, abstract, used: with_rows(tree, abstract, config.model, new, used)
    if not config.init_optimizer:
        params = grown(read_params(config, stored.params), built.abstract_state.params, used)
        return built.create_state()._replace(params=params)
    checkpoints = Checkpoints(theirs.checkpoint.folder or folder)
    try:
        state, _ = checkpoints.restore(checkpoints.newest, stored)
    except Damaged as error:
        raise NoCheckpoint(f"checkpoint {checkpoints.newest} in {checkpoints.folder} is damaged: {error}") from error
    zero = lambda array: jax.device_put(np.zeros(array.shape, array.dtype), array.sharding)
    return TrainState(
        step=zero(state.step),
        params=grown(state.params, built.abstract_state.params, used),
        opt_state=grown(state.opt_state, built.abstract_state.opt_state, np.zeros(size, bool)),
        skipped_steps=zero(state.skipped_steps),
    )


def with_rows(
    tree: T, abstract: T, model: ModelConfig, new: Bool[np.ndarray, "vocab"], used: Bool[np.ndarray, "vocab"]
) -> T:
    """Return parameters, or moments, as `abstract` stores them. In each table over the vocabulary the `new` rows are
    the mean of the `used` ones, or 0 if none is used."""
    if not new.any():
        return tree
    axes: Mapping[str, int] = {f".{p.name}": VOCABULARY[p.group] for p in parameters(model) if p.group in VOCABULARY}

    def grow(path: tuple, array: Array, like: jax.ShapeDtypeStruct) -> Array:
        array = resized(array, like.shape)
        axis = next((axis for name, axis in axes.items() if f".{path_name(path)}".endswith(name)), None)
        if axis is None:
            return array
        along = tuple(slice(None) if i == axis else None for i in range(array.ndim))
        is_new, is_used = (resized(jnp.asarray(rows), (like.shape[axis],))[along] for rows in (new, used))
        rows = jnp.sum(jnp.where(is_used, array, 0), axis, keepdims=True) / max(used.sum(), 1)
        return jnp.where(is_new, rows, array)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(lambda tree: jax.tree_util.tree_map_with_path(grow, tree, abstract), out_shardings=shardings)(tree)


def require_moments(config: Config) -> None:
    """Raise UserError if `config.init_from` has no moments that `config.init_optimizer` could bring."""
    folder = origin(config.init_from)
    if not is_run(folder):
        raise UserError(f"--init_optimizer takes the moments of a run, and --init_from={config.init_from} is none")
    theirs, ours = network_config(folder).optimizer.matrices.kind, config.optimizer.matrices.kind
    if theirs != ours:
        raise UserError(
            f"--init_optimizer takes moments of the same optimizer, and {config.init_from} was trained with "
            f"--optimizer.matrices.kind={theirs}, not {ours}: give that, or --init_optimizer=False"
        )
