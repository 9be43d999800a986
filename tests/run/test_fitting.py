"""`batch.rows_per_device=auto` with ever less memory: what is chosen, said and kept, and that it changes no result."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.command_line import Exit
from configs.schema import EvalConfig, MeshConfig, UserError, options, with_options
from run import fitting as module
from run.clock import Times
from run.fitting import CHOSEN, COMPILATIONS, Fitting
from run.log import MetricsLog
from run.programs import TrainSteps
from run.record import Events, read_metrics
from tests.helpers import tiny_config
from tests.hosts.processes import finish, start
from tests.test_train import ROOT, figures, run, write_folder
from training.build import build

OPTIONS = (  # of test_train.py's config: four short steps, with rows that are chosen
    *("--config=tiny.py", "--steps=4", "--model.depth=3", "--batch.sequence_length=64", "--batch.tokens_per_step=1024"),
    *("--batch.rows_per_device=auto", "--checkpoint.every_steps=2", "--eval.every_steps=100", "--eval.tokens=500"),
    "--log.every_steps=1",
)
LONGER = ("--steps=6", "--model.depth=1")
LEVEL, SMALLER_LEVEL = ("1", "none", "1"), ("8", "block", "1")
NEEDS = re.compile(
    r"--batch.rows_per_device=(\d+) --model.loss_chunks=(\d+) --model.remat=(\w+) --mesh.fsdp=(\d+): "
    r"a device needs ([\d.e-]+) of ([\d.e-]+) GiB; it (fits|does not fit)"
)


@pytest.fixture
def asked(tmp_path):
    """Return a config with `auto`."""
    config = tiny_config(rows=64, rows_per_device="auto", length=64, depth=3)  # pyright: ignore
    return replace(config, run_dir=str(tmp_path / "run"), eval=EvalConfig(tokens=500, prompts=()))


class Device:
    """A device of another kind."""

    device_kind = "other"

    def __init__(self, device):
        self.device = device

    def __getattr__(self, name):
        return getattr(self.device, name)


def chosen(config) -> dict:
    return {name: options(config)[name] for name in CHOSEN}


class Compiled:
    """A program that asks for some bytes."""

    output_size_in_bytes = alias_size_in_bytes = temp_size_in_bytes = 0

    def __init__(self, size: float):
        self.argument_size_in_bytes = int(size)

    def memory_analysis(self):
        return self


def compiling(patch, needs, devices: int = 1) -> list[tuple]:
    """Let a program of `needs(rows, chunks, remat, fsdp)` KiB be compiled, or refused if that is None. Return what is
    compiled, in time."""
    some = jax.local_devices()[:devices]
    compiled, built = [], build(tiny_config(rows=64, length=64), some)

    def compile_train_steps(built, times):
        compiled.append(tuple(chosen(built.config).values()))
        if (size := needs(*compiled[-1])) is None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return TrainSteps(Compiled(1024 * size), Compiled(1024 * size))  # pyright: ignore

    patch.setattr(jax, "devices", lambda *_: some)
    patch.setattr(module, "build", lambda config: built._replace(config=config))  # a build takes a second
    patch.setattr(module, "compile_train_steps", compile_train_steps)
    patch.setattr(module, "stored_bytes", lambda _: {"parameters": 1024 * 800, "held-out rows": 0})
    return compiled


def fit(asked, gib: float):
    """Return the config that train.py would run with."""
    Path(asked.run_dir).mkdir(exist_ok=True)
    fitting = Fitting(asked, gib)
    built, _ = fitting.compile(module.build(fitting.first()), 0, Times())
    return built.config


def limit(kib: float) -> float:
    """Return the GiB of a device of which this many KiB may be taken."""
    return kib / 0.9 / 2**20


AS_ASKED, SMALLER, SHARDED = (1, "none", 1), (8, "block", 1), (8, "block", 8)


@pytest.mark.parametrize(
    ("needs", "kib", "tried"),
    [
        (lambda rows, *_: 1000 + 100 * rows, 9000, [1, 16, 64]),  # 800 KiB are there without rows
        (lambda rows, *_: 800 + 100 * rows, 4200, [1, 32]),
        (lambda rows, *_: 800 + 100 * rows**1.2, 4200, [1, 32, 16]),
        (lambda rows, *_: 800 + 100 * rows if rows < 33 else None, 8000, [1, 64, 32]),  # refused without a number
        (lambda rows, *_: 800 + 100 * rows, 900, [1]),
    ],
)
def test_rows_follow_the_line_through_what_was_compiled(asked, monkeypatch, needs, kib, tried):
    compiled = compiling(monkeypatch, needs)
    config = fit(asked, limit(kib))
    assert [rows for rows, *_ in compiled] == tried and len(tried) <= COMPILATIONS
    assert {tuple(level) for _, *level in compiled} == {AS_ASKED}
    assert config.batch.rows == max(rows for rows in tried if (size := needs(rows)) is not None and size <= kib)


@pytest.mark.parametrize("devices", [1, 8])
def test_chunks_and_recomputation_are_taken_before_fsdp(asked, monkeypatch, devices):
    sizes = {AS_ASKED: 900, SMALLER: 600, SHARDED: 300}
    for kib, level in ((700, SMALLER), (400, SHARDED if devices == 8 else None)):
        compiled = compiling(monkeypatch, lambda rows, *level: sizes[level] * rows, devices)
        asked = replace(asked, run_dir=f"{asked.run_dir}-{kib}")
        if level is None:
            with pytest.raises(UserError, match=r"It would fit [\d.]+ GiB"):
                fit(asked, limit(kib))
            continue
        assert tuple(chosen(fit(asked, limit(kib))).values()) == (1, *level)
        assert len(compiled) <= COMPILATIONS
    compiling(monkeypatch, lambda rows, *level: sizes[level] * rows, devices)
    fixed = replace(asked, run_dir=f"{asked.run_dir}-fixed", mesh=MeshConfig(data=devices))
    with pytest.raises(UserError, match="not one row fits"):  # a mesh that is asked for stays
        fit(fixed, limit(400))


def test_a_choice_is_kept_with_the_run_for_such_devices(asked, monkeypatch):
    compiled = compiling(monkeypatch, lambda rows, *_: 800 + 100 * rows)
    first, gib = fit(asked, limit(4200)), limit(4200)
    compiled.clear()
    assert chosen(fit(asked, gib)) == chosen(first) and len(compiled) == 1
    assert Fitting(asked, gib).kept == chosen(first)
    assert not Fitting(asked, gib / 2).kept and not Fitting(with_options(asked, {"model.depth": 2}), gib).kept
    monkeypatch.setattr(jax, "devices", lambda *_: [Device(device) for device in jax.local_devices()[:1]])
    assert not Fitting(asked, gib).kept


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a config and text."""
    monkeypatch.chdir(write_folder(tmp_path))
    return tmp_path


def train(patch, capfd, run_dir: str, *more: str) -> tuple[int, list[tuple], str]:
    """Return the exit code of train.py, what it says of each program that it compiles, and all that it says."""
    code = run("train", patch, *OPTIONS, f"--run_dir={run_dir}", *more, devices=1)
    out, err = capfd.readouterr()
    return code, NEEDS.findall(out), out + err


def losses(run_dir: str) -> list[float]:
    return [line["loss"] for line in read_metrics(run_dir) if "loss" in line]


def fitted(run_dir: str) -> list[dict]:
    return [event["options"] for event in Events(run_dir).read() if event["event"] == "fitted"]


@pytest.mark.medium
def test_with_ever_less_memory_it_takes_less_then_names_what_would_fit_and_the_result_stays(folder, monkeypatch, capfd):
    code, programs, said = train(monkeypatch, capfd, "ample")
    assert code == Exit.COMPLETE and [program[0] for program in programs] == ["1", "16"]
    one_row = float(programs[0][4]) / 0.9
    code, programs, said = train(monkeypatch, capfd, "little", f"--memory={0.97 * one_row}")
    assert code == Exit.COMPLETE and [program[1:4] for program in programs[:2]] == [LEVEL, SMALLER_LEVEL]
    assert "--model.remat=block: one row does not fit without it" in said
    np.testing.assert_allclose(losses("little"), losses("ample"), rtol=2e-5)
    code, _, said = train(monkeypatch, capfd, "none", f"--memory={0.3 * one_row}")
    assert code == Exit.MISTAKE and "not one row fits the device's memory" in said and "Traceback" not in said
    assert not (folder / "none").exists()
    (gib,) = re.findall(r"It would fit ([\d.]+) GiB", said)
    assert train(monkeypatch, capfd, "more", f"--memory={gib}")[0] == Exit.COMPLETE


@pytest.mark.medium
def test_out_of_memory_in_a_step_starts_again_once_with_half_the_rows(folder, monkeypatch, capfd):
    assert train(monkeypatch, capfd, "whole", *LONGER)[0] == Exit.COMPLETE
    dispatched, failing = MetricsLog.step, []

    def fail(log, step, metrics):
        if failing and step == 3:
            raise jax.errors.JaxRuntimeError(failing.pop())
        dispatched(log, step, metrics)

    monkeypatch.setattr(MetricsLog, "step", fail)
    failing.append("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
    code, _, said = train(monkeypatch, capfd, "halved", *LONGER)
    assert code == Exit.COMPLETE and "out of memory: --batch.rows_per_device=8 from here on" in said
    assert "continuing after step 2 of 6" in said
    events = Events("halved").read()
    assert [event["rows_per_device"] for event in events if event["event"] == "out_of_memory"] == [8]
    assert fitted("halved")[-1]["batch.rows_per_device"] == 8
    assert json.loads(Path("halved/config.json").read_text())["config"]["batch"]["rows_per_device"] == 8
    np.testing.assert_allclose(losses("halved"), losses("whole"), rtol=2e-5)
    assert figures(folder / "halved")["steps"] == 6
    failing += ["RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes"] * 2
    assert train(monkeypatch, capfd, "twice", *LONGER)[0] == Exit.PEER_LOST and not failing
    assert train(monkeypatch, capfd, "twice", *LONGER)[0] == Exit.COMPLETE  # what a launcher does
    failing.append("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
    code, _, said = train(monkeypatch, capfd, "given", *LONGER, "--batch.rows_per_device=16")
    assert code == Exit.FAILED and "RESOURCE_EXHAUSTED" in said and "cannot be planned" in said


@pytest.mark.slow
def test_two_processes_choose_what_fits_the_smaller_device(folder):
    command = [ROOT / "train.py", *OPTIONS, "--run_dir=two"]
    commands = [[*command, f"--memory={gib}"] for gib in (1, 0.006)]
    assert "it fits" in finish(start(*commands, folders=[folder]), 0)[0]
    (choice,) = fitted("two")
    assert choice["batch.rows_per_device"] < 8 and len(losses("two")) == 4
