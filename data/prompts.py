"""Prompts of texts to continue, as tokens."""

from collections.abc import Sequence

from data.tokenizer import TextTokenizer
from system.errors import UserError


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
