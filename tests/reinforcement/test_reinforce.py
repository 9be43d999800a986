"""Run reinforce.py on a tiny network: complete, stopped and resumed, in two processes, and with mistakes."""

import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data.tokenizer import load_tokenizer
from reinforcement.rollouts import Rollouts
from reinforcement.tasks import Sums
from run.folder import RunFolder
from system.errors import Exit
from tests.commands import PREEMPTED, ROOT, assert_as_untouched, lines_of, run, summary, write_folder
from tests.hosts.processes import fail_elsewhere, finish, start
from tests.run.short_runs import FEW_ANSWERS, WITH_ROOM_FOR_ANSWERS

WORDS = ("--config=few.py", "--init_from=base", "--eval.every_steps=3", "--model.dtype=float32")
REWARD = """
import reinforcement.tasks
reinforcement.tasks.Sums.reward = lambda self, problem, text: float(len(text) % 2 == 0)
"""


def length_is_even(self, problem, text):
    """Reward what an untrained network does in about half of its answers."""
    return float(len(text) % 2 == 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a run, and a run of reinforcement on it."""
    folder = write_folder(tmp_path_factory.mktemp("user"), WITH_ROOM_FOR_ANSWERS)
    (folder / "few.py").write_text(FEW_ANSWERS)
    (folder / "short.py").write_text(FEW_ANSWERS.replace("tokens=64", "tokens=20"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sums, "reward", length_is_even)
        patch.chdir(folder)
        assert run("train", patch, "--config=tiny.py", "--run_dir=base", devices=1) == 0
        assert run("reinforce", patch, *WORDS, "--run_dir=whole", devices=1) == 0
    return folder


@pytest.fixture
def again(folder, monkeypatch):
    """Return a function that runs the command in the folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(Sums, "reward", length_is_even)
    return lambda *words, devices=1: run("reinforce", monkeypatch, *WORDS, *words, devices=devices)


@pytest.mark.medium
def test_a_task_that_another_host_cannot_read_ends_this_one(again, monkeypatch, capfd):
    fail_elsewhere(monkeypatch, "their task")
    assert again("--run_dir=new") == Exit.MISTAKE
    assert capfd.readouterr().err.endswith("error: process 1: it is not there\n")


@pytest.mark.medium
def test_a_run_writes_what_it_promises(folder):
    lines = RunFolder(folder / "whole").metrics()
    logged, evaluated = ([line for line in lines if name in line] for name in ("reward", "pass_at_1"))
    assert [line["step"] for line in logged] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in evaluated] == [0, 3, 6]
    for line in logged:
        assert 0 < line["reward"] < 1 and 1 < line["tokens_per_answer"] < 64
        assert (1 - line["equal_rewards"]) * 4 == round((1 - line["equal_rewards"]) * 4) > 0
        assert 0 < line["valid_tokens"] <= 16 * (line["tokens_per_answer"] + 1)
    assert logged[0]["entropy"] == pytest.approx(5.1, abs=0.5)  # of 300 tokens, after six steps
    for line in evaluated:
        for name in ("greedy_accuracy", "pass_at_1", "pass_at_2", "pass_at_4"):
            interval = line[f"{name}_interval"]
            assert 0 <= interval["low"] <= line[name] <= interval["high"] + 1e-9 and interval["high"] <= 1 + 1e-9
        assert line["pass_at_1"] <= line["pass_at_2"] <= line["pass_at_4"] and "pass_at_8" not in line
        assert len(line["samples"]) == 3 and line["samples"][0].startswith("reward ")
    board = EventAccumulator(str(folder / "whole/tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert {"reward", "equal_rewards", "entropy", "tokens_per_answer", "pass_at_1"} <= {*board.Tags()["scalars"]}
    assert "samples/2/text_summary" in board.Tags()["tensors"]
    assert summary(folder / "whole")["steps"] == 6 and load_tokenizer(folder / "whole/tokenizer")


@pytest.mark.medium
def test_a_run_that_is_stopped_while_it_answers_is_saved_and_continues_to_the_bit(folder, again, monkeypatch):
    asked = []

    def stopped_at_the_fourth_step(self, *arguments):
        asked.append(self.engine._write._cache_size())
        if len(asked) == 4:
            signal.raise_signal(signal.SIGTERM)
        return answers(self, *arguments)

    answers = Rollouts.answers
    with monkeypatch.context() as patch:
        patch.setattr(Rollouts, "answers", stopped_at_the_fourth_step)
        assert again("--run_dir=stopped") == PREEMPTED
    assert asked == [1] * 4  # nothing compiles for the parameters after a step
    assert [line["step"] for line in lines_of(folder / "stopped") if "reward" in line] == [1, 2, 3]
    assert (folder / "stopped/checkpoints/3").exists()
    assert again("--run_dir=stopped") == 0
    assert_as_untouched(folder / "stopped", folder / "whole")


def assert_close(run_dir: Path, whole: Path) -> None:
    """Require the same answers, and norms that differ by rounding."""
    ours, theirs = ([line for line in lines_of(one) if "reward" in line] for one in (run_dir, whole))
    for line, expected in zip(ours, theirs, strict=True):
        for name in ("reward", "equal_rewards", "tokens_per_answer", "valid_tokens"):
            assert line[name] == expected[name], (line["step"], name)
        for name in ("grad_norm", "entropy"):
            assert line[name] == pytest.approx(expected[name], rel=1e-4), (line["step"], name)


@pytest.mark.slow
def test_two_processes_on_another_mesh_change_only_rounding(folder):
    (folder / "few_alike.py").write_text(FEW_ANSWERS + REWARD)
    options = ("--config=few_alike.py", "--run_dir=two", "--mesh.fsdp=2", "--eval.every_steps=9")
    words = [ROOT / "reinforce.py", *WORDS, *options]
    finish(start(words, words, folders=[folder], devices=[2]), 0)
    assert_close(folder / "two", folder / "whole")


@pytest.mark.medium
def test_steps_whose_rewards_are_all_equal_change_nothing_and_are_no_failure(folder, again, monkeypatch, capfd):
    monkeypatch.setattr(Sums, "reward", lambda *_: 1.0)
    assert again("--run_dir=solved", "--steps=12") == 0
    lines = [line for line in RunFolder(folder / "solved").metrics() if "reward" in line]
    assert [line["equal_rewards"] for line in lines] == [1] * 12 and lines[-1]["skipped_steps"] == 12
    output = capfd.readouterr().out
    assert "step 12 changed nothing: each question's answers have one reward" in output
    reached = summary(folder / "solved")
    figures = f"greedy accuracy {reached['greedy_accuracy']:.4f}, pass@1 {reached['pass_at_1']:.4f}\n"
    assert f"reward {reached['reward']:.4f}, {figures}" in output and "loss nan" not in output


@pytest.mark.medium
def test_the_checkpoint_with_the_best_pass_at_1_is_kept_also_by_a_later_start(folder, again, monkeypatch):
    evaluated, figures = Rollouts.evaluate, iter([0.0, 0.5, 0.1, 0.2, 0.3])  # after 0, 2, 4, 6 and 8 steps
    changed = lambda *arguments: evaluated(*arguments) | {"pass_at_1": next(figures)}
    monkeypatch.setattr(Rollouts, "evaluate", changed)
    options = ("--run_dir=best", "--eval.every_steps=2", "--checkpoint.keep=1")
    for words, kept in [((), ["2", "6"]), (("--steps=8", "--accept_changes"), ["2", "8"])]:
        assert again(*options, *words) == 0
        assert sorted(path.name for path in (folder / "best/checkpoints").iterdir()) == kept


@pytest.mark.medium
def test_gsm8k_s_problems_are_answered(folder, again):
    for part in ("train", "test"):
        answers = [f"<<{i}+1={i + 1}>>\n#### {i + 1}" for i in range(5)]
        rows = {"question": [f"{part} {i}?" for i in range(5)], "answer": answers}
        file = folder / f"sets/gsm8k/main/{part}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(rows), file)
    assert again("--reinforce.task=gsm8k", "--eval.bundle=sets", "--run_dir=gsm8k", "--steps=1") == 0
    _, line, last = RunFolder(folder / "gsm8k").metrics()
    assert line["equal_rewards"] == 1 and last["pass_at_1"] == 0 and last["samples"][0].startswith("reward 0: test ")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--init_from="], "--init_from is missing: configs/reinforce.py improves a network that answers"),
        (["--init_from=nothing"], "nothing holds no run"),
        (["--init_from=plain"], "lacks tokens of conversations"),
        (["--steps=0"], "--steps=0 counts epochs"),
        (["--reinforce.samples=1"], "reinforce.samples=1 cannot work"),
        (["--reinforce.difficulty=7"], "reinforce.difficulty=7 cannot work"),
        (["--reinforce.task=gsm8k"], "--reinforce.task=gsm8k needs --eval.bundle=DIR"),
        (["--reinforce.task=gsm8k", "--eval.bundle=nothing"], "no file gsm8k/main/train"),
        (["--batch.tokens_per_step=128"], "16 answers need 8 rows, which is 1024"),
        (["--config=short.py"], "reinforce.tokens=20 leaves no room: a question has"),
        (["--model.depth=2"], "another network than the options ask for"),
    ],
)
@pytest.mark.medium
def test_a_mistake_ends_with_code_2_before_any_compute(folder, again, monkeypatch, capfd, words, message):
    if not (folder / "plain").exists():
        shutil.copytree(folder / "base", folder / "plain")
        bare = (folder / "plain/tokenizer/tokenizer.json").read_text().replace("<|assistant_end|>", "<|old|>")
        (folder / "plain/tokenizer/tokenizer.json").write_text(bare)
    monkeypatch.setattr("run.fitting.Fitting.compile", None)
    assert again("--run_dir=wrong", *words) == 2
    assert message in capfd.readouterr().err and not np.any([*Path("wrong").glob("checkpoints/*")])
