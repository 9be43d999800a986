"""Test ChatCORE: nanochat's items and answers, its files, and incomplete sets.

nanochat_chat.json has the answers of nanochat's chat_eval (92d63d4), written by tests/evaluation/nanochat_chat.py of
e384e3d: whether an item is right, and its letter or its text."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import jax
import pyarrow
import pyarrow.parquet
import pytest

from data.dataset import Text
from data.held_out import HeldOut
from data.order import Mixture
from evaluate import evaluate_core
from evaluation.benchmark import BENCHMARKS, benchmark_of_run
from evaluation.chat_core import WITHOUT_PROGRAMS, human_eval_item, program_of, read_chat_tasks
from evaluation.evaluator import Evaluator
from evaluation.execution import succeeds
from options.schema import EvalConfig, MeshConfig
from system.errors import UserError
from tests.evaluation import core_bundle
from tests.evaluation.chat_sets import FOLDERS, columns, make_sets, network
from tests.evaluation.core_bundle import LONGEST
from training.build import build

NANOCHAT_S = json.loads(Path(__file__).with_name("nanochat_chat.json").read_text())


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return make_sets(tmp_path_factory.mktemp("sets"))


@pytest.mark.medium
def test_every_item_equals_nanochat_s_chat_eval(sets, tmp_path, monkeypatch):
    tasks = read_chat_tasks(str(sets), None, WITHOUT_PROGRAMS)
    evaluate = lambda: evaluate_core(network(), tasks, tmp_path, "chatcore4")
    results = evaluate()
    _, *lines = map(json.loads, (tmp_path / "items.jsonl").read_text().splitlines())
    for task in tasks:
        own = sorted((line for line in lines if line["task"] == task.label), key=lambda line: line["item"])
        for line, item, (right, answer) in zip(own, task.items, NANOCHAT_S[task.label], strict=True):
            too_long = len(item["messages"][0]["content"]) > 500
            assert line["cut"] == too_long
            assert line["correct"] == (right and not too_long)
            ours_answer = line["text"] if task.label == "GSM8K" else item["letters"][line["choice"]]
            assert ours_answer == ("" if too_long else answer), line
    written = [line for line in lines if line["task"] == "GSM8K"]
    assert len({line["text"] for line in written}) > 3 and {line["correct"] for line in written} == {True, False}
    centred = [results["tasks"][label]["centered"] for label in WITHOUT_PROGRAMS]
    assert results["chatcore4"] == pytest.approx(sum(centred) / 4) and results["tasks"]["MMLU"]["baseline"] == 0.25
    assert {"items.jsonl", "chatcore4.json", "chatcore4.png"} == {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr("evaluation.chat_core.render", None)  # the log has every answer
    assert evaluate() == results


@pytest.mark.medium
def test_a_run_s_evaluations_have_the_figures_of_evaluate_py_until_it_is_asked_to_stop(sets, tmp_path, monkeypatch):
    ours = network()
    options = EvalConfig(tasks="chatcore4", bundle=str(sets), items=3, tokens=2 * LONGEST, prompts=())
    config = replace(ours.config, eval=options, mesh=MeshConfig(1))
    text = Text(["chats"], [], [], Mixture({}, 0), ours.tokenizer, None, "", 0)
    monkeypatch.setattr("evaluation.evaluator.read_held_out", lambda *_: Mock(HeldOut, batches=[]))
    monkeypatch.setattr("evaluation.evaluator.evaluate", lambda *_: {"val_loss": 1.0})
    tasks = [task for task in read_chat_tasks(str(sets), 3) if task.label == "MMLU"]
    monkeypatch.setitem(BENCHMARKS, "chatcore4", lambda folder, items: tasks if items == 3 else [])
    built = build(config, jax.devices()[:1])
    evaluator = Evaluator(built, text, benchmark_of_run(built, text))
    figures = evaluator(ours.params, lambda: False)
    assert figures["val_loss"] == 1.0 and evaluator(ours.params, lambda: True) is None
    expected = evaluate_core(ours, tasks, tmp_path, "chatcore4")
    assert figures["chatcore4"] == expected["chatcore4"]
    assert [*figures["chatcore4_interval"].values()] == expected["chatcore4_interval"]
    assert figures["chatcore4_tasks"] == {name: task["centered"] for name, task in expected["tasks"].items()}


@pytest.mark.parametrize(
    "label, changed, message",
    [
        ("GSM8K", None, "the bundle .* has no file gsm8k/main/test.*; docs/evaluation.md says how"),
        ("MMLU", {"answer": [4] * 9}, "mmlu/all/test.*: row 1 is no item of MMLU"),
        ("ARC-Easy", {"answerKey": ["Z"] * 9}, "row 1 is no item of ARC-Easy"),
        ("GSM8K", {"answer": ["three"] * 9}, "row 1 is no item of GSM8K .*no number after ####"),
        (
            "GSM8K",
            {"question": pyarrow.array([], "string"), "answer": pyarrow.array([], "string")},
            "has no item of GSM8K",
        ),
        ("GSM8K", {"question": None}, "cannot be read with the columns question, answer"),
    ],
)
def test_incomplete_sets_are_refused_with_the_reason(tmp_path, label, changed, message):
    file = make_sets(tmp_path) / FOLDERS[label] / "test-00000-of-00001.parquet"
    file.unlink()
    if changed:
        left = {name: column for name, column in (columns(label) | changed).items() if column is not None}
        pyarrow.parquet.write_table(pyarrow.table(left), file)
    with pytest.raises(UserError, match=message):
        read_chat_tasks(str(tmp_path), None)


@pytest.mark.medium
def test_chatcore_is_the_mean_of_five_tasks_and_runs_the_programs(sets, tmp_path, monkeypatch):
    """The network that answers 1+2 and #### 3 writes no program that passes; one that wrote each item's would."""
    tasks = [task._replace(items=task.items[:2]) for task in read_chat_tasks(str(sets), None)]
    results = evaluate_core(network(), tasks, tmp_path / "wrong", "chatcore")
    assert results["tasks"]["HumanEval"]["accuracy"] == 0
    centred = [task["centered"] for task in results["tasks"].values()]
    assert len(centred) == 5 and results["chatcore"] == pytest.approx(sum(centred) / 5)
    written = ["def first(xs):\n    return xs[0]\n", "Sure:\n```python\ndef first(xs):\n    return xs[0]\n```\nDone."]
    monkeypatch.setattr("evaluation.chat_core.program_of", lambda item, _: program_of(item, written.pop()))
    right = evaluate_core(network(), tasks, tmp_path / "right", "chatcore")
    assert right["tasks"]["HumanEval"]["accuracy"] == 1 and not written
    assert right["chatcore"] == pytest.approx(results["chatcore"] + 1 / 5)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("def root(x):\n    return math.sqrt(x)", True),  # the problem's import is added
        ("```python\ndef root(x):\n    return math.sqrt(x)\n```", True),
        ("It is:\n```\ndef root(x):\n    return x ** 0.5\n```\nor\n```\ndef root(x):\n    return 0\n```", True),
        ("It is:\n```\ndef root(x):\n    return 0\n```\nor\n```\ndef root(x):\n    return x ** 0.5\n```", False),
        ("```pythondef root(x):\n    return x ** 0.5```", False),
        ("    return math.sqrt(x)", False),  # the problem's beginning is not repeated for it
        ("def root(x):\n    return math.sqrt(x)<|assistant_end|>", False),
        ("def root(x):\n    return -x", False),
        ("", False),
    ],
)
def test_a_program_is_right_where_nanochat_says_so(answer, right):
    """The outcomes are those of `evaluate` in nanochat's tasks/humaneval.py (92d63d4)."""
    prompt = '\n# Roots\nimport math\nfrom typing import List\n\n\ndef root(x):\n    """import of no module"""\n'
    test = "def check(candidate):\n    assert candidate(4) == 2\n"
    item = human_eval_item(
        {"prompt": prompt, "canonical_solution": "    return x ** 0.5", "test": test, "entry_point": "root"}
    )
    assert succeeds(program_of(item, answer)) == right


def test_a_tokenizer_without_conversations_is_refused(sets):
    bare = core_bundle.tokenizer().json.replace("<|assistant_end|>", "<|old|>")
    ours = replace(network(), tokenizer=replace(core_bundle.tokenizer(), json=bare))
    with pytest.raises(UserError, match=r"no <\|assistant_end\|>: it was not trained on conversations"):
        evaluate_core(ours, read_chat_tasks(str(sets), 2), Path("nowhere"), "chatcore")
