"""Test text on the Hugging Face hub, and the recipes of docs/data.md, with a small server for the part of the hub's API
that the client uses."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest
from huggingface_hub import HfApi

import data.prepare.__main__
from data.dataset_folder import open_dataset
from data.prepare.listing import find_corpus
from data.prepare.preparation import Preparation, prepare
from options.schema import DataConfig
from system.errors import StorageLost, UserError
from tests.data.preparations import facts_of
from tests.data.prepare.hub import (
    SHA,
    Hub,
    ask,
    parquet,
    serving,
    text,
)


@pytest.fixture(scope="module")
def endpoint():
    with serving(Hub) as url:
        yield url


def test_a_folder_of_a_dataset_comes_file_by_file_at_one_revision_and_grows(endpoint, tmp_path, monkeypatch):
    ask(endpoint, monkeypatch, tmp_path)
    source = Preparation(source="hf:owner/name:sample/10BT", vocab_size=280, val_fraction=0.1)
    Hub.asked.clear()
    prepare(source, tmp_path / "out", max_files=1, workers=1)
    assert Hub.asked == ["sample/10BT/000.parquet"]
    prepare(source, tmp_path / "out", workers=1)
    facts = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert facts["made_from"]["version"] == f"{SHA}/sample/10BT" and facts["complete"]
    assert facts["train"]["documents"] + facts["val"]["documents"] == 3 * 20
    assert len(Hub.asked) == 3  # no file twice
    with pytest.raises(UserError, match="3 files already"):
        prepare(source, tmp_path / "out", max_files=1)


def test_a_glob_and_a_revision_are_requested_and_a_given_commit_is_kept(endpoint, tmp_path, monkeypatch):
    ask(endpoint, monkeypatch, tmp_path)
    revisions, info = [], HfApi.dataset_info
    monkeypatch.setattr(HfApi, "dataset_info", lambda *a, revision, **k: revisions.append(revision) or info(*a, **k))
    corpus = find_corpus("hf:owner/name@v1.0:*/*BT/00[01]*", revision=SHA)
    assert [file.name for file in corpus.files] == ["sample/10BT/000.parquet", "sample/10BT/001.parquet"]
    assert {file.url.partition(":sample")[0] for file in corpus.files} == {f"hf:owner/name@{SHA}"}
    find_corpus("hf:owner/name", revision=SHA)
    assert revisions == ["v1.0", SHA] and "1 .md" in corpus.left_out + find_corpus("hf:owner/name").left_out


def test_a_dataset_missing_on_the_hub_is_a_user_error(endpoint, tmp_path, monkeypatch):
    ask(endpoint, monkeypatch, tmp_path)
    with pytest.raises(UserError, match="nothing found there"):
        find_corpus("hf:owner/name:sample/99BT")
    for source in ("hf:owner/missing", "hf:no name at all"):
        with pytest.raises(UserError, match=f"{source}: the hub refuses this"):
            find_corpus(source)


def test_an_unreachable_network_is_retried_and_no_user_error(monkeypatch):
    """Retry, although the client's errors are no OSErrors."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("system.files.RETRY_SECONDS", 0)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    with pytest.raises(StorageLost, match=r"hf:owner/name: .*refused"):
        find_corpus("hf:owner/name")


class Busy(Hub):
    """Answer the first requests with 429."""

    left = 2

    def answer(self, body: bool):
        if not Busy.left:
            return super().answer(body)
        Busy.left -= 1
        self.send_response(429)
        self.send_header("Retry-After", "330")
        self.send_header("Content-Length", "0")
        self.end_headers()


def test_a_hub_that_asks_for_a_pause_gets_it(tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr("tenacity.nap.time.sleep", pauses.append)
    with serving(Busy) as endpoint:
        ask(endpoint, monkeypatch, tmp_path)
        assert find_corpus("hf:owner/name").files
    assert len(pauses) == 2 and all(330 <= pause < 360 for pause in pauses)


# The recipes of docs/data.md.

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
RECIPES = re.findall(r"^python -m data\.prepare (--source=hf:.*)$", PAGE.partition("## Recipes")[2], re.MULTILINE)


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


def test_every_dataset_has_a_recipe():
    sources = [re.split("[: ]", recipe)[1] for recipe in RECIPES]
    assert sources == list(Laid.repositories)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs(recipe, tmp_path, monkeypatch, capfd):
    """Change only the output folder, and sizes that need more text."""
    words = re.sub("--out=[^ ]+", f"--out={tmp_path}/out", recipe)
    monkeypatch.setattr(sys, "argv", ["prepare", *shlex.split(words), "--vocab_size=280", "--val_fraction=0.2"])
    with serving(Laid) as endpoint:
        ask(endpoint, monkeypatch, tmp_path)
        assert data.prepare.__main__.main() == 0
    assert json.loads(capfd.readouterr().out)["train"] == facts_of(tmp_path / "out")["train"]
    dataset = open_dataset(f"{tmp_path}/out", DataConfig(), 280, tmp_path / "cache")
    texts = []
    for part in ("train", "val"):
        tokens = dataset.stream(part).read(0, 10**6).tolist()
        texts += dataset.tokenizer.decode(tokens).split("Document ")[1:]
    assert sorted(texts) == sorted(text(i).removeprefix("Document ") for i in range(40))
