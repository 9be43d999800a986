"""Make a bundle with every kind of task, and a network that solves some of its items, for the tests of CORE."""

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from data.prepare.selection import train_tokenizer
from data.tokenizer import TextTokenizer
from options.schema import BatchConfig, Config, MeshConfig, ModelConfig
from run.network import Network
from tests.helpers import perturbed
from training.dtype import compute_dtype
from training.mesh import make_mesh
from training.sharded import shard_network, split_model
from training.state import stored_as

LONGEST = 256  # tokens per row
SIZES = {"depth": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab_size": 320, "dtype": "float32"}
CONFIG = ModelConfig(
    **SIZES,
    **{"qk_scale": 1.2, "window_pattern": "SSSL", "short_window": 128, "value_embeddings": True},
    **{"resid_lambdas": True, "x0_lambdas": True, "smear": True, "backout": True},
)
"""All of nanochat's features; a quarter of its rows, up to 128, is its short window."""
TASKS = [  # label, kind, shots, delimiter, percentage from guessing
    ("choices", "multiple_choice", 0, None, 25),
    ("choices_with_shots", "multiple_choice", 4, "\nAnswer: ", 25),
    ("long_choices", "multiple_choice", 9, "\nAnswer: ", 25),
    ("choices_at_the_limit", "multiple_choice", 0, None, 50),
    ("schema", "schema", 5, " ", 50),
    ("long_schema", "schema", 15, " ", 50),
    ("continuations", "language_modeling", 3, " ", 0),
    ("continuations_at_the_limit", "language_modeling", 0, " ", 0),
    ("long_continuations", "language_modeling", 11, " ", 0),
]


@cache
def words() -> list[str]:
    return [word for word in (Path(__file__).parents[1] / "words.txt").read_text().split() if word.isalpha()]


@cache
def tokenizer() -> TextTokenizer:
    return train_tokenizer([" ".join(words())], CONFIG.vocab_size)


@cache
def short_words() -> list[str]:
    """Return the words that are one token after a blank."""
    return sorted(word for word in set(words()) if len(tokenizer().encode([" " + word])[0]) == 1)


def off_zero(model: ModelConfig) -> dict:
    """Return random parameters, on the host."""
    shapes = split_model(model, jnp.dtype("float32"))[1]
    return perturbed(jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes))


def params() -> dict:
    """Return random parameters, with a head that prefers the preceding token: the network continues repetitions."""
    params = off_zero(CONFIG)
    params["resid_lambdas"]["values"] += 1
    table = params["embed"]["table"] = 8 * params["embed"]["table"]  # a usual size: our eps is not nanochat's
    params["lm_head"]["kernel"] = 2 * table.T / np.linalg.norm(table, axis=1)
    return params


def network_of(model: ModelConfig, params: dict, tokenizer: TextTokenizer, length: int, devices: int) -> Network:
    """Return a network on one device, or on a mesh of 2 x 2 x 2, for rows of `length` tokens."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2) if devices == 8 else MeshConfig(), jax.devices()[:devices])
    config = Config("tiny", model=model, batch=BatchConfig(length, 4 * length, 4))
    on_mesh = shard_network(model, compute_dtype(model, "cpu"), mesh)
    return Network(config, tokenizer, stored_as(params, on_mesh.abstract_params()), on_mesh)


def network(devices: int = 1, length: int = LONGEST, **model) -> Network:
    return network_of(replace(CONFIG, **model), params(), tokenizer(), length, devices)


def make_bundle(folder: Path) -> Path:
    """Write the bundle, and return its folder."""
    entries = [
        {"label": label, "dataset_uri": f"some/{label}.jsonl", "num_fewshot": [shots], "icl_task_type": kind}
        | ({} if delimiter is None else {"continuation_delimiter": delimiter})
        for label, kind, shots, delimiter, _ in TASKS
    ]
    (folder / "eval_data" / "some").mkdir(parents=True)
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    rows = "".join(f"{label},made here,{percent}\n" for label, *_, percent in TASKS)
    (folder / "eval_meta_data.csv").write_text("Eval Task,Task Category,Random baseline\n" + rows)
    for label, kind, *_ in TASKS:
        lines = [json.dumps(item) + "\n" for item in items(label, kind)]
        (folder / "eval_data" / "some" / f"{label}.jsonl").write_text("".join(lines))
    return folder


def items(label: str, kind: str) -> list[dict]:
    """Return a task's items, with the same words each time."""
    rng = random.Random(label)
    some = lambda least, most: " ".join(rng.choices(words(), k=rng.randint(least, most)))
    if label.endswith("at_the_limit"):
        return at_the_limit(kind, rng)
    if kind == "multiple_choice":
        made = [{"query": some(4, 6), "choices": [some(1, 2) for _ in range(4)]} for _ in range(20)]
        made[0]["choices"][2] = made[0]["choices"][1]  # a tie
        made[1]["choices"][:2] = [word := rng.choice(words()), f"{word} {some(2, 2)}"]
        made[2]["choices"] = [f"{word}{more}" for more in ("", *(" " + some(1, 2) for _ in range(3)))]
        made[3]["choices"] = made[2]["choices"][::-1]  # the last is the beginning of the others
        return [item | {"gold": rng.randrange(len(item["choices"]))} for item in made]
    if kind == "schema":
        contexts = lambda: [some(1, 4) for _ in range(2)]
        made = [{"context_options": contexts(), "continuation": some(1, 3)} for _ in range(24)]
        return [item | {"gold": rng.randrange(len(item["context_options"]))} for item in made]
    again = [(rng.choice(short_words()), rng.randint(1, 3)) for _ in range(14)]
    made = [{"context": f" {some(2, 6)} {word} {word} ", "continuation": " ".join([word] * n)} for word, n in again]
    return made + [{"context": some(3, 12), "continuation": some(1, 2)} for _ in range(10)]


def at_the_limit(kind: str, rng: random.Random) -> list[dict]:
    """Return items with rows a few tokens around `LONGEST`. Each `~`, and each short word, is a token."""
    lengths = range(LONGEST - 9, LONGEST + 4)
    if kind == "language_modeling":
        made = []
        for length in lengths:
            word, *others = rng.choices(short_words(), k=length - 1)
            answer = [word] * (1 + length % 3) if length % 4 else rng.choices(short_words(), k=2)
            made.append({"context": " ".join([*others, word, word]), "continuation": " ".join(answer)})
        return made
    made = [{"query": "~" * length, "choices": rng.choices(words(), k=2), "gold": length % 2} for length in lengths]
    # One choice fills the row, so no token is left to predict its first one.
    whole, short = "~" * (LONGEST - 1), rng.choice(words())
    return [*made, *({"query": "or", "choices": pair, "gold": 0} for pair in ([whole, short], [short, whole]))]
