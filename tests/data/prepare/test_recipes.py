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
from tests.data.prepare.test_remote import Hub, ask, serving

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
RECIPES = re.findall(r"^python -m data\.prepare (--source=hf:.*)$", PAGE.partition("## Recipes")[2], re.MULTILINE)


def text(i: int) -> str:
    return f"Document {i} has some words of its own, {i * i} and {i**3}, and is \u2014 like the web \u2014 no ASCII."


def parquet(first: int, columns: dict[str, object], compression: str) -> bytes:
    """Return 20 rows in groups of 8, with other columns next to the text."""
    rows = {"text": [text(i) for i in range(first, first + 20)], **{name: [it] * 20 for name, it in columns.items()}}
    content = io.BytesIO()
    pq.write_table(pa.table(rows), content, compression=compression, row_group_size=8)
    return content.getvalue()


def zst(first: int, columns: dict[str, object]) -> bytes:
    lines = "".join(json.dumps({**columns, "text": text(i)}) + "\n" for i in range(first, first + 20))
    return pa.compress(lines.encode(), "zstd", asbytes=True)


EDU = {
    **{"id": "<urn:uuid:0>", "dump": "CC-MAIN-2024-10", "url": "http://a.b", "file_path": "s3://c/d.warc.gz"},
    **{"language": "en", "language_score": 0.97, "token_count": 20, "score": 3.1, "int_score": 3},
}
DCLM = {
    **{"bff_contained_ngram_count_before_dedupe": 3, "language_id_whole_page_fasttext": {"en": 0.94}},
    **{"metadata": {"Content-Length": "61769", "WARC-Type": "response"}, "previous_word_count": 90},
    **{"url": "http://a.b", "warcinfo": "robots: classic\r\n", "fasttext_openhermes_reddit_eli5_vs_rw_v2_prob": 0.08},
}
LOCAL = "global-shard_01_of_10/local-shard_0_of_10/shard_0000000{}_processed.jsonl.zst"


class Laid(Hub):
    """Serve each dataset with three files: the recipe takes two of them."""

    repositories: ClassVar = {
        "HuggingFaceFW/fineweb-edu": {
            "data/CC-MAIN-2024-10/000_00000.parquet": parquet(900, EDU, "snappy"),
            **{f"sample/10BT/00{i}_00000.parquet": parquet(20 * i, EDU, "snappy") for i in range(2)},
        },
        "karpathy/climbmix-400b-shuffle": {f"shard_0000{i}.parquet": parquet(20 * i, {}, "zstd") for i in range(2)},
        "mlfoundations/dclm-baseline-1.0": {
            "global-shard_10_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zst": zst(900, DCLM),
            **{LOCAL.format(i): zst(20 * i, DCLM) for i in range(2)},
        },
        "Skylion007/openwebtext": {
            f"plain_text/train-0000{i}-of-00080.parquet": parquet(20 * i, {}, "snappy") for i in range(2)
        },
        "roneneldan/TinyStories": {
            "data/train-00000-of-00004-2d5a1467fff1081b.parquet": parquet(0, {}, "snappy"),
            "data/validation-00000-of-00001-869c898b519ad725.parquet": parquet(20, {}, "snappy"),
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
def test_every_recipe_runs(recipe, endpoint, tmp_path, monkeypatch):
    """Change only the output folder, and sizes that need more text."""
    ask(endpoint, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    words = re.sub("--out=[^ ]+", f"--out={tmp_path}/out", recipe)
    monkeypatch.setattr(sys, "argv", ["prepare", *shlex.split(words), "--vocab_size=280", "--val_fraction=0.2"])
    assert data.prepare.__main__.main() == 0
    dataset = open_dataset(f"{tmp_path}/out", DataConfig(), 280, tmp_path / "cache")
    texts = []
    for part in ("train", "val"):
        tokens = dataset.stream(part).read(0, 10**6).tolist()
        texts += dataset.tokenizer.decode(tokens).split("Document ")[1:]
    assert sorted(texts) == sorted(text(i).removeprefix("Document ") for i in range(40))
