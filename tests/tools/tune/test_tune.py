"""Run all stages of tools.tune on a tiny run: interrupted, resumed, and with mistakes."""

import json
import math
import os
import subprocess
import sys
from itertools import count

import jax
import pytest

from configs.command_line import load_config
from configs.messages import LOGGER
from configs.schema import options
from configs.validation import validate
from hosts.runtime import run_command
from tests.test_train import ROOT, write_folder
from tools.tune import __main__ as tune
from tools.tune import learning, speed
from tools.tune.trial import Context

TUNE = ("--config=tiny.py", "--steps=400", "--model.depth=1", "--eval.tokens=2000", "--batch.rows_per_device=8")


def run(monkeypatch, *arguments) -> int:
    """Return the exit code of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["tune", *arguments])
    with pytest.raises(SystemExit) as end:
        run_command(tune.main)
    return end.value.code or 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a config and text to train on."""
    return write_folder(tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="module")
def tuned(folder):
    """Run all stages on a tiny run, interrupted between two trials. Return the folder and the trials: each one's start,
    its name, and the steps left of its schedule at its end."""
    trials, starts = [], []
    train = Context.train

    def counted(self, name, config, until, *rest):
        if starts[-1] == "first" and name == "rate/10/x2":
            raise KeyboardInterrupt
        trials.append((starts[-1], name, config.steps - until))
        return train(self, name, config, until, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # Programs for one device compile in half the time.
        alone = jax.devices()[:1]
        patch.setattr(jax, "devices", lambda *_: alone)
        patch.setattr(speed, "MAX_ROUNDS", 5)
        patch.setattr(learning, "GRID", (1.0, 2.0))
        patch.setattr(learning, "WIDEST", 2.0)
        patch.setattr(learning, "RUNGS", 1)
        patch.setattr(learning, "MIN_STEPS", 8)
        patch.setattr(learning, "BRANCHES", [(1.0, "root"), (2.0, "linear")])
        patch.setattr(Context, "train", counted)
        starts.append("first")
        assert run(patch, *TUNE, "--budget=0", "--out=tuned") == 130
        starts.append("second")
        assert run(patch, *TUNE, "--budget=0", "--out=tuned") == 0
    return folder / "tuned", trials


@pytest.mark.medium
def test_it_resumes_and_trials_that_are_compared_train_their_schedules_to_the_end(tuned):
    """Without the warmdown, high rates look worse than at a run's end."""
    names = [name for _, name, _ in tuned[1]]
    assert sorted(set(names)) == sorted(names), "a trial was done again"
    assert names[0] == "trunk" and {start for start, _, _ in tuned[1]} == {"first", "second"}
    left = {name: steps for _, name, steps in tuned[1] if not name.startswith("trunk")}
    assert {name.partition("/")[0] for name in left} == {"rate", "branch"} and not any(left.values()), left


@pytest.mark.medium
def test_every_trial_is_recorded_with_its_cost_and_every_stage_with_its_decision_and_picture(tuned):
    record = json.loads((tuned[0] / "tune.json").read_text())
    assert [decision["stage"] for decision in record["decisions"]] == ["fit", "time", "noise", "rate", "branch"]
    assert {decision["kind"] for decision in record["decisions"]} <= {"measured", "extrapolated"}
    tokens = sum(piece.get("tokens", 0) for piece in record["pieces"].values())
    assert record["spent"] == pytest.approx(tokens / (400 * 512)) and tokens > 0
    noise = {int(name.partition("/")[2]): piece for name, piece in record["pieces"].items() if "noise/" in name}
    assert list(noise) == [8, 20, 40] and all(float(piece["low"]) <= float(piece["value"]) for piece in noise.values())
    losses = {name: piece["losses"] for name, piece in record["pieces"].items() if "losses" in piece}
    assert {"rate/10/x1", "rate/10/x2", "branch/x1-root", "branch/x2-linear"} <= losses.keys()
    assert len({len(of) for of in losses.values()}) == 1 and all(math.isfinite(x) for of in losses.values() for x in of)
    assert losses["branch/x2-linear"] != losses["branch/x1-root"]
    for name in ("memory", "noise", "rate", "branch"):
        assert (tuned[0] / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    left = {str(path.parent.parent.relative_to(tuned[0])) for path in tuned[0].glob("**/checkpoints/*")}
    assert all(name.startswith("trunk") for name in left)


@pytest.mark.medium
def test_tuned_py_is_a_config_with_the_decisions_and_another_config_is_refused(tuned, folder, monkeypatch, capsys):
    config, _ = load_config(str(tuned[0] / "tuned.py"))
    validate(config)
    record = json.loads((tuned[0] / "tune.json").read_text())
    before, after = record["config"], options(config)
    decided = {}
    for decision in record["decisions"]:
        decided |= decision["options"]
    batch = decided.pop("batch", 1)
    assert after["batch.tokens_per_step"] == batch * 512 and after["steps"] == 400 / batch
    factor = decided.pop("rate", 1) * (batch if decided.pop("rule", "root") == "linear" else batch**0.5)
    assert after["optimizer.embed.peak_rate"] == pytest.approx(factor * before["optimizer.embed.peak_rate"])
    assert after["optimizer.embed.beta2"] == pytest.approx(before["optimizer.embed.beta2"] ** batch)
    assert {name: after[name] for name in decided} == decided
    assert after["data.source"] == before["data.source"] and after["name"] == "tiny-tuned"
    monkeypatch.chdir(folder)
    assert run(monkeypatch, *TUNE, "--budget=0", "--out=tuned", "--seed=1") == 2
    assert "seed: 0, now 1" in capsys.readouterr().err


@pytest.fixture
def pretended(folder, monkeypatch):
    """Pretend that every program needs this many GiB."""
    monkeypatch.chdir(folder)
    return lambda gib: monkeypatch.setattr(speed, "_compile", lambda *_: {"bytes": int(gib * 2**30)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages=fit,speed"], "--stages=fit,speed: 'speed' is not one of fit, time, noise, rate, branch"),
        (["--budget=much"], "--budget=much is not a share of the run's FLOPs; give 3%, or 0 for no limit"),
        (["--budget=-1%"], "--budget=-1% is not a share"),
        (["--stages=fit", "--stages=time"], "time needs the results of fit, and there are none yet; give fit, too"),
        (["--stages=fit,time --topology=v5e:2x2"], "can be compiled for, not run on: give --stages=fit"),
        (["--stages=noise,rate --budget=1%"], "noise needs at least 2% of the run's FLOPs, and 1% are left; rate"),
        (
            ["--stages=fit"],
            "no micro-batch of this run fits 1 GiB a device (the least asks for 2, and 90% may be taken)",
        ),
        (["--stages=fit --batch.tokens_per_step=500"], "--batch.tokens_per_step=500 cannot work"),
    ],
)
def test_a_mistake_is_one_message_and_code_2(pretended, monkeypatch, capsys, arguments, message):
    pretended(2)
    for stages in arguments:
        assert run(monkeypatch, *TUNE, "--out=mistaken", "--memory=1", *stages.split()) == 2
    assert message in capsys.readouterr().err


def test_a_ctrl_c_that_also_ends_the_reader_of_the_log_ends_with_130(folder):
    """A shell sends Ctrl-C to `python -m tools.tune | tee log` and to tee, which ends at once."""
    reader, pipe = os.pipe()
    os.close(reader)
    code = "from tools.tune import __main__ as it; it.tune = lambda *_: it.LOGGER.info('stopped') or exit(130)"
    command = [sys.executable, "-c", f"{code}; it.run_command(it.main)", *TUNE, "--out=piped"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, cwd=folder, env=environment, stdout=pipe).returncode == 130


def test_the_fit_for_absent_devices_shows_its_decision(pretended, monkeypatch, capsys):
    """This is the one case without `start_jax`, which shows messages otherwise."""
    monkeypatch.setattr(LOGGER, "handlers", [])
    monkeypatch.setattr(tune, "devices_of", lambda topology: jax.devices()[:1])
    pretended(0.01)
    hook = r'--log.on_event=echo """\N"'
    assert run(monkeypatch, *TUNE, hook, "--out=absent", "--memory=1", "--stages=fit", "--topology=v5e:2x2") == 0
    assert load_config("absent/tuned.py")[0].log.on_event == hook.removeprefix("--log.on_event=")
    assert "train: python train.py --config=absent/tuned.py" in capsys.readouterr().out


def test_a_stage_beyond_the_budget_is_skipped_and_reported(folder, pretended, monkeypatch, capsys):
    pretended(0.01)
    assert run(monkeypatch, *TUNE, "--out=small", "--stages=fit,noise", "--budget=1%") == 0
    assert "noise needs at least 2% of the run's FLOPs, and 1% are left: left out" in capsys.readouterr().out
    assert json.loads((folder / "small" / "tune.json").read_text())["spent"] == 0


@pytest.mark.medium
@pytest.mark.parametrize(("budget", "done"), [(0.03, "fit noise"), (1.2, None), (4.0, "fit time noise rate branch")])
def test_no_budget_is_exceeded(folder, pretended, monkeypatch, budget, done):
    """Use trials without cost. Every third of rates is interrupted, and `rate` leaves half of what it found."""
    pretended(0.01)
    monkeypatch.setattr(speed, "_prepared", lambda context, candidate, programs: (None, candidate, None))
    monkeypatch.setattr(speed, "_seconds", lambda program, c, placed, state: (state, 1.0 + len(c.name) % 2))
    taken, trials = [], count(1)  # tokens of each trial

    def train(self, name, config, until, origin=None):
        if name.startswith("rate") and next(trials) % 3 == 0:
            raise KeyboardInterrupt
        taken.append((until - (origin.step if origin else 0)) * config.batch.tokens_per_step)
        return {}

    monkeypatch.setattr(Context, "train", train)
    monkeypatch.setattr(Context, "held_out", (None, [None] * 4, None))
    monkeypatch.setattr(Context, "evaluated", lambda self, params: [3.0, 3.1, 3.2, 3.3])
    line = lambda step: {"step": step, "diagnostics": {"signal": {"all": 1.0}, "noise": {"all": 900.0 + step}}}
    monkeypatch.setattr(learning, "read_metrics", lambda run_dir: [line(step) for step in range(1, 41)])
    out = f"budget-{budget}"
    while (code := run(monkeypatch, *TUNE, "--memory=1", f"--budget={budget}", f"--out={out}")) == 130:
        pass
    record = json.loads((folder / out / "tune.json").read_text())
    cost = lambda *of: sum(piece["tokens"] for name, piece in record["pieces"].items() if name.startswith(of))
    timed, most = cost("time"), (budget * record["run_tokens"] - cost("time", "noise")) / 2
    assert code == 0 and cost("rate") <= most
    assert sum(taken) + timed <= record["spent"] * record["run_tokens"] <= budget * record["run_tokens"]
    decided = [decision["stage"] for decision in record["decisions"] if decision["kind"] != "not done"]
    assert done is None or decided == done.split()


@pytest.mark.medium
@pytest.mark.parametrize("stages", ["noise,branch", "branch"])
def test_a_larger_budget_keeps_the_beginning_that_branches_start_from(folder, pretended, monkeypatch, stages):
    newest, interrupts = {}, [KeyboardInterrupt]  # a trial's folder has its newest checkpoint alone

    def train(self, name, config, until, origin=None):
        assert not origin or newest[origin.folder.name] == origin.saved
        if "x2" in name and interrupts:
            raise interrupts.pop()
        return newest.update({name: until}) or {}

    for name, value in {"train": train, "held_out": (0, [0], 0), "evaluated": lambda self, params: [3.0]}.items():
        monkeypatch.setattr(Context, name, value)
    monkeypatch.setattr(learning, "read_metrics", lambda run_dir: [])
    command = (*TUNE, "--memory=1", "--steps=4000", "--eval.tokens=512", f"--out=larger-{stages}")
    assert run(monkeypatch, *command, f"--stages={stages}", "--budget=4.9%") == 130
    assert run(monkeypatch, *command, "--stages=noise,branch", "--budget=20%") == 0 and "branch/x4-linear" in newest
