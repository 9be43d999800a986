"""Continuations of prompts as text: the samples of a run, and of sample.py."""

from collections.abc import Sequence

import numpy as np

from generation.engine import Engine
from model.sampling import Sampling


def continuations(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, sampling: Sampling) -> list[str]:
    """Return each prompt (of `data.prompts.encode_prompts`) as text, with up to `tokens` drawn tokens after it, until
    its document ends. `sampling.seed` gives each prompt a seed of its own. Every process must call it."""
    seeds = np.random.default_rng(sampling.seed).integers(1 << 31, size=len(prompts)).tolist()
    asked = [(prompt, sampling._replace(seed=seed), tokens) for prompt, seed in zip(prompts, seeds)]
    answers = dict(engine.answers(asked))
    return [engine.tokenizer.decode([*prompt[1:], *answers[place].tokens]) for place, prompt in enumerate(prompts)]
