"""Run the commands of docs/data.md's recipes on small files in the hub's layout."""

import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data.prepare.__main__
from configs.schema import DataConfig
from data.dataset_folder import open_dataset
from tests.data.preparations import facts_of
from tests.data.prepare.test_remote import Hub, ask, serving

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
RECIPES = re.findall(r"^python -m data\.prepare (--source=hf:.*)$", PAGE.partition("## Recipes")[2], re.MULTILINE)


def text(i: int) -> str:
    return f"Document {i} has some words of its own, {i * i} and {i**3}, and is \u2014 like the web \u2014 no ASCII."


def parquet(first: int, compression: str) -> bytes:
    """Return 20 rows in groups of 8, with another column next to the text."""
    rows = {"url": ["http://a.b"] * 20, "text": [text(i) for i in range(first, first + 20)]}
    content = io.BytesIO()
    pq.write_table(pa.table(rows), content, compression=compression, row_group_size=8)
    return content.getvalue()


def zst(first: int) -> bytes:
    lines = "".join(
        json.dumps({"url": "http://a.b", "metadata": {"Content-Length": "61769"}, "text": text(i)}) + "\n"
        for i in range(first, first + 20)
    )
    return pa.compress(lines.encode(), "zstd", asbytes=True)


LOCAL = "global-shard_01_of_10/local-shard_0_of_10/shard_0000000{}_processed.jsonl.zst"


class Laid(Hub):
    """Serve each dataset with three files: the recipe takes two of them."""

    repositories: ClassVar = {
        "HuggingFaceFW/fineweb-edu": {
            "data/CC-MAIN-2024-10/000_00000.parquet": parquet(900, "snappy"),
            **{f"sample/10BT/00{i}_00000.parquet": parquet(20 * i, "snappy") for i in range(2)},
        },
        "karpathy/climbmix-400b-shuffle": {f"shard_0000{i}.parquet": parquet(20 * i, "zstd") for i in range(2)},
        "mlfoundations/dclm-baseline-1.0": {
            "global-shard_10_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zst": zst(900),
            **{LOCAL.format(i): zst(20 * i) for i in range(2)},
        },
        "Skylion007/openwebtext": {
            f"plain_text/train-0000{i}-of-00080.parquet": parquet(20 * i, "snappy") for i in range(2)
        },
        "roneneldan/TinyStories": {
            "data/train-00000-of-00004-2d5a1467fff1081b.parquet": parquet(0, "snappy"),
            "data/validation-00000-of-00001-869c898b519ad725.parquet": parquet(20, "snappy"),
            "TinyStoriesV2-GPT4-train.txt": b"Once upon a time\n<|endoftext|>\n",
        },
    }


@pytest.fixture(scope="module")
def endpoint():
    with serving(Laid) as url:
        yield url


def test_every_dataset_has_a_recipe():
    sources = [re.split("[: ]", recipe)[1] for recipe in RECIPES]
    assert sources == list(Laid.repositories)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs(recipe, endpoint, tmp_path, monkeypatch, capfd):
    """Change only the output folder, and sizes that need more text."""
    ask(endpoint, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    words = re.sub("--out=[^ ]+", f"--out={tmp_path}/out", recipe)
    monkeypatch.setattr(sys, "argv", ["prepare", *shlex.split(words), "--vocab_size=280", "--val_fraction=0.2"])
    assert data.prepare.__main__.main() == 0
    assert json.loads(capfd.readouterr().out)["train"] == facts_of(tmp_path / "out")["train"]
    dataset = open_dataset(f"{tmp_path}/out", DataConfig(), 280, tmp_path / "cache")
    texts = []
    for part in ("train", "val"):
        tokens = dataset.stream(part).read(0, 10**6).tolist()
        texts += dataset.tokenizer.decode(tokens).split("Document ")[1:]
    assert sorted(texts) == sorted(text(i).removeprefix("Document ") for i in range(40))
