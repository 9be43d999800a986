"""Rows: how a stream of tokens becomes inputs and targets of equal length."""

from typing import TypedDict

import numpy as np
from jaxtyping import Float, Int, Integer


class Row(TypedDict):
    """One row; position i is asked for `targets[i]` after `inputs[:i + 1]`."""

    inputs: Int[np.ndarray, "T"]
    targets: Int[np.ndarray, "T"]
    weights: Float[np.ndarray, "T"]


class StreamRows:
    """The stream cut every T tokens: row i has inputs `[iT, iT + T)` and targets one later. Random access; every token
    but the stream's first, and fewer than T at its end, is a target of exactly one row."""

    def __init__(self, tokens: Integer[np.ndarray, "tokens"], length: int):
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.length

    def __getitem__(self, index: int) -> Row:
        start = int(index) * self.length
        window = np.asarray(self.tokens[start : start + self.length + 1]).astype(np.int32)
        return Row(inputs=window[:-1], targets=window[1:], weights=np.ones(self.length, np.float32))
