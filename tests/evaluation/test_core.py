"""Compare CORE's prompts, scores and figures with nanochat's, item by item, on any mesh. Test incomplete bundles."""

import json
import os
import shutil
from functools import partial

import numpy as np
import pytest

from configs.schema import UserError
from evaluate import evaluate_core
from evaluation import item_log
from evaluation.core import KINDS, READS, Core, Task, encode, figures, judge, read_bundle
from evaluation.item_log import ItemLog
from evaluation.scorer import Scores, by_shape, chunk_of, size_down, size_up, tokens_of
from tests.evaluation import nanochat_core
from tests.evaluation.core_bundle import CONFIG, LONGEST, TASKS, make_bundle, network, params, tokenizer
from tests.nanochat_checkout import import_nanochat

LABELS = [label for label, *_ in TASKS]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("bundle"))


def lines_on(bundle, devices=1, labels=LABELS, longest=READS * LONGEST, items=None):
    """Return the lines of all items of these tasks, in order."""
    ours, log = network(devices), ItemLog()
    tasks = [task for task in read_bundle(str(bundle), items) if task.label in labels]
    Core(tasks, tokenizer(), ours.scorer(longest))(ours.params, log)
    return sorted(log.lines, key=lambda line: (LABELS.index(line["task"]), line["item"]))


def require_equal(lines, theirs, tasks, longest=READS * LONGEST):
    """Require nanochat's answers and spans, and its mean losses up to rounding."""
    for task in tasks:
        questions = encode(task, range(len(task.items)), tokenizer(), longest)
        assert len(questions) == len(theirs[task.label])
        for line in (line for line in lines if line["task"] == task.label):
            question, expected = questions[line["item"]], theirs[task.label][line["item"]]
            for (start, end), other, row in zip(question.spans, expected["spans"], question.rows, strict=True):
                assert len(row) == end == other[1] <= longest
                assert start == other[0] or (start == end and other[0] == 0)  # nanochat's mean of it is nan
            assert line["correct"] == expected["correct"], (line, expected)
            ours, other = (np.array(losses, np.float64) for losses in (line["losses"], expected["losses"]))
            np.testing.assert_allclose(ours, other, atol=1e-4)


@pytest.fixture(scope="module")
def nanochat_s():
    """Return nanochat's results of all items, from tests/evaluation/nanochat_core.json."""
    return json.loads(nanochat_core.RESULTS.read_text())


@pytest.mark.medium
def test_truncated_items_equal_nanochat_s_for_a_network_with_a_limit(bundle, nanochat_s):
    lines = lines_on(bundle, labels=[label for label in LABELS if f"{label}, cut" in nanochat_s], longest=LONGEST)
    tasks = [task for task in read_bundle(str(bundle), None) if f"{task.label}, cut" in nanochat_s]
    require_equal(lines, {task.label: nanochat_s[f"{task.label}, cut"] for task in tasks}, tasks, LONGEST)
    assert {line["cut"] > 0 for line in lines} == {line["correct"] for line in lines} == {True, False}


@pytest.mark.slow
def test_every_item_equals_nanochat_s_core_eval_on_any_mesh(bundle, nanochat_s):
    """Compare items with and without shots, with a shared prefix, and with prompts longer than the row."""
    one, eight, tasks = lines_on(bundle), lines_on(bundle, 8), read_bundle(str(bundle), None)
    long = next(task for task in tasks if task.label == "long_schema")
    lengths = [max(map(len, question.rows)) for question in encode(long, range(24), tokenizer(), READS * LONGEST)]
    assert min(lengths) < LONGEST < max(lengths) - 20 and {task.kind for task in tasks} == set(KINDS)
    assert len(one) == len(eight) == sum(len(nanochat_s[label]) for label in LABELS)
    for lines in (one, eight):
        require_equal(lines, nanochat_s, tasks)
    assert all(0 < sum(item["correct"] for item in nanochat_s[label]) < len(nanochat_s[label]) for label in LABELS)
    for ours, theirs in zip(one, eight):
        losses, others = (np.array(line["losses"], np.float64) for line in (ours, theirs))
        np.testing.assert_allclose(losses, others, atol=5e-5)
        assert ours["correct"] == theirs["correct"] or ours["tie"]
    alike = [line for line in one if line["task"] == "choices" and line["losses"].count(None) == 0]
    ties = [line for line in alike if len(set(line["losses"])) < 4]
    assert len(ties) == 1 and (ties[0]["margin"] == 0) == ties[0]["tie"]  # the two best are equal


@pytest.mark.slow
@pytest.mark.skipif("NANOCHAT_DIR" not in os.environ, reason="NANOCHAT_DIR names no checkout of nanochat")
def test_a_subset_equals_nanochat_s_checkout(bundle, monkeypatch):
    """Take 16 items per task, and draw the shots from them."""
    pytest.importorskip("torch")
    gpt, core_eval = import_nanochat(monkeypatch, "gpt", "core_eval")
    torch_network = nanochat_core.their_network(gpt, CONFIG, params(), LONGEST)
    items_of = partial(nanochat_core.their_items, core_eval, torch_network, tokenizer(), bundle)
    tasks = read_bundle(str(bundle), 16)
    require_equal(lines_on(bundle, items=16), {task.label: items_of(task, 16, None) for task in tasks}, tasks)


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


def test_an_option_without_its_own_token_is_chosen_only_if_first(bundle):
    """Expect the choice that nanochat's mean over nothing, nan, makes."""
    task = read_bundle(str(bundle), None)[0]
    question = encode(task, [0], tokenizer(), LONGEST)[0]
    scores = Scores(np.array([[3.0, 0.0], [1.0, 1.0]]), np.ones(2, bool), np.ones(2))
    answer = lambda *spans: judge(task, question._replace(spans=spans), scores, 1e-4)
    assert answer((5, 5), (5, 6))["choice"] == 0 and answer((5, 6), (5, 5))["choice"] == 0
    choice = answer((5, 6), (5, 6))
    assert choice["choice"] == 1 and choice["margin"] == 1 and choice["unscored"] == 0
    assert answer((5, 5), (5, 6))["losses"] == [None, 2] and answer((5, 5), (5, 6))["unscored"] == 1


def test_scoring_starts_at_the_first_token_that_differs():
    task = Task("a", "language_modeling", 0, "", 0.0, [{"context": "pos", "continuation": "ition"}] * 2)
    (question,) = encode(task, [0], tokenizer(), LONGEST)
    start, end = question.spans[0]
    assert 1 <= start < end == len(question.rows[0])


class Killed(Exception):
    pass


def scores_of_lengths(params, prefixes, rows, starts, ends, chunks):
    """Replace the network by losses that depend on the question alone."""
    assert chunks * chunk_of(starts.size) >= np.sum(ends - starts)
    assert np.all(starts >= 1) and np.all(ends <= rows.shape[2])
    losses = (rows.sum(axis=2, keepdims=True) % 101) * 1.0 + 1
    return Scores(losses, losses[..., 0] > 50, losses[..., 0] - 50)


def test_a_log_is_continued_after_a_kill_and_the_picture_shows_every_task(bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("evaluation.scorer.make_score", lambda *arguments: scores_of_lengths)
    tasks = read_bundle(str(bundle), None)
    results = evaluate_core(network(), tasks, LONGEST, tmp_path / "untouched")
    assert (tmp_path / "untouched" / "core.png").read_bytes()[:4] == b"\x89PNG"
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines() if " +- " in line] == LABELS
    append = item_log.append_whole

    def append_until_killed(path, text):
        if '"task": "schema"' in text:
            raise Killed
        append(path, text)

    log = tmp_path / "killed" / "items.jsonl"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("evaluation.item_log.append_whole", append_until_killed)
        evaluate_core(network(), tasks, LONGEST, tmp_path / "killed")
    with log.open("a") as file:
        file.write('{"task": "schema", "it')  # half a line
    facts = json.loads(log.read_text().splitlines()[0])
    assert {line["task"] for line in ItemLog(log, facts).lines} == set(LABELS[:4])
    assert evaluate_core(network(), tasks, LONGEST, tmp_path / "killed") == results
    assert log.read_text() == (tmp_path / "untouched" / "items.jsonl").read_text()
    assert ItemLog(log, facts | {"step": 4}).lines == []  # another network


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
                assert len(question.rows) == choices and max(map(len, question.rows)) <= prefix + length + 1
                assert all(np.array_equal(row[:prefix], question.rows[0][:prefix]) for row in question.rows)
                assert all(prefix < start for start, end in question.spans if start < end)
        computed[task.label] = sum(tokens_of(shape, len(alike)) for shape, alike in grouped.items())
        shapes |= grouped.keys()
    assert {prefix > 0 for _, prefix, _ in shapes} == {True, False} and len(shapes) == 11
    many = [question for question in encode(tasks[1], range(20), tokenizer(), LONGEST) for _ in range(50)]
    grouped = by_shape(many)  # worth one program each
    assert len(grouped) > len(by_shape(many[::50])) == 2
    assert sum(tokens_of(shape, len(alike)) for shape, alike in grouped.items()) < 50 * computed["choices_with_shots"]


ITEM = json.dumps({"query": "a", "choices": ["b", "c"], "gold": 1}) + "\n"
CHOICES = "eval_data/some/choices.jsonl"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("core.yaml", None, "core.yaml cannot be read"),
        ("core.yaml", "tasks: [1", "core.yaml or eval_meta_data.csv is damaged"),
        ("core.yaml", ("type: schema", "type: guessing"), "is of kind guessing"),
        ("core.yaml", ("label: long_schema", "label: schema"), "or one twice"),
        ("eval_meta_data.csv", None, "eval_meta_data.csv cannot be read"),
        ("eval_meta_data.csv", "Eval Task,Random baseline\n", "eval_meta_data.csv is damaged: KeyError"),
        ("eval_data/some/schema.jsonl", None, "schema.jsonl cannot be read"),
        (CHOICES, "no JSON\n", "choices.jsonl, item 1: not one"),
        (CHOICES, ITEM + '{"query": "a", "choices": [], "gold": 0}', "choices.jsonl, item 2: not one"),
        (CHOICES, ITEM, "has a standard error, so it needs 2 items at least; .*choices.jsonl has 1$"),
        (CHOICES, "", "needs 2 items at least; .*choices.jsonl has 0$"),
    ],
)
def test_a_bundle_that_is_incomplete_is_refused(bundle, tmp_path, file, content, message):
    path = shutil.copytree(bundle, tmp_path / "bundle") / file
    if content is None:
        path.unlink()
    else:
        path.write_text(path.read_text().replace(*content) if isinstance(content, tuple) else content)
    with pytest.raises(UserError, match=message):
        read_bundle(str(tmp_path / "bundle"), None)


def test_too_few_items_for_the_shots_are_refused(bundle):
    with pytest.raises(UserError, match=r"choices_with_shots shows 4 .* needs 5 items .* has 4 \(4 are taken\)"):
        read_bundle(str(bundle), 4)
