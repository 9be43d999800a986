"""`batch.rows_per_device=auto` with ever less memory: what is chosen, said and kept."""

import gc
import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest

from hosts.clock import Timeline
from options.schema import EvalConfig, with_options
from run import fitting as module
from run.fitting import COMPILATIONS, Fitting, TrainSteps
from run.folder import RunFolder
from run.log import MetricsLog
from system.errors import Exit, StartAgain
from tests.commands import run, write_folder
from tests.helpers import tiny_config
from training.build import build

OPTIONS = (  # of test_train.py's config: four short steps, with rows that are chosen
    *("--config=tiny.py", "--steps=4", "--model.depth=2", "--batch.sequence_length=64", "--batch.tokens_per_step=1024"),
    *("--batch.rows_per_device=auto", "--checkpoint.every_steps=2", "--eval.every_steps=100", "--eval.tokens=500"),
    "--log.every_steps=1",
)
NEEDS = re.compile(
    r"--batch.rows_per_device=(\d+): a device needs ([\d.e-]+) of [\d.e-]+ GiB; it (?:fits|does not fit)"
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


class Compiled:
    """A program that asks for some bytes."""

    output_size_in_bytes = alias_size_in_bytes = temp_size_in_bytes = 0

    def __init__(self, size: float):
        self.argument_size_in_bytes = int(size)

    def memory_analysis(self):
        return self


def compiling(patch, needs) -> list[int]:
    """Let a program of `needs(rows)` KiB be compiled, or refused if that is None. Return the rows of what is compiled,
    in time."""
    some = jax.local_devices()[:1]
    compiled, built = [], build(tiny_config(rows=64, length=64), some)

    def compile_train_steps(built, timeline):
        compiled.append(built.config.batch.rows)
        if (size := needs(compiled[-1])) is None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return TrainSteps(Compiled(1024 * size), Compiled(1024 * size))  # pyright: ignore

    patch.setattr(jax, "devices", lambda *_: some)
    patch.setattr(module, "build", lambda config: built._replace(config=config))  # a build takes a second
    patch.setattr(module, "compile_train_steps", compile_train_steps)
    patch.setattr(module, "expected_row_bytes", lambda _: 1024 * 100)
    patch.setattr(module, "stored_bytes", lambda _: {"parameters": 1024 * 800, "held-out rows": 0})
    return compiled


def fitting_of(asked) -> Fitting:
    return Fitting(asked, RunFolder(asked.run_dir))


def fit(asked):
    """Return the config that train.py would run with."""
    Path(asked.run_dir).mkdir(exist_ok=True)
    fitting = fitting_of(asked)
    built, _ = fitting.compile(module.build(fitting.first_config()), 0, Timeline())
    return built.config


def limit(patch, kib: float) -> None:
    """Give a device so much memory that this many KiB may be taken."""
    patch.setattr(module, "device_limit", lambda *_: int(1024 * kib / module.HEADROOM) + 1)


@pytest.mark.parametrize(
    ("needs", "kib", "tried"),
    [
        # 800 KiB are there without rows, and a row is expected to take 100. The first try has a margin.
        (lambda rows: 1000 + 100 * rows, 20_000, [64]),  # a small network for the memory
        (lambda rows: 1000 + 100 * rows, 9000, [32, 64]),
        (lambda rows: 800 + 100 * rows, 4200, [8, 32]),
        (lambda rows: 800 + 100 * rows**1.2, 4200, [8, 16]),
        (lambda rows: 800 + 100 * rows if rows < 33 else None, 8000, [32, 64]),  # refused without a number
        (lambda rows: 800 + 1000 * rows, 4200, [8, 2]),  # far more than expected
        (lambda rows: 800 + 10_000 * (rows > 1), 4200, [8, 2, 1]),
        (lambda rows: 800 + 100 * rows, 900, [1]),
    ],
)
def test_rows_follow_an_estimate_and_then_the_line_through_what_was_compiled(asked, monkeypatch, needs, kib, tried):
    compiled = compiling(monkeypatch, needs)
    limit(monkeypatch, kib)
    config = fit(asked)
    assert compiled == tried and len(tried) <= COMPILATIONS
    assert config.batch.rows == max(rows for rows in tried if (size := needs(rows)) is not None and size <= kib)


def test_a_choice_is_kept_with_the_run_for_such_devices_as_long_as_it_fits(asked, monkeypatch):
    compiled = compiling(monkeypatch, lambda rows: 800 + 100 * rows)
    limit(monkeypatch, 4200)
    first = fit(asked)
    compiled.clear()
    assert fit(asked) == first and compiled == [first.batch.rows] == [fitting_of(asked).earlier_rows]
    limit(monkeypatch, 2000)
    assert fit(asked).batch.rows == 8 and compiled[1:] == [32, 1, 8] and fitting_of(asked).earlier_rows == 8
    assert not fitting_of(with_options(asked, {"model.depth": 2})).earlier_rows
    monkeypatch.setattr(jax, "devices", lambda *_: [Device(device) for device in jax.local_devices()[:1]])
    assert not fitting_of(asked).earlier_rows


def test_all_processes_choose_what_fits_the_smallest_device(asked, monkeypatch):
    compiling(monkeypatch, lambda rows: 800 + 100 * rows)
    limit(monkeypatch, 8000)
    monkeypatch.setattr(module, "max_over_processes", lambda value: max(value, -int(1024 * 4200 / module.HEADROOM) - 1))
    assert fitting_of(asked).limit == pytest.approx(1024 * 4200, rel=1e-5)


def test_a_process_whose_device_alone_runs_out_of_memory_records_fewer_rows(asked, monkeypatch):
    compiling(monkeypatch, lambda rows: 800 + 100 * rows)
    limit(monkeypatch, 4200)
    Path(asked.run_dir).mkdir()
    fitting, built = fitting_of(asked), module.build(with_options(asked, {"batch.rows_per_device": 32}))
    for process in (3, 5):
        with monkeypatch.context() as patch, pytest.raises(StartAgain, match="rows_per_device=16"):
            patch.setattr(jax, "process_index", lambda process=process: process)
            with fitting.fewer_rows_if_out_of_memory(built):
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
    assert not Path(asked.run_dir, "events.jsonl").exists()  # which only the first process writes
    Path(asked.run_dir, "out_of_memory-6.json").write_text("[")  # killed in between
    assert fitting_of(asked).earlier_rows == 16
    assert [event["event"] for event in RunFolder(asked.run_dir).events.read()] == ["out_of_memory", "fitted"] * 2
    assert fitted(asked.run_dir) == [16, 16] and [*Path(asked.run_dir).iterdir()] == [
        RunFolder(asked.run_dir).events.path
    ]


@pytest.mark.parametrize(
    "refusal", ["Received message larger than max (4563651 vs. 4194304)", "Too many pings (grpc_status:8)"]
)
def test_what_grpc_refuses_is_no_lack_of_memory(asked, monkeypatch, refusal):
    compiling(monkeypatch, lambda rows: 800 + 100 * rows)
    limit(monkeypatch, 4200)
    fitting, built = fitting_of(asked), module.build(with_options(asked, {"batch.rows_per_device": 32}))
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as error,
        fitting.fewer_rows_if_out_of_memory(built),
    ):
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {refusal}")
    assert not hasattr(error.value, "__notes__") and fitting_of(asked).earlier_rows == 0


def test_the_arrays_of_a_start_that_ran_out_of_memory_are_gone_before_the_next(folder, monkeypatch, capfd):
    arrays, found = [], []

    def start(*_):
        found.extend(array() for array in arrays)
        if arrays:
            return Exit.COMPLETE
        of_set_up = SimpleNamespace(array=jax.numpy.ones(3))
        of_set_up.itself = of_set_up  # only garbage collection deletes a cycle
        arrays.append(weakref.ref(of_set_up.array))
        gc.freeze()
        raise StartAgain("out of memory")

    monkeypatch.setattr("train.train", start)
    assert train(monkeypatch, capfd, "again")[0] == Exit.COMPLETE and found == [None]
    gc.freeze()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a config and text."""
    monkeypatch.chdir(write_folder(tmp_path))
    return tmp_path


def train(patch, capfd, run_dir: str, *more: str) -> tuple[int, list[tuple[str, str]], str]:
    """Return the exit code of train.py, what it says of each program that it compiles, and all that it says."""
    code = run("train", patch, *OPTIONS, f"--run_dir={run_dir}", *more, devices=1)
    out, err = capfd.readouterr()
    return code, NEEDS.findall(out), out + err


def fitted(run_dir: str) -> list[int]:
    return [event["rows_per_device"] for event in RunFolder(run_dir).events.read() if event["event"] == "fitted"]


@pytest.mark.medium
def test_with_too_little_memory_it_names_what_takes_less(folder, monkeypatch, capfd):
    limit(monkeypatch, 1)
    code, programs, said = train(monkeypatch, capfd, "none")
    assert code == Exit.MISTAKE and "not one row fits the device's memory" in said and "Traceback" not in said
    assert not (folder / "none").exists() and [rows for rows, _ in programs] == ["1"]
    (smaller,) = re.findall(r"GiB may be taken\. (.*) takes less", said)
    limit(monkeypatch, 0.97 * float(programs[0][1]) * 2**20)
    assert train(monkeypatch, capfd, "smaller", "--steps=1", *smaller.split())[0] == Exit.COMPLETE


@pytest.mark.medium
def test_out_of_memory_in_a_step_starts_again_once_with_half_the_rows(folder, monkeypatch, capfd):
    dispatched, failing = MetricsLog.step, []

    def fail(log, step, *arguments):
        if failing and step == 3:
            raise jax.errors.JaxRuntimeError(failing.pop())
        dispatched(log, step, *arguments)

    monkeypatch.setattr(MetricsLog, "step", fail)
    failing.append("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
    code, programs, said = train(monkeypatch, capfd, "halved", "--model.depth=1")
    assert [rows for rows, _ in programs] == ["16", "8"]  # each start compiles once
    assert code == Exit.COMPLETE and "out of memory: --batch.rows_per_device=8 from here on" in said
    assert "continuing after step 2 of 4" in said
    events = RunFolder("halved").events.read()
    assert [event["rows_per_device"] for event in events if event["event"] == "out_of_memory"] == [8]
    stops = [event for event in events if event["event"] == "stop"]
    assert [event["code"] for event in stops] == [Exit.PEER_LOST, Exit.COMPLETE] and stops[0]["seconds"]["compile"] > 0
    assert fitted("halved")[-1] == 8
    assert json.loads(Path("halved/config.json").read_text())["config"]["batch"]["rows_per_device"] == 8
    assert [line["step"] for line in RunFolder("halved").metrics() if "loss" in line] == [*range(1, 5)]
    starts = Mock(side_effect=StartAgain("out of memory"))
    monkeypatch.setattr("train.train", starts)
    assert train(monkeypatch, capfd, "twice")[0] == Exit.PEER_LOST and starts.call_count == 2
