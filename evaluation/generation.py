"""Prompts, and what a network continues them with."""

from collections.abc import Sequence

import numpy as np
from flax import nnx

from configs.schema import UserError
from data.tokenizer import TextTokenizer
from model.generate import generate
from model.gpt import GPT


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
    graphdef: nnx.GraphDef[GPT],
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

    `params` are in the compute type and whole on every device; every process must call it.
    """
    if not prompts:
        return []
    lengths = np.array([len(ids) for ids in prompts])
    buffer = np.zeros((len(prompts), min(int(lengths.max()) + tokens, capacity)), np.int32)
    for row, ids in zip(buffer, prompts):
        row[: len(ids)] = ids
    filled = generate(
        graphdef, params, buffer, lengths, seed, prefill=int(lengths.min()), temperature=temperature, top_k=top_k
    )
    texts = []
    for row, length in zip(np.asarray(filled), lengths):
        new = row[length : length + tokens]
        ends = np.flatnonzero(new == row[0])  # every row starts with the BOS
        texts.append(tokenizer.decode(row[1 : length + (ends[0] if len(ends) else len(new))].tolist()))
    return texts
