"""Tokens a second of evaluation/engine.py and of nanochat's engine, on the same weights, as a JSON line a batch size:

NANOCHAT_DIR=... python -m bench.generation --config=configs/small.py

Both compute in float32, draw with temperature 0.8 and the top 50, and take turns. Their medians are compared. The
weights are random. A rate counts the tokens after the first one of each text. So it leaves out reading the prompt,
since nanochat's engine reads the prompt once for all texts. `first` is the time to the first token.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np

from bench.nanochat_names import their_network
from configs.command_line import parse
from configs.schema import MeshConfig, Positive
from data.tokenizer import train_tokenizer
from evaluation.engine import Engine
from evaluation.network import Network
from hosts.runtime import run_command
from model.sampling import Sampling
from training.build import build
from training.mesh import make_mesh


@dataclass(frozen=True)
class Arguments:
    """The measurement."""

    batches: tuple[Positive[int], ...] = (1, 16)
    """Texts that are written together."""
    prompt: Positive[int] = 16
    """Tokens of the prompt."""
    tokens: Positive[int] = 200
    """New tokens of each text."""
    rounds: Positive[int] = 7
    """Texts of each engine, in turn. One more warms up."""


def their_engine(network: Any) -> Any:
    """Return nanochat's engine, whose texts do not end early."""
    sys.modules["rustbpe"] = ModuleType("rustbpe")  # nanochat's engine imports it with its tokenizer
    from nanochat.engine import Engine as Theirs  # pyright: ignore[reportMissingImports]

    return Theirs(network, SimpleNamespace(encode_special=lambda name: -1, get_bos_token_id=lambda: -1))


def our_columns(engine: Engine, prompt: list[int], texts: int, tokens: int, seed: int) -> Iterator[None]:
    """Yield after each token of all texts."""
    for text in range(texts):
        engine.begin(prompt, Sampling(0.8, 50, 1.0, seed * texts + text), tokens)
    while engine.free < texts:
        engine.step()
        yield


def their_columns(engine: Any, prompt: list[int], texts: int, tokens: int, seed: int) -> Iterator[None]:
    """Yield after each token of all texts."""
    for _ in engine.generate(prompt, texts, tokens, 0.8, 50, seed):
        yield


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    config = replace(config, model=replace(config.model, dtype="float32"))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    vocab, noise = config.model.vocab_size, np.random.default_rng(0)
    params = jax.tree.map(
        lambda p: p + 0.05 * noise.standard_normal(p.shape, np.float32), build(config).create_state().params
    )
    network = Network(config, train_tokenizer(["text"], 270), params, mesh)
    theirs = their_engine(their_network(config, params))
    for texts in arguments.batches:
        ours = Engine(network, texts)
        ours.ends = set()
        rates, firsts = {"ours": [], "nanochat": []}, {"ours": [], "nanochat": []}
        for turn in range(arguments.rounds + 1):
            prompt = noise.integers(9, vocab, arguments.prompt).tolist()
            for name, columns in ("ours", our_columns), ("nanochat", their_columns):
                started = time.perf_counter()
                written = columns(ours if name == "ours" else theirs, prompt, texts, arguments.tokens, turn)
                next(written)
                first = time.perf_counter()
                count = sum(1 for _ in written)
                if turn:
                    rates[name].append(texts * count / (time.perf_counter() - first))
                    firsts[name].append(first - started)
        median = {name: statistics.median(of_name) for name, of_name in rates.items()}
        line = {"config": config.name, "texts": texts, "jax": jax.__version__}
        line |= {f"{name}_tokens_per_second": round(rate) for name, rate in median.items()}
        line |= {f"{name}_first_ms": round(1000 * statistics.median(of_name), 1) for name, of_name in firsts.items()}
        print(json.dumps(line | {"ratio": round(median["ours"] / median["nanochat"], 2)}), flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
