import json
import re
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest

import tools.dataset.__main__
from configs.schema import DataConfig, UserError
from data.dataset_folder import open_dataset
from data.mixture import Mixture, read_source
from data.prepare.preparation import Preparation, prepare
from data.prepare.selection import train_tokenizer
from data.shards import write_shard
from hosts.runtime import cache_dir
from tests.chromium import PROGRAM, Chromium
from tests.data.preparations import write_files
from tools.dataset.facts import Facts, read_facts
from tools.dataset.page import dataset_page


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "one.txt").write_text("some words of text\n" * 4000 + "".join(f"word {i}\n" for i in range(9000)))
    prepare(Preparation(source=str(folder / "one.txt"), vocab_size=273, val_fraction=0.3), folder / "data")
    return folder / "data"


def inspect(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["inspect", *map(str, words)])
    return tools.dataset.__main__.main()


SIZES = ("--sequence_length=16", "--tokens_per_step=64")


def test_an_option_that_cannot_work_is_named(made, monkeypatch):
    wrong = {
        "step": (-1, 2**63),
        "rows": (0,),
        "sequence_length": (1,),
        "tokens_per_step": (0, 15),
        "seed": (-1, 2**32),
    }
    for option in (f"--{name}={value}" for name, values in wrong.items() for value in values):
        with pytest.raises(UserError, match=f"^{option} cannot work: "):
            inspect(monkeypatch, made, "--step=0", *SIZES, option)


@pytest.fixture
def facts(tmp_path) -> Facts:
    """Return the facts of 9 documents, with duplicates. Token 0 is the BOS."""
    train_tokenizer(["some words of text " * 50], 266).save(tmp_path)
    documents = [[0, 9, 10, 11], [0, 12], [0, 9, 10, 11], [0, 13, 14, 15, 16, 9, 10, 11, 12], [0, 12], [0, 12], [0, 13]]
    write_shard(tmp_path / "train_0.bin", np.concatenate(documents[:4]), 266)
    write_shard(tmp_path / "train_1.bin", np.concatenate(documents[4:]), 266)
    write_shard(tmp_path / "val_0.bin", np.array([0, 13, 0, 9, 9]), 266)
    config = DataConfig(tokenizer=str(tmp_path / "tokenizer.json"))
    return read_facts(open_dataset(str(tmp_path), config, 0, tmp_path / "cache"), 6)


def test_documents_bytes_and_duplicates_are_counted(facts, monkeypatch):
    assert facts.train.tokens.tolist() == [4, 2, 4, 9, 2, 2, 2] and facts.val.tokens.tolist() == [2, 3]
    assert facts.train.bytes.tolist() == [3, 1, 3, 8, 1, 1, 1]
    assert facts.repeats.tolist() == [False, False, True, False, True, True, False]
    assert facts.leaked.tolist() == [True, False]
    monkeypatch.setattr("tools.dataset.facts.AT_ONCE", 3)  # reads documents in many pieces
    again = read_facts(facts.dataset, 6)
    assert all(np.array_equal(a, b) for a, b in zip(facts.train, again.train))


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_the_cost_of_packing_equals_the_count_of_its_rows(facts, packing, tmp_path):
    """Count at every position of every row."""
    rows = facts.dataset.rows("train", DataConfig(packing=packing), 6, tmp_path / "plans")
    packed = facts.packed[packing]
    seen, positions = [], 0
    for row in (rows[i] for i in range(len(rows))):
        own = 0
        for token, weight in zip(row["inputs"], row["weights"]):
            own = int(weight) + (own if token else 0)
            seen += [own] if weight else []
            positions += 1
    assert packed.rows == len(rows) and packed.padding == pytest.approx(1 - len(seen) / positions)
    assert packed.mean_seen == pytest.approx(np.mean(seen))
    assert packed.seen == pytest.approx([np.mean(np.array(seen) >= c) for c in range(1, 7)])
    # Documents start at 0, 4, 6, 10, 19, 21 and 23. Six fit 6 positions; `stream` cuts the one at 23 in two.
    assert packed.cut == pytest.approx(1 / 6 if packing == "stream" else 0)


def test_the_page_has_the_facts_and_is_self_contained(made, monkeypatch, capsys):
    assert inspect(monkeypatch, made, *SIZES[:1]) == 0
    output, page = capsys.readouterr().out, (made / "dataset.html").read_text()
    assert "repeated  " in output and "stream  " in output and "best_fit  " in output
    assert "one.txt" in page and "the most repeated" in page
    with pytest.raises(UserError, match=r"/x/y\.html cannot be written .*give --out=PATH"):
        inspect(monkeypatch, made, "--out=/x/y.html")


def test_listed_documents_name_their_files_while_the_source_is_unchanged(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for name, letter in (("a", "é"), ("b", "b"), ("c", "c")):
        (tmp_path / "text" / f"{name}.txt").write_text(f"{letter} " * 4000)
    lines = [json.dumps({"text": f"line {i} of the table"}) for i in range(50)]
    (tmp_path / "text" / "d.jsonl").write_text("\n".join(lines))
    prepare(Preparation(source=str(tmp_path / "text"), vocab_size=266, val_fraction=0.3), tmp_path / "data")
    assert inspect(monkeypatch, tmp_path / "data", *SIZES[:1]) == 0
    page = (tmp_path / "data" / "dataset.html").read_text()
    longest = [name for name, letter in (("a", "é"), ("b", "b"), ("c", "c")) if f"<pre>{letter} " in page]
    assert longest and all(f" tokens: {name}.txt</p>" in page for name in longest)
    assert re.search(r"bytes a token: d\.jsonl line \d+</p><pre>line ", page) and "file not known" not in page
    (tmp_path / "text" / "b.txt").write_text("other")
    assert inspect(monkeypatch, tmp_path / "data", *SIZES[:1]) == 0
    page = (tmp_path / "data" / "dataset.html").read_text()
    assert "tokens: file not known" in page and ".txt</p>" not in page


def test_a_damaged_file_that_is_not_prepared_yet_does_not_matter(tmp_path, monkeypatch):
    lines = "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(60))
    source = write_files(tmp_path / "text", {"a.jsonl": lines, "b.jsonl.gz": b"cut"})
    prepare(Preparation(source=source, vocab_size=266, val_fraction=0.3), tmp_path / "data", max_files=1)
    assert inspect(monkeypatch, tmp_path / "data", *SIZES[:1]) == 0
    assert "tokens: a.jsonl line " in (tmp_path / "data" / "dataset.html").read_text()


def test_for_conversations_it_counts_and_marks_the_learned_tokens(tmp_path, monkeypatch, capsys):
    turn = lambda i: [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "answer"}]
    lines = [json.dumps({"messages": turn(i) * (1 + i % 3)}) for i in range(60)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    settings = Preparation(source=f"{tmp_path}/chat.jsonl", vocab_size=266, val_fraction=0.3, conversations=True)
    prepare(settings, tmp_path / "data")
    assert inspect(monkeypatch, tmp_path / "data", "--sequence_length=40") == 0
    printed, page = capsys.readouterr().out, (tmp_path / "data" / "dataset.html").read_text()
    dataset = open_dataset(str(tmp_path / "data"), DataConfig(), 0, tmp_path / "cache")
    facts, (answer,) = read_facts(dataset, 40), dataset.tokenizer.encode(["answer"])
    assert facts.train.learned.sum() + facts.val.learned.sum() == 120 * (len(answer) + 1)  # the end token included
    assert re.search(r"learned   [\d,]+ of [\d,]+ training tokens are an assistant's", printed) and "whole  " in printed
    assert "stream" not in printed and "chat.jsonl line " in page and "file not known" not in page
    assert inspect(monkeypatch, tmp_path / "data", *SIZES, "--step=0", "--packing=whole", "--rows=1") == 0
    assert re.search(r"'q\d+«answer»", capsys.readouterr().out)


@pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed")
def test_every_plot_of_a_mixture_s_page_has_its_lines_and_nothing_is_fetched(facts, tmp_path):
    _, stages = read_source("0.9:/a/web,0.1:/a/code;from=600,0.2:/a/web,0.8:/a/good")
    page = dataset_page(["web", "code", "<good_and_deduplicated>"], [facts] * 3, 6, Mixture(stages, 6), 6000)
    (tmp_path / "page.html").write_text(page)
    with Chromium(tmp_path) as browser:
        browser.call("Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1, mobile=False)
        browser.open(f"file://{tmp_path}/page.html")
        browser.wait_for("[...document.querySelectorAll('.plot')].every(plot => plot.calcdata)")
        lines = browser.value("[...document.querySelectorAll('.plot')].map(p => [p.id, p.calcdata.length])")
        assert dict(lines) == {"lengths": 6, "bytes": 3, "split": 4, "seen": 6, "shares": 3, "epochs": 3}
        cut = "[...document.querySelectorAll('html, .scroll')].filter(part => part.scrollWidth > part.clientWidth)"
        assert browser.value(f"{cut}.map(part => part.innerText)") == []
        at = browser.value("document.getElementById('shares').data.map(line => [line.x, line.y])")
        assert at[0] == [[0, 600, 600, 6000], [90, 90, 20, 20]] and at[2][1] == [0, 0, 80, 80]
        assert browser.value("document.getElementById('epochs').data[2].y.at(-1)") == pytest.approx(720 / 4)
        asked = {event["request"]["url"][:5] for event in browser.seen("Network.requestWillBeSent")}
        assert asked <= {"file:", "data:"}
        assert browser.seen("Runtime.exceptionThrown") == []


def test_without_a_home_the_cache_must_be_named(monkeypatch):
    monkeypatch.setenv("TOKENSUM_CACHE", "~nobody-of-this-name/x")
    with pytest.raises(UserError, match="set TOKENSUM_CACHE"):
        cache_dir()


def test_a_dataset_at_a_url_has_the_facts_of_the_folder(made, tmp_path, monkeypatch, capsys):
    filesystem = fsspec.filesystem("memory")
    for path in made.rglob("*"):
        if path.is_file():
            filesystem.pipe(f"/inspected/{path.relative_to(made)}", path.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENSUM_CACHE", str(tmp_path / "cache"))
    assert inspect(monkeypatch, made, f"--out={tmp_path / 'folder.html'}") == 0
    folder = capsys.readouterr().out.splitlines()
    assert inspect(monkeypatch, "memory://inspected") == 0
    stored = capsys.readouterr().out.splitlines()
    assert stored[0].startswith("memory://inspected  (fingerprint") and stored[1:-1] == folder[1:-1]
    assert (tmp_path / "dataset.html").exists() and not (tmp_path / "memory:").exists()
    assert inspect(monkeypatch, "memory://inspected", "--step=3", *SIZES) == 0
    assert "step 3: 4 rows of 16 tokens, of which 4 follow" in capsys.readouterr().out
    with pytest.raises(UserError, match="nothing is there"):
        inspect(monkeypatch, "memory://nowhere")
