"""CORE: prompts, scores and figures, item for item nanochat's, on any mesh; and what a bundle may lack."""

import json
import os
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import BatchConfig, MeshConfig, UserError
from evaluation.benchmarks import Benchmarks, plot_core
from evaluation.core import KINDS, READS, Task, encode, figures, judge, read_bundle
from evaluation.item_log import append_to_log, open_log
from evaluation.scorer import Scorer, Scores, by_shape, chunk_of, size_down, size_up, tokens_of
from tests.evaluation import nanochat_core
from tests.evaluation.core_bundle import CONFIG, LONGEST, TASKS, make_bundle, params, tokenizer
from tests.nanochat_checkout import import_nanochat
from training.mesh import make_mesh
from training.state import abstract_params, stored_as

BATCH = BatchConfig(sequence_length=LONGEST, tokens_per_step=4 * LONGEST, rows_per_device=4)
MESHES = {"one": (MeshConfig(), 1), "eight": (MeshConfig(data=2, fsdp=2, tensor=2), 8)}
LABELS = [label for label, *_ in TASKS]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("bundle"))


def benchmarks(bundle, mesh="one", items=None, dtype="float32", longest=READS * LONGEST):
    """What scores the bundle on one of `MESHES`, and the network's parameters there."""
    sizes, devices = MESHES[mesh]
    mesh = make_mesh(sizes, jax.devices()[:devices])
    abstract = abstract_params(CONFIG, mesh)
    tasks = read_bundle(str(bundle), items)
    scorer = Scorer(replace(CONFIG, dtype=dtype), BATCH, jnp.dtype(dtype), mesh, longest)
    return Benchmarks(tasks, tokenizer(), scorer), stored_as(params(), abstract)


def lines_on(bundle, mesh, labels=LABELS, **options):
    """The lines of all items of these tasks, in order, on one of `MESHES`."""
    run, placed = benchmarks(bundle, mesh, **options)
    run.tasks = [task for task in run.tasks if task.label in labels]
    lines = []
    run(placed, record=lines.extend)
    return sorted(lines, key=lambda line: (LABELS.index(line["task"]), line["item"]))


def require_equal(lines, theirs, tasks, longest=READS * LONGEST):
    """That the items' answers and their spans are nanochat's, and their mean losses up to rounding."""
    for task in tasks:
        questions = encode(task, range(len(task.items)), tokenizer(), longest)
        assert len(questions) == len(theirs[task.label])
        for line in (line for line in lines if line["task"] == task.label):
            question, expected = questions[line["item"]], theirs[task.label][line["item"]]
            for (start, end), other, row in zip(question.spans, expected["spans"], question.rows, strict=True):
                assert len(row) == end == other[1] <= longest
                assert start == other[0] or (start == end and other[0] == 0)  # of which nanochat's mean is nan
            assert line["correct"] == expected["correct"], (line, expected)
            ours, other = (np.array(losses, np.float64) for losses in (line["losses"], expected["losses"]))
            np.testing.assert_allclose(ours, other, atol=1e-4)


@pytest.fixture(scope="module")
def nanochat_s():
    """Its results of all items, which tests/evaluation/nanochat_core.py kept."""
    return json.loads(nanochat_core.RESULTS.read_text())


@pytest.mark.medium
def test_items_of_every_kind_are_as_nanochat_s_core_eval_has_them(bundle, nanochat_s):
    """With and without shots, a shared prefix and prompts that are longer than the row."""
    labels = ("choices", "choices_with_shots", "long_schema", "continuations_at_the_limit")
    lines = lines_on(bundle, "one", labels)
    require_equal(lines, nanochat_s, read_bundle(str(bundle), None))
    kinds = {label: kind for label, kind, *_ in TASKS}
    assert {kinds[line["task"]] for line in lines} == set(KINDS) and len(lines) > 70
    assert not any(line["cut"] for line in lines) and {line["correct"] for line in lines} == {True, False}
    long = next(task for task in read_bundle(str(bundle), None) if task.label == "long_schema")
    lengths = [max(map(len, question.rows)) for question in encode(long, range(24), tokenizer(), READS * LONGEST)]
    assert min(lengths) < LONGEST < max(lengths) - 20


@pytest.mark.medium
def test_items_that_are_cut_are_as_nanochat_has_them_of_a_network_with_a_limit(bundle, nanochat_s):
    lines = lines_on(bundle, "one", [label for label in LABELS if f"{label}, cut" in nanochat_s], longest=LONGEST)
    tasks = [task for task in read_bundle(str(bundle), None) if f"{task.label}, cut" in nanochat_s]
    require_equal(lines, {task.label: nanochat_s[f"{task.label}, cut"] for task in tasks}, tasks, LONGEST)
    assert {line["cut"] > 0 for line in lines} == {line["correct"] for line in lines} == {True, False}


@pytest.mark.slow
def test_every_item_is_as_nanochat_s_core_eval_has_it_on_any_mesh(bundle, nanochat_s):
    one, eight = lines_on(bundle, "one"), lines_on(bundle, "eight")
    assert len(one) == len(eight) == sum(len(nanochat_s[label]) for label in LABELS)
    for lines in (one, eight):
        require_equal(lines, nanochat_s, read_bundle(str(bundle), None))
    assert all(0 < sum(item["correct"] for item in nanochat_s[label]) < len(nanochat_s[label]) for label in LABELS)
    for ours, theirs in zip(one, eight):
        losses, others = (np.array(line["losses"], np.float64) for line in (ours, theirs))
        np.testing.assert_allclose(losses, others, atol=5e-5)
        assert ours["correct"] == theirs["correct"] or ours["tie"]
    alike = [line for line in one if line["task"] == "choices" and line["losses"].count(None) == 0]
    ties = [line for line in alike if len(set(line["losses"])) < 4]
    assert len(ties) == 1 and (ties[0]["margin"] == 0) == ties[0]["tie"]  # where the two are the best


@pytest.mark.slow
@pytest.mark.skipif("NANOCHAT_DIR" not in os.environ, reason="NANOCHAT_DIR names no checkout of nanochat")
def test_a_subset_is_as_nanochat_beside_us_has_it(bundle, monkeypatch):
    """Of 16 items a task; the shots come from among them."""
    pytest.importorskip("torch")
    gpt, core_eval = import_nanochat(monkeypatch, "gpt", "core_eval")
    network = nanochat_core.their_network(gpt, CONFIG, params(), LONGEST)
    run, placed = benchmarks(bundle, items=16)
    lines = []
    run(placed, record=lines.extend)
    lines.sort(key=lambda line: line["item"])
    theirs = {
        task.label: nanochat_core.their_items(core_eval, network, tokenizer(), bundle, task, 16, None)
        for task in run.tasks
    }
    require_equal(lines, theirs, run.tasks)


def test_core_is_the_mean_of_centred_accuracies():
    tasks = [Task("a", "multiple_choice", 0, " ", 0.25, []), Task("b", "language_modeling", 0, " ", 0.0, [])]
    line = lambda task, correct: {"task": task, "correct": correct, "tie": correct, "cut": 3, "unscored": 0}
    results = figures(tasks, [line("a", i < 5) for i in range(10)] + [line("b", i < 1) for i in range(5)])
    a, b = results["tasks"]["a"], results["tasks"]["b"]
    assert a["accuracy"] == 0.5 and a["centered"] == pytest.approx(1 / 3) and a["stderr"] == pytest.approx(1 / 6)
    assert b["centered"] == 0.2 and b["centered_stderr"] == b["stderr"] == pytest.approx(0.2)
    assert (a["ties"], a["cut"], a["unscored"]) == (5, 10, 0)
    assert results["core"] == pytest.approx((1 / 3 + 0.2) / 2)
    assert results["core_stderr"] == pytest.approx(np.hypot(1 / 6 / 0.75, 0.2) / 2)


def test_an_option_without_a_token_of_its_own_is_chosen_only_where_it_is_the_first(bundle):
    """As nanochat's mean over nothing, nan, decides it."""
    task = read_bundle(str(bundle), None)[0]
    question = encode(task, [0], tokenizer(), LONGEST)[0]
    answer = lambda *spans: judge(
        task, question._replace(spans=spans), np.array([3.0, 2.0]), np.ones(2, bool), np.ones(2), 1e-4
    )
    assert answer((5, 5), (5, 6))["choice"] == 0 and answer((5, 6), (5, 5))["choice"] == 0
    found = answer((5, 6), (5, 6))
    assert found["choice"] == 1 and found["margin"] == 1 and found["unscored"] == 0
    assert answer((5, 5), (5, 6))["losses"] == [None, 2] and answer((5, 5), (5, 6))["unscored"] == 1


def test_where_the_tokens_before_a_continuation_change_with_it_the_first_that_differs_is_scored(bundle):
    task = Task("a", "language_modeling", 0, "", 0.0, [{"context": "pos", "continuation": "ition"}] * 2)
    (question,) = encode(task, [0], tokenizer(), LONGEST)
    start, end = question.spans[0]
    assert 1 <= start < end == len(question.rows[0])


class Killed(Exception):
    pass


def scores_of_lengths(params, prefixes, rows, starts, ends, chunks):
    """In place of a network: what only depends on the question itself."""
    assert chunks * chunk_of(starts.size) >= np.sum(ends - starts)
    assert np.all(starts >= 1) and np.all(ends <= rows.shape[2])
    losses = (rows.sum(axis=2) % 101) * 1.0 + 1
    return Scores(losses, losses > 50, losses - 50)


def test_a_log_is_continued_after_a_kill(bundle, tmp_path):
    run, _ = benchmarks(bundle)
    run.scorer.score = scores_of_lengths
    whole = []
    results = run({}, record=whole.extend)
    log, facts = tmp_path / "core" / "items.jsonl", run.facts | {"step": 3}

    def record(lines):
        if lines[0]["task"] == "schema":
            raise Killed
        append_to_log(log, lines)

    assert open_log(log, facts) == []
    with pytest.raises(Killed):
        run({}, record=record)
    with log.open("a") as file:
        file.write('{"task": "schema", "it')  # half a line
    done = open_log(log, facts)
    assert {line["task"] for line in done} == set(LABELS[:4])
    assert run({}, done, record=lambda lines: append_to_log(log, lines)) == results
    assert open_log(log, facts) == whole
    assert open_log(log, facts | {"step": 4}) == []  # of another network
    log.write_text("{}\n{not JSON}\n")
    with pytest.raises(UserError, match="remove it"):
        open_log(log, facts)


def test_the_picture_shows_every_task(bundle, tmp_path):
    run, _ = benchmarks(bundle, longest=LONGEST)
    run.scorer.score = scores_of_lengths
    said = []
    plot_core(run({}, say=said.append), "tiny, step 3", tmp_path / "core.png")
    assert (tmp_path / "core.png").read_bytes()[:4] == b"\x89PNG"
    assert [text.partition(":")[0] for text in said] == LABELS
    assert any("cut to fit" in text for text in said)


def test_sizes_are_few_and_fit():
    for length in range(1, 3000):
        assert length <= size_up(length) <= max(length + 7, 1.125 * length)
        assert size_down(length) <= length and (length - size_down(length) < max(8, length / 8) or length < 16)
    sizes = {size_up(length) for length in range(1, 2049)}
    assert len(sizes) == 48 and {size_down(length) for length in range(2048)} <= sizes | {0}


def test_shapes_are_few_and_each_question_fits_in_its_own(bundle):
    """A prefix is shared up to the token before the answers."""
    shapes, computed, tasks = set(), {}, read_bundle(str(bundle), None)
    for task in tasks:
        questions = encode(task, range(len(task.items)), tokenizer(), LONGEST)
        grouped = by_shape(questions)
        assert sorted(q.index for alike in grouped.values() for q in alike) == [q.index for q in questions]
        for (choices, prefix, length), alike in grouped.items():
            for question in alike:
                assert len(question.rows) == choices and max(map(len, question.rows)) <= prefix + length
                assert all(np.array_equal(row[:prefix], question.rows[0][:prefix]) for row in question.rows)
                assert all(prefix < start for start, end in question.spans if start < end)
        computed[task.label] = sum(tokens_of(shape, len(alike)) for shape, alike in grouped.items())
        shapes |= grouped.keys()
    assert {prefix > 0 for _, prefix, _ in shapes} == {True, False} and len(shapes) == 11
    many = [question for question in encode(tasks[1], range(20), tokenizer(), LONGEST) for _ in range(50)]
    grouped = by_shape(many)  # worth a program each
    assert len(grouped) > len(by_shape(many[::50])) == 2
    assert sum(tokens_of(shape, len(alike)) for shape, alike in grouped.items()) < 50 * computed["choices_with_shots"]


DAMAGES = {
    "core.yaml cannot be read": lambda bundle: (bundle / "core.yaml").unlink(),
    "core.yaml or eval_meta_data.csv is damaged": lambda bundle: (bundle / "core.yaml").write_text("tasks: [1"),
    "eval_meta_data.csv cannot be read": lambda bundle: (bundle / "eval_meta_data.csv").unlink(),
    "described in part only": lambda bundle: (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n"),
    "schema.jsonl cannot be read": lambda bundle: (bundle / "eval_data" / "some" / "schema.jsonl").unlink(),
    "choices.jsonl, item 2: not one": lambda bundle: write_items(bundle, {"query": "a", "choices": [], "gold": 0}),
    "choices.jsonl, item 1: not one": lambda bundle: write_items(bundle),
    "has a standard error, so it needs 2 items at least; .*choices.jsonl has 1$": lambda bundle: (
        bundle / "eval_data" / "some" / "choices.jsonl"
    ).write_text(ITEM),
    "needs 2 items at least; .*choices.jsonl has 0$": lambda bundle: (
        bundle / "eval_data" / "some" / "choices.jsonl"
    ).write_text(""),
    "is of kind guessing": lambda bundle: edit(bundle / "core.yaml", "type: schema", "type: guessing"),
    "or one twice": lambda bundle: edit(bundle / "core.yaml", "label: long_schema", "label: schema"),
}
ITEM = json.dumps({"query": "a", "choices": ["b", "c"], "gold": 1}) + "\n"


def write_items(bundle, item=None):
    text = "no JSON\n" if item is None else ITEM + json.dumps(item)
    (bundle / "eval_data" / "some" / "choices.jsonl").write_text(text)


def edit(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("message", DAMAGES)
def test_a_bundle_that_is_not_whole_is_refused(bundle, tmp_path, message):
    shutil.copytree(bundle, tmp_path / "bundle")
    DAMAGES[message](tmp_path / "bundle")
    with pytest.raises(UserError, match=message):
        read_bundle(str(tmp_path / "bundle"), None)


def test_too_few_items_for_the_shots_are_refused(bundle):
    with pytest.raises(UserError, match=r"choices_with_shots shows 4 .* needs 5 items .* has 4 \(4 are taken\)"):
        read_bundle(str(bundle), 4)
