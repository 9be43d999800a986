"""Networks as functions on a mesh, and continuations of prompts by a network."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from configs.schema import ModelConfig, UserError
from data.tokenizer import TextTokenizer
from model import sampling
from training.mesh import parameter_places, spec_of, xla_options
from training.shares import all_gather_data, on_each_device
from training.state import split_model

Generate = Callable[..., Int[Array, "batch length"]]


def on_mesh(
    function: Callable,
    config: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh,
    in_specs: Sequence[PartitionSpec],
    out_specs: Any,
) -> Callable[..., Any]:
    """Return `function(model, *arrays)`, written for one device, as a function on the mesh. It takes the sharded
    float32 parameters, and complete arrays or trees of them, which the specs divide over the mesh.

    Parameters are gathered over `data` in the compute type. They stay divided over `fsdp` and `tensor`, as in a step.
    """
    graphdef, _ = split_model(config, dtype)
    places = parameter_places(config, mesh)

    def for_one_device(params: dict, *arrays: Any) -> Any:
        return function(nnx.merge(graphdef, all_gather_data(params, places, dtype)), *arrays)

    return on_each_device(for_one_device, mesh, dtype, (jax.tree.map(spec_of, places), *in_specs), out_specs)


def make_generate(config: ModelConfig, dtype: jnp.dtype, mesh: Mesh) -> Generate:
    """Return `generate(params, prompts, prompt_lengths, seeds, *, prefill, temperature, top_k) -> tokens`, jitted:
    compiled once per shape of prompts. `params` are the state's float32 shares; `model.sampling.generate` describes the
    rest. Every device writes all texts; only `fsdp` and `tensor` share that work."""
    everywhere = PartitionSpec()

    @partial(jax.jit, static_argnames=("prefill", "temperature", "top_k"), compiler_options=xla_options(mesh))
    def generate(params: dict, *arrays: Int[Array, "..."], **options: float | int) -> Int[Array, "batch length"]:
        write = partial(sampling.generate, **options)  # pyright: ignore[reportArgumentType]
        return on_mesh(write, config, dtype, mesh, [everywhere] * 3, everywhere)(params, *arrays)

    return generate


def encode_prompts(tokenizer: TextTokenizer, prompts: Sequence[str], capacity: int) -> list[list[int]]:
    """Return each prompt's tokens after a BOS. Raise UserError for one that leaves no room for a continuation in
    `capacity`."""
    encoded = [[tokenizer.bos, *ids] for ids in tokenizer.encode(prompts)]
    for prompt, ids in zip(prompts, encoded):
        if len(ids) >= capacity:
            raise UserError(
                f"the prompt {prompt[:40]!r}... has {len(ids)} tokens with the BOS; the network's sequence has "
                f"{capacity}, so at most {capacity - 1} leave room for a continuation"
            )
    return encoded


def continuations(
    generate: Generate,
    params: dict,
    tokenizer: TextTokenizer,
    prompts: list[list[int]],
    *,
    tokens: int,
    capacity: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> list[str]:
    """Return each prompt (of `encode_prompts`) as text, with up to `tokens` sampled tokens after it, until its document
    ends. `generate` is of `make_generate`, `params` the state's. Every process must call it."""
    if not prompts:
        return []
    prefill, shape = min(map(len, prompts)), (len(prompts), min(max(map(len, prompts)) + tokens, capacity))
    buffer, lengths = np.zeros(shape, np.int32), np.array([*map(len, prompts)], np.int32)
    for row, ids in zip(buffer, prompts):
        row[: len(ids)] = ids
    seeds = np.random.default_rng(seed).integers(1 << 31, size=len(prompts)).astype(np.int32)
    options = {"prefill": prefill, "temperature": temperature, "top_k": top_k}
    filled = np.asarray(generate(params, buffer, lengths, seeds, **options)).tolist()
    ended = lambda ids: ids[: ids.index(tokenizer.bos)] if tokenizer.bos in ids else ids
    new = [ended(row[len(ids) : len(ids) + tokens]) for row, ids in zip(filled, prompts)]
    return [tokenizer.decode([*ids[1:], *more]) for ids, more in zip(prompts, new)]
