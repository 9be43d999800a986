"""Compare our answers to lm-evaluation-harness with its own `hf` model's on the exported weights.

Needs `make setup EXTRA=harness`, and for the comparison `interop`.
"""

import json
import os
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("lm_eval")

from configs.schema import UserError
from evaluation.harness import HarnessNetwork, evaluate_tasks, load_tasks
from interchange.folders import write_hf
from tests.evaluation.core_bundle import network, params, tokenizer
from tests.evaluation.harness_tasks import make_tasks
from tests.helpers import arrays_of

LENGTH = 128
NAMES = ["tiny_choices", "tiny_schema", "tiny_endings", "tiny_text", "tiny_writing"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_tasks(NAMES, str(make_tasks(tmp_path_factory.mktemp("tasks"))))


@pytest.fixture(scope="module")
def requests(loaded):
    """Return the requests by type."""
    by_kind = defaultdict(list)
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(1234)
        task.build_all_requests(rank=0, world_size=1)
        for request in task.instances:
            by_kind[request.request_type].append(request)
    return by_kind


def answering(devices=1, longest=None, chat=False):
    ours = network(devices, LENGTH, short_window=64)
    return HarnessNetwork(ours, ours.scorer(longest), chat)


@pytest.fixture(scope="module")
def answered(requests):
    """Return our answers to all requests, on one device, and how many were cut."""
    ours = answering()
    return {kind: getattr(ours, kind)(of_kind) for kind, of_kind in requests.items()}, ours.cut


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """Return the harness' own model of the folder that export.py writes."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    folder = tmp_path_factory.mktemp("hf") / "out"
    write_hf(folder, [arrays_of(params())], network(1, LENGTH, short_window=64).config, tokenizer())
    return partial(HFLM, pretrained=str(folder), trust_remote_code=True, device="cpu", batch_size=4)


def test_answers_equal_the_harness_own_model_s(requests, answered, hf):
    """Where it cuts a text into rows, the harness puts a BOS before it, so the tokenizer must not add one."""
    answers, cut = answered
    theirs = hf()
    ours, others = answers["loglikelihood"], theirs.loglikelihood(requests["loglikelihood"])
    assert len(ours) == len(others) == 58
    for request, own, other in zip(requests["loglikelihood"], ours, others):
        assert own[0] == pytest.approx(other[0], abs=1e-4), request.args
        assert own[1] == other[1]
    assert {greedy for _, greedy in ours} == {True, False}
    assert cut >= 4
    texts = answers["generate_until"]
    assert texts == theirs.generate_until(requests["generate_until"]) and len(set(texts)) > 1
    kind = "loglikelihood_rolling"
    assert answers[kind] == pytest.approx(
        hf(add_bos_token=False).loglikelihood_rolling(requests[kind]), rel=1e-6, abs=1e-4
    )


def answers_of(model, tasks, asking) -> dict[str, list]:
    """Return a model's answers to tasks, as the harness asks them."""
    from lm_eval.evaluator import simple_evaluate

    evaluated = simple_evaluate(model, tasks=[*tasks.values()], bootstrap_iters=0, **asking)
    return {name: [answer[0] for sample in evaluated["samples"][name] for answer in sample["resps"]] for name in tasks}


@pytest.mark.medium
def test_answers_in_conversations_equal_the_harness_own_model_s_with_the_template(loaded, tmp_path):
    """Use a system message, shots as turns, and an answer that the task begins."""
    pytest.importorskip("torch")
    from lm_eval.models.huggingface import HFLM

    ours, end = answering(chat=True), tokenizer().special_tokens["<|assistant_end|>"]
    weights = ours.network.params
    weights["lm_head"]["kernel"] = weights["lm_head"]["kernel"].at[:, end].mul(2)  # some answers end
    config = network(1, LENGTH, short_window=64).config
    config = replace(config, data=replace(config.data, packing="whole"))
    write_hf(tmp_path / "out", [arrays_of(weights)], config, tokenizer())
    theirs = HFLM(pretrained=str(tmp_path / "out"), trust_remote_code=True, device="cpu", batch_size=4)
    tasks = {name: loaded["tasks"][name] for name in ("tiny_choices", "tiny_writing")}
    asking = {"apply_chat_template": True, "system_instruction": "be brief"}
    for task in tasks.values():
        task.config.gen_prefix = "or"
    own, other = (answers_of(model, tasks, asking) for model in (ours, theirs))
    for (one, greedy), (two, too) in zip(own["tiny_choices"], other["tiny_choices"], strict=True):
        assert one == pytest.approx(two, abs=1e-4) and greedy == too
    assert own["tiny_writing"] == other["tiny_writing"]
    with pytest.raises(UserError, match="is no conversation: no message of a user"):
        ours.apply_chat_template([])


def test_a_task_that_runs_code_needs_its_switch(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    file = make_tasks(tmp_path) / "tiny_writing.yaml"
    file.write_text(file.read_text() + "unsafe_code: true\n")
    with pytest.raises(UserError, match=r"tiny_writing runs code that the network writes; .*--unsafe_code"):
        load_tasks(["tiny_writing"], str(tmp_path))
    only, ours = load_tasks(["tiny_writing"], str(tmp_path), unsafe_code=True), answering()
    assert os.environ.pop("HF_ALLOW_CODE_EVAL") == "1"
    ours.generate_until = lambda requests: ["x" for _ in requests]
    results = evaluate_tasks(ours, only, None, tmp_path / "out", {"confirm_run_unsafe_code": True})
    assert "exact_match" in results["tasks"]["tiny_writing"]


def test_figures_have_errors_and_a_line_for_each_item(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")  # as in a process other than the machine's first
    results = evaluate_tasks(answering(), loaded, None, tmp_path, {})
    choices = results["tasks"]["tiny_choices"]
    assert choices["acc_stderr"] == pytest.approx((choices["acc"] * (1 - choices["acc"]) / 9) ** 0.5)
    assert results["tasks"]["tiny_text"]["bits_per_byte"] > 0 and results["cut"] >= 4
    (written,) = tmp_path.glob("*/*/tasks.json")
    assert json.loads(written.read_text())["tasks"] == results["tasks"]
    lines = {name: (written.parent / f"{name}.jsonl").read_text().splitlines() for name in NAMES}
    assert [len(lines[name]) for name in NAMES] == [10, 6, 6, 3, 5]
    correct = sum(json.loads(line)["acc"] for line in lines["tiny_choices"])
    assert choices["acc"] == pytest.approx(correct / 10)


def test_draws_depend_on_the_request_and_repeated_draws_differ(requests):
    drawn = {"until": ["~~"], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    one, other = (replace(request, arguments=(request.args[0], drawn)) for request in requests["generate_until"][:2])
    together = answering().generate_until([one, one, one, other])
    assert len(set(together)) == 4
    assert answering().generate_until([other, one, one]) == [together[3], *together[:2]]


def test_a_text_without_room_and_unknown_options_are_refused(requests):
    (request, *_) = requests["generate_until"]
    ours = answering(longest=12)
    with pytest.raises(UserError, match="asks for 12 new tokens, and a row of the network has 12"):
        ours.generate_until([request])
    request = replace(request, arguments=("a", {"do_sample": True, "temperature": 1.0, "top_p": 0.5}))
    with pytest.raises(UserError, match="top_p"):
        ours.generate_until([request])
