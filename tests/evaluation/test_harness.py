"""Compare our answers to lm-evaluation-harness with its own `hf` model's on the exported weights.

Needs `make setup EXTRA=harness`, and for the comparison `interop`.
"""

import json
import os
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("lm_eval")

import evaluate
from configs.schema import UserError
from data.tokenizer import BOS
from evaluation.harness import HarnessNetwork
from evaluation.harness_tasks import load_tasks, measure, points
from evaluation.results import ItemLog
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


def answering(devices=1, longest=None, log=None, chat=False):
    ours = network(devices, LENGTH, short_window=64)
    return HarnessNetwork(ours, ours.scorer(longest), ItemLog() if log is None else log, chat)


@pytest.fixture(scope="module")
def answered(requests):
    """Return our answers to all requests, on one device, and the log."""
    ours = answering()
    return {kind: getattr(ours, kind)(of_kind) for kind, of_kind in requests.items()}, ours.log


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
    answers, log = answered
    theirs = hf()
    ours, others = answers["loglikelihood"], theirs.loglikelihood(requests["loglikelihood"])
    assert len(ours) == len(others) == 58
    for request, own, other in zip(requests["loglikelihood"], ours, others):
        assert own[0] == pytest.approx(other[0], abs=1e-4), request.args
        assert own[1] == other[1]
    assert {greedy for _, greedy in ours} == {True, False}
    assert sum(line.get("cut", 0) > 0 for line in log) >= 4
    texts = answers["generate_until"]
    assert texts == theirs.generate_until(requests["generate_until"]) and len(set(texts)) > 1
    kind = "loglikelihood_rolling"
    assert answers[kind] == pytest.approx(
        hf(add_bos_token=False).loglikelihood_rolling(requests[kind]), rel=1e-6, abs=1e-4
    )
    assert max(line["tokens"] for line in log if "tokens" in line) > 2 * LENGTH


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
    asking, lengths = {"apply_chat_template": True, "system_instruction": "be brief"}, set()
    for prefix in ("or", None):
        for task in tasks.values():
            task.config.gen_prefix = prefix
        of = lambda model: measure(model, {"tasks": tasks, "groups": {}}, None, 1e-4, asking=asking)[1]
        own, other = of(ours), of(theirs)
        answers = lambda lines, name: [answer for line in lines[name] for answer in line["answers"]]
        for (one, greedy), (two, too) in zip(*(answers(lines, "tiny_choices") for lines in (own, other)), strict=True):
            assert one == pytest.approx(two, abs=1e-4) and greedy == too
        assert answers(own, "tiny_writing") == answers(other, "tiny_writing")
        lengths |= {len(ids) for ids in tokenizer().encode(answers(own, "tiny_writing"))}
    assert min(lengths) < 10 < max(lengths)
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
    assert measure(ours, only, None, 1e-4, asking={"confirm_run_unsafe_code": True})[0]["tiny_writing"]["items"] == 5


@pytest.mark.slow
def test_a_mesh_gives_the_answers_of_one_device(requests, answered):
    ours = answering(8)
    for kind, of_kind in requests.items():
        for one, other in zip(answered[0][kind], getattr(ours, kind)(of_kind), strict=True):
            assert one == other if kind == "generate_until" else one == pytest.approx(other, abs=1e-3)


def test_figures_have_errors_ties_and_chance_and_resume_from_the_log(loaded, answered, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")  # as in a process other than the machine's first
    ours = answering(log=answered[1])
    ours.scorer = ours.network = None  # the log has every answer
    results, lines = measure(ours, loaded, None, tie=1e-4)
    choices = results["tiny_choices"]
    assert choices["items"] == 10 and choices["baseline"] == 0.25 and choices["ties"] == 2 and choices["cut"] > 0
    assert choices["acc_stderr"] == pytest.approx((choices["acc"] * (1 - choices["acc"]) / 9) ** 0.5)
    assert [len(lines[name]) for name in NAMES] == [10, 6, 6, 3, 5]
    assert results["tiny_text"]["bits_per_byte"] > 0 and "baseline" not in results["tiny_endings"]
    assert set(points(results)) == {"tiny_choices", "tiny_schema", "tiny_endings", "tiny_writing"}
    without_shots = {"tasks": {"tiny_endings": loaded["tasks"]["tiny_endings"]}, "groups": {}}  # or others are drawn
    one, another = (measure(ours, without_shots, 4, tie=1e-4)[1]["tiny_endings"] for _ in range(2))
    assert one == another and len(one) == 4 and [line["item"] for line in one] != [0, 1, 2, 3]


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


def test_the_harness_evaluates_networks_of_other_architectures(tmp_path, monkeypatch, capsys):
    """Use a small, random GPT-2."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 256, "vocab_size": tokenizer().vocab_size}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer().bos)

    def save(seed: int) -> None:
        torch.manual_seed(seed)  # the harness sets it, too
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids)).save_pretrained(tmp_path / "gpt2")

    save(0)
    spelled = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer().library, eos_token=BOS, pad_token=BOS)
    spelled.save_pretrained(tmp_path / "gpt2")
    (tmp_path / "tasks").mkdir()
    options = ["--tasks=tiny_schema", f"--task_files={make_tasks(tmp_path / 'tasks')}", f"--out={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", ["evaluate", f"--from={tmp_path / 'gpt2'}", "--json", *options])
    assert evaluate.main() == 0
    (result,) = json.loads(capsys.readouterr().out)["tasks"].values()
    assert result["items"] == 6 and result["baseline"] == 0.5
    (items,) = tmp_path.glob("out/harness/network/tiny_schema/tiny_schema.jsonl")
    assert items.with_name("tasks.png").exists()
    before = items.read_text()
    save(1)
    assert evaluate.main() == 0 and items.read_text() != before  # no answer is another network's
    (tmp_path / "gpt2" / "harness").touch()
    monkeypatch.setattr(sys, "argv", sys.argv[:-1])
    with pytest.raises(UserError, match=r"gpt2/harness/network/tiny_schema cannot be written .*give --out=FOLDER"):
        evaluate.main()
