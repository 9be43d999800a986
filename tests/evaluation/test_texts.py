"""Test bits per byte of any text: each document's rows alone count, on any mesh. Test the inputs and comparisons of
networks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase

from configs.schema import UserError
from data.prepare.corpus import Document
from data.prepare.preparation import Preparation, prepare
from data.tokenizer import TextTokenizer
from evaluation.evaluator import ratio
from evaluation.results import ItemLog
from evaluation.texts import Source, compared, digest, figures, in_words, measure_documents, measure_text, read_sources
from model.gpt import GPT
from model.loss import softcap
from tests.evaluation.core_bundle import CONFIG, network, params, tokenizer, words

LENGTH = 84  # tokens per row: no size that rows are rounded up to
MODEL = replace(CONFIG, short_window=20)


def document(name, count):
    return Document(name, " ".join(words()[:count]))


SOURCES = [
    Source("a", 0.75, [document("short", 2), document("long", 90), Document("accents", "é" * 40)], 0),
    Source("b", 0.25, [document("short", 9), document("a row", 30)], 1),
]


def measured(devices=1):
    ours = network(devices, LENGTH, short_window=20)
    return measure_documents(ours, ours.scorer(), SOURCES, ItemLog())


@pytest.fixture(scope="module")
def lines():
    return measured()


def test_a_document_s_bits_are_those_of_its_tokens_in_rows_of_their_own(lines):
    graphdef, _ = nnx.split(GPT(MODEL, jnp.dtype("float32"), rngs=nnx.Rngs(0)))
    model = nnx.merge(graphdef, params())
    logits_of = jax.jit(lambda tokens: softcap(model(tokens)[0], MODEL.softcap)[0])
    for line in lines:
        source = next(source for source in SOURCES if source.name == line["source"])
        text = next(one.text for one in source.documents if one.name == line["document"])
        ids, bits = tokenizer().encode([text])[0], []
        for first in range(0, len(ids), LENGTH):
            row = ids[first : first + LENGTH]
            padded = np.zeros((1, LENGTH), np.int32)
            padded[0, : len(row)] = [tokenizer().bos, *row[:-1]]
            logits = logits_of(padded)[: len(row)]
            bits += (-jax.nn.log_softmax(logits)[np.arange(len(row)), np.array(row)] / np.log(2)).tolist()
        assert line["bytes"] == len(text.encode()) and line["tokens"] == len(ids)
        assert line["bits"] == pytest.approx(sum(bits), rel=1e-5)


def test_figures_of_sources(lines):
    result = figures(SOURCES, lines)
    a, b = (result["sources"][name]["bits_per_byte"] for name in "ab")
    assert result["bits_per_byte"] == pytest.approx(0.75 * a + 0.25 * b) and result["documents"] == 5
    of_a = [line for line in lines if line["source"] == "a"]
    assert a == pytest.approx(sum(line["bits"] for line in of_a) / sum(line["bytes"] for line in of_a))


def lines_of(bits, size=1000):
    return [{"source": "a", "document": str(i), "bits": of, "bytes": size} for i, of in enumerate(bits)]


def test_a_small_difference_shared_by_all_documents_is_significant():
    random = np.random.default_rng(0)
    hard = 1000 + 300 * random.standard_normal(40)
    ours, theirs = hard - 5 + random.standard_normal(40), hard
    sources = [Source("a", 1.0, [Document(str(i), "x") for i in range(40)], 0)]
    result = compared(sources, lines_of(ours), lines_of(theirs))
    assert result["difference"] == pytest.approx(-0.005, abs=5e-4)
    assert result["interval"][0] < -0.005 < result["interval"][1] < 0
    width = result["interval"][1] - result["interval"][0]
    assert width < ratio(hard.tolist(), [1000] * 40)[1] / 20  # without pairs the interval would contain 0
    assert in_words("ours", "theirs", result).startswith("ours minus theirs: -0.0")
    random = np.random.default_rng(1)
    drawn = lambda: compared(sources, lines_of(hard + random.standard_normal(40)), lines_of(hard))["interval"]
    contain_0 = sum(low <= 0 <= high for low, high in (drawn() for _ in range(400)))
    assert contain_0 == pytest.approx(380, abs=18)  # 95% +- four standard deviations
    one = [Source("a", 1.0, [Document("0", "x")], 0)]
    assert compared(one, lines_of(ours[:1]), lines_of(theirs[:1]))["interval"] is None


def test_documents_of_raw_text_and_of_a_dataset_are_always_the_same(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for i in range(40):
        (raw / f"{i}.txt").write_text("" if i % 10 == 0 else f"{i}: " + " ".join(words()[i : 2 * i]))
    read = lambda source, most: read_sources(source, most, "text", tmp_path / "cache")
    (whole,) = read(str(raw), 100)
    assert len(whole.documents) == 36 and whole.skipped == 4 and whole.share == 1
    (some,) = read(str(raw), 10)
    assert some.documents == whole.documents[: len(some.documents)] and len(some.documents) + some.skipped == 10
    assert digest([some]) == digest(read(str(raw), 10)) != digest([whole])

    prepare(Preparation(source=str(raw), vocab_size=300, val_fraction=0.3, on_error="skip"), tmp_path / "made")
    first, held_out = read(f"3:{raw},1:{tmp_path / 'made'}", 100)
    assert (first.share, held_out.share) == (0.75, 0.25)
    texts = {document.text for document in whole.documents}
    assert 5 < len(held_out.documents) < 20 and {document.text for document in held_out.documents} < texts
    (few,) = read(str(tmp_path / "made"), 3)
    assert len(few.documents) == 3 and set(few.documents) < set(held_out.documents)


def test_missing_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    for source, message in (tmp_path / "no", "no: nothing found there; give `std"), (tmp_path, "no document with text"):
        with pytest.raises(UserError, match=message):
            read_sources(str(source), 10, "text", tmp_path)


def test_a_tokenizer_that_loses_the_text_is_not_measured(tmp_path):
    library = Tokenizer.from_str(tokenizer().json)
    library.normalizer = Lowercase()
    lossy = replace(network(1, LENGTH), tokenizer=TextTokenizer(library.to_str()))
    source = Source("a", 1.0, [Document("one", "same"), Document("two", "NOT the same")], 0)
    with pytest.raises(UserError, match=r"tokenizer of runs/x loses text.* two of a decode"):
        measure_text(lossy, "runs/x", [source], tmp_path)
