"""Prompts, and what a network continues them with."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from configs.schema import ModelConfig, UserError
from data.tokenizer import TextTokenizer
from model import generate as model_generate
from training.mesh import parameter_places, spec_of
from training.shares import all_gather_data, on_each_device
from training.state import split_model

Generate = Callable[..., Int[Array, "batch length"]]


def make_generate(config: ModelConfig, dtype: jnp.dtype, mesh: Mesh) -> Generate:
    """`generate(params, prompts, prompt_lengths, seeds, *, prefill, temperature, top_k) -> tokens`, jitted: compiled
    once for prompts of one shape. See `model.generate.generate` for all but `params`: the float32 shares of the state.

    They are gathered over `data` in the compute type, and stay divided over `fsdp` and `tensor`, as in a step.
    """
    graphdef, _ = split_model(config, dtype)
    places = parameter_places(config, mesh)

    @partial(jax.jit, static_argnames=("prefill", "temperature", "top_k"))
    def generate(
        params: dict,
        prompts: Int[Array, "batch length"],
        prompt_lengths: Int[Array, "batch"],
        seeds: Int[Array, "batch"],
        **options: float | int,
    ) -> Int[Array, "batch length"]:
        def for_one_device(params: dict, *arrays: Array) -> Array:
            model = nnx.merge(graphdef, all_gather_data(params, places, dtype))
            return model_generate.generate(model, *arrays, **options)  # pyright: ignore[reportArgumentType]

        everywhere = PartitionSpec()
        in_specs = (jax.tree.map(spec_of, places), everywhere, everywhere, everywhere)
        return on_each_device(for_one_device, mesh, dtype, in_specs, everywhere)(params, prompts, prompt_lengths, seeds)

    return generate


def encode_prompts(tokenizer: TextTokenizer, prompts: Sequence[str], capacity: int) -> list[list[int]]:
    """Each prompt's tokens after a BOS. UserError for one that leaves no room for a continuation in `capacity`."""
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
    """Each prompt (of `encode_prompts`) as text, with up to `tokens` sampled tokens after it, until its document ends.

    `generate` is of `make_generate`, `params` the state's; every process must call it.
    """
    if not prompts:
        return []
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    buffer = np.zeros((len(prompts), min(int(lengths.max()) + tokens, capacity)), np.int32)
    for row, ids in zip(buffer, prompts):
        row[: len(ids)] = ids
    filled = generate(
        params,
        buffer,
        lengths,
        np.random.default_rng(seed).integers(1 << 31, size=len(prompts)).astype(np.int32),
        prefill=int(lengths.min()),
        temperature=temperature,
        top_k=top_k,
    )
    texts = []
    for row, length in zip(np.asarray(filled), lengths):
        new = row[length : length + tokens]
        ends = np.flatnonzero(new == row[0])  # every row starts with the BOS
        texts.append(tokenizer.decode(row[1 : length + (ends[0] if len(ends) else len(new))].tolist()))
    return texts
