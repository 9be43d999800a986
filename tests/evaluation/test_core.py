"""Compare CORE's prompts, scores and figures with nanochat's, item by item, on any mesh. Test incomplete bundles.

nanochat_core.json has the results of nanochat's core_eval (92d63d4), written by tests/evaluation/nanochat_core.py of
e384e3d: whether an item is right, each row's scored tokens, and their mean loss."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from evaluate import evaluate_core
from evaluation.core import KINDS, READS, Core, Task, encode, figures, judge, read_bundle
from evaluation.results import AT_A_TIME, ItemLog
from evaluation.scorer import Scorer, Scores, by_shape, chunk_of, tokens_of
from system.errors import UserError
from tests.evaluation.core_bundle import LONGEST, TASKS, make_bundle, network, tokenizer

LABELS = [label for label, *_ in TASKS]
AT_THE_LIMIT = [label for label in LABELS if label.endswith("at_the_limit")]
NANOCHAT_S = json.loads(Path(__file__).with_name("nanochat_core.json").read_text())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("bundle"))


def lines_on(bundle, devices=1, labels=LABELS, longest=READS * LONGEST):
    """Return the lines of all items of these tasks, in order."""
    ours, log = network(devices), ItemLog()
    tasks = [task for task in read_bundle(str(bundle), None) if task.label in labels]
    Core("core", tasks, tokenizer(), Scorer(ours, longest))(ours.params, log)
    return sorted(log, key=lambda line: (LABELS.index(line["task"]), line["item"]))


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


@pytest.mark.medium
def test_truncated_items_equal_nanochat_s_for_a_network_with_a_limit(bundle):
    lines = lines_on(bundle, labels=AT_THE_LIMIT, longest=LONGEST)
    tasks = [task for task in read_bundle(str(bundle), None) if task.label in AT_THE_LIMIT]
    require_equal(lines, {task.label: NANOCHAT_S[f"{task.label}, cut"] for task in tasks}, tasks, LONGEST)
    assert {line["cut"] > 0 for line in lines} == {line["correct"] for line in lines} == {True, False}


@pytest.mark.medium
def test_every_other_item_equals_nanochat_s_core_eval_on_a_mesh_of_all_axes(bundle):
    """Compare items with and without shots, with a shared prefix, and with prompts longer than the row."""
    labels = [label for label in LABELS if label not in AT_THE_LIMIT]
    lines, tasks = lines_on(bundle, 8, labels), [t for t in read_bundle(str(bundle), None) if t.label in labels]
    long = next(task for task in tasks if task.label == "long_schema")
    lengths = [max(map(len, question.rows)) for question in encode(long, range(24), tokenizer(), READS * LONGEST)]
    assert min(lengths) < LONGEST < max(lengths) - 20 and {task.kind for task in tasks} == set(KINDS)
    assert len(lines) == sum(len(NANOCHAT_S[label]) for label in labels)
    require_equal(lines, NANOCHAT_S, tasks)
    assert all(0 < sum(item["correct"] for item in NANOCHAT_S[label]) < len(NANOCHAT_S[label]) for label in labels)
    alike = [line for line in lines if line["task"] == "choices" and line["losses"].count(None) == 0]
    ties = [line for line in alike if len(set(line["losses"])) < 4]
    assert len(ties) == 1 and (ties[0]["margin"] == 0) == ties[0]["tie"]  # the two best are equal


def test_core_is_the_mean_of_centred_accuracies():
    tasks = [Task("a", "multiple_choice", 0, " ", 0.25, []), Task("b", "language_modeling", 0, " ", 0.0, [])]
    line = lambda task, correct: {"task": task, "correct": correct, "tie": correct, "cut": 3, "unscored": 0}
    results = figures(tasks, [line("a", i < 5) for i in range(10)] + [line("b", i < 1) for i in range(5)])
    a, b = results["tasks"]["a"], results["tasks"]["b"]
    assert a["accuracy"] == 0.5 and a["centered"] == pytest.approx(1 / 3)
    assert a["interval"] == pytest.approx([0.2366, 0.7634], abs=1e-4)
    assert a["centered_interval"] == pytest.approx([(0.2366 - 0.25) / 0.75, (0.7634 - 0.25) / 0.75], abs=1e-4)
    assert b["centered"] == 0.2 and b["centered_interval"] == b["interval"] == pytest.approx([0.0362, 0.6245], abs=1e-4)
    assert (a["ties"], a["cut"], a["unscored"]) == (5, 10, 0)
    assert results["core"] == pytest.approx((1 / 3 + 0.2) / 2)
    below, above = np.hypot(0.2634 / 0.75, 0.2 - 0.0362) / 2, np.hypot(0.2634 / 0.75, 0.6245 - 0.2) / 2
    assert results["core_interval"] == pytest.approx([results["core"] - below, results["core"] + above], abs=1e-4)


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


def scores_of_lengths(params, prefixes, rows, starts, ends, chunks):
    """Replace the network by losses that depend on the question alone."""
    assert chunks * chunk_of(starts.size) >= np.sum(ends - starts)
    assert np.all(starts >= 1) and np.all(ends <= rows.shape[2])
    losses = (rows.sum(axis=2, keepdims=True) % 101) * 1.0 + 1
    return Scores(losses, losses[..., 0] > 50, losses[..., 0] - 50)


def test_a_log_is_continued_after_a_kill_and_the_picture_shows_every_task(bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("evaluation.scorer.make_score", lambda *arguments: scores_of_lengths)
    evaluate = lambda: evaluate_core(network(), read_bundle(str(bundle), None), tmp_path)
    results = evaluate()
    assert (tmp_path / "core.png").read_bytes()[:4] == b"\x89PNG"
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines() if " items" in line] == LABELS
    log, (facts, *lines) = tmp_path / "items.jsonl", (tmp_path / "items.jsonl").read_text().splitlines(keepends=True)
    first = [line for line in lines if json.loads(line)["task"] in LABELS[:4]]
    log.write_text("".join([facts, *first, '{"task": "schema", "it']))  # a kill leaves half a line
    assert evaluate() == results
    assert log.read_text() == "".join([facts, *lines])


@pytest.mark.parametrize(("name", "value"), [("dtype", "bfloat16"), ("bundle", "b"), ("params_sha256", "c")])
def test_an_evaluation_of_another_kind_deletes_no_items(tmp_path, name, value):
    facts = {"bundle": "a", "dtype": "float32", "params_sha256": "b"}
    ItemLog(tmp_path / "items.jsonl", facts).extend({"item": i} for i in range(4))
    before = (tmp_path / "items.jsonl").read_bytes()
    with pytest.raises(UserError, match=rf"items.jsonl .*\({name} {facts[name]}, now {value}\); give --out=FOLDER"):
        ItemLog(tmp_path / "items.jsonl", facts | {name: value})
    assert (tmp_path / "items.jsonl").read_bytes() == before
    assert len(ItemLog(tmp_path / "items.jsonl", facts)) == 4


def test_a_kill_loses_few_lines_and_two_commands_at_once_add_none(tmp_path):
    with pytest.raises(ZeroDivisionError):
        ItemLog(tmp_path / "log", {}).extend({"item": i, "of": 1 // (40 - i)} for i in range(99))
    assert len(ItemLog(tmp_path / "log", {})) == AT_A_TIME
    for log in [ItemLog(tmp_path / "both", {}) for _ in range(2)]:
        log.extend([{"item": 1}])
    assert ItemLog(tmp_path / "both", {}) == [{"item": 1}]


def test_an_unwritable_folder_and_a_damaged_log_have_different_errors(tmp_path):
    (tmp_path / "file").write_text("no JSON\n")
    with pytest.raises(UserError, match=r"file/log cannot be written .*; give --out=FOLDER"):
        ItemLog(tmp_path / "file" / "log", {})
    with pytest.raises(UserError, match=r"file cannot be continued .*; remove it"):
        ItemLog(tmp_path / "file", {})


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
        ("core.yaml", "tasks: [1", "core.yaml or eval_meta_data.csv is damaged"),
        ("eval_data/some/schema.jsonl", None, "schema.jsonl cannot be read"),
        (CHOICES, ITEM + '{"query": "a", "choices": [], "gold": 0}', "choices.jsonl, item 2: not one"),
        (CHOICES, "", "^choices needs 1 item.s. at least; .*choices.jsonl has 0$"),
    ],
)
def test_a_bundle_that_is_incomplete_is_refused(bundle, tmp_path, file, content, message):
    with pytest.raises(
        UserError, match=r"choices_with_shots shows 4 .* needs 5 item.s. at least.* has 4 \(4 are taken\)"
    ):
        read_bundle(str(bundle), 4)
    path = shutil.copytree(bundle, tmp_path / "bundle") / file
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_bundle(str(tmp_path / "bundle"), None)
