"""Test bits per byte of any text: each document's rows alone count. Test the inputs and comparisons of networks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase

from data.prepare.corpus import Document
from data.prepare.preparation import Preparation, prepare
from data.tokenizer import TextTokenizer
from evaluation.statistics import ratio
from evaluation.texts import bits_of, compared, figures, read_documents
from model.loss import softcap
from system.errors import UserError
from tests.data.preparations import write_files
from tests.evaluation.core_bundle import CONFIG, network, params, tokenizer, words
from training.sharded import split_model

LENGTH = 84  # tokens per row: no size that rows are rounded up to
MODEL = replace(CONFIG, short_window=20)
TEXTS = [*(" ".join(words()[:count]) for count in (2, 9, 30, 90)), "é" * 40]
DOCUMENTS = [Document(f"document {i}", text) for i, text in enumerate(TEXTS)]


def test_a_document_s_bits_are_those_of_its_tokens_in_rows_of_their_own():
    measured = bits_of(network(1, LENGTH, short_window=20), "runs/x", DOCUMENTS)
    graphdef, _ = split_model(MODEL, jnp.dtype("float32"))
    model = nnx.merge(graphdef, params())
    logits_of = jax.jit(lambda tokens: softcap(model(tokens)[0], MODEL.softcap)[0])
    for bits, ids in zip(measured, tokenizer().encode(TEXTS), strict=True):
        expected = []
        for first in range(0, len(ids), LENGTH):
            row = ids[first : first + LENGTH]
            padded = np.zeros((1, LENGTH), np.int32)
            padded[0, : len(row)] = [tokenizer().bos, *row[:-1]]
            logits = logits_of(padded)[: len(row)]
            expected += (-jax.nn.log_softmax(logits)[np.arange(len(row)), np.array(row)] / np.log(2)).tolist()
        assert bits == pytest.approx(sum(expected), rel=1e-5)
    sizes = [len(text.encode()) for text in TEXTS]
    result = figures(measured, sizes)
    assert result["bits_per_byte"] == pytest.approx(measured.sum() / sum(sizes))
    assert (result["documents"], result["bytes"]) == (5, sum(sizes))


def test_a_small_difference_shared_by_all_documents_is_significant():
    random = np.random.default_rng(0)
    hard, sizes = 1000 + 300 * random.standard_normal(40), [1000] * 40
    result = compared(hard - 5 + random.standard_normal(40), hard, sizes)
    assert result["difference"] == pytest.approx(-0.005, abs=5e-4)
    assert result["interval"][0] < -0.005 < result["interval"][1] < 0
    width = result["interval"][1] - result["interval"][0]
    assert width < ratio(hard.tolist(), sizes)[1] / 20  # without pairs the interval would contain 0
    random = np.random.default_rng(1)
    drawn = lambda: compared(hard + random.standard_normal(40), hard, sizes)["interval"]
    contain_0 = sum(low <= 0 <= high for low, high in (drawn() for _ in range(400)))
    assert contain_0 == pytest.approx(380, abs=18)  # 95% +- four standard deviations
    assert compared(hard[:1], hard[:1], sizes[:1])["interval"] is None


def test_documents_of_raw_text_and_of_a_dataset_are_always_the_same(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for i in range(40):
        (raw / f"{i}.txt").write_text("" if i % 10 == 0 else f"{i}: " + " ".join(words()[i : 2 * i]))
    read = lambda source, most: read_documents(str(source), most, "text", tmp_path / "cache")
    whole, skipped = read(raw, 100)
    assert (len(whole), skipped) == (36, 4)
    some, skipped = read(raw, 10)
    assert some == whole[: len(some)] and len(some) + skipped == 10

    prepare(Preparation(source=str(raw), vocab_size=300, val_fraction=0.3, on_error="skip"), tmp_path / "made")
    held_out, _ = read(tmp_path / "made", 100)
    texts = {document.text for document in whole}
    assert 5 < len(held_out) < 20 and {document.text for document in held_out} < texts
    few, _ = read(tmp_path / "made", 3)
    assert len(few) == 3 and set(few) < set(held_out)


def test_every_kind_of_text_that_is_trained_on_is_read(tmp_path):
    files = {"a.csv": "body,id\none,1\n", "b.tsv": "id\tbody\n1\ttwo\n", "c.rst": "three", "d.jsonl": '{"body": 4}\n'}
    write_files(tmp_path, files)

    def read(name: str, extensions: str = "") -> list[str]:
        documents, _ = read_documents(f"{tmp_path}/{name}", 9, "body", tmp_path / "cache", extensions)
        return [document.text for document in documents]

    assert [read("a.csv"), read("b.tsv"), read("c.rst", ".rst")] == [["one"], ["two"], ["three"]]
    with pytest.raises(UserError, match=r"c\.rst: no file of text found there; .*--text_extensions"):
        read("c.rst")
    says = r"gives no document with text \(1 were skipped, d\.jsonl line 1 the first: no text under 'body'"
    with pytest.raises(UserError, match=says):
        read("d.jsonl")


def test_a_tokenizer_that_loses_the_text_is_not_measured():
    library = Tokenizer.from_str(tokenizer().json)
    library.normalizer = Lowercase()
    lossy = replace(network(1, LENGTH), tokenizer=TextTokenizer(library.to_str()))
    with pytest.raises(UserError, match=r"tokenizer of runs/x loses text.* two decode from"):
        bits_of(lossy, "runs/x", [Document("one", "same"), Document("two", "NOT the same")])
