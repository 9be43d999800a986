"""Compare a run on one device, on a mesh of eight, and on two processes of two."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from run.record import read_metrics
from tests.evaluation.core_bundle import make_bundle
from tests.fake_gcs import FakeGCS
from tests.hosts.processes import finish
from tests.hosts.processes import start as start_processes
from tests.test_train import PREEMPTED, ROOT, folder, run  # noqa: F401

OPTIONS = (
    *("--config=tiny.py", "--steps=40", "--log.every_steps=1", "--eval.every_steps=20", "--checkpoint.every_steps=10"),
    "--model.kv_heads=2",  # divisible by `tensor`
)


def start(folder, *arguments, per_process=((), ()), folders=(), command=("train.py", *OPTIONS)):  # noqa: F811
    """Start a command, train.py by default, in two processes of two CPU devices each, in one folder or two."""
    words = [ROOT / command[0], *command[1:], *arguments]
    commands = ([*words, *more] for more in per_process)
    return start_processes(*commands, folders=folders or [folder], devices=[2])


@pytest.fixture(scope="module")
def one_device(folder):  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run("train", patch, *OPTIONS, "--run_dir=one", devices=1) == 0
    return folder / "one"


def assert_same(run_dir: Path, other: Path, steps=20) -> None:
    """Require equal losses, norms and evaluations within 1e-5 over the first steps, and one line per logged step."""
    ours, theirs = read_metrics(run_dir), read_metrics(other)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, expected in zip(ours, theirs):
        if line["step"] > steps:  # rounding grows with every step
            break
        for name in line.keys() & {"loss", "grad_norm", "val_loss", "val_bpb"}:
            assert line[name] == pytest.approx(expected[name], rel=1e-5), (line["step"], name)


@pytest.mark.slow
def test_two_processes_give_the_answers_of_one_to_core(folder, one_device, monkeypatch):  # noqa: F811
    monkeypatch.chdir(folder)
    make_bundle(folder / "bundle")
    command = ("evaluate.py", "--run_dir=one", "--tasks=core", "--bundle=bundle", "--items=16")
    assert run("evaluate", monkeypatch, *command[1:], "--out=asked-one", devices=1) == 0
    outputs = finish(start(folder, "--out=asked-two", "--mesh.fsdp=2", command=command), 0)
    assert sorted("core_stderr" in text for text in outputs) == [False, True]  # one prints the table
    ours, theirs = (
        {(line["task"], line["item"]): line["losses"] for line in map(json.loads, text.splitlines()[1:])}
        for text in (
            (folder / name / "core" / "step_40_items_16" / "items.jsonl").read_text()
            for name in ("asked-one", "asked-two")
        )
    )
    assert ours.keys() == theirs.keys() and len(ours) > 100
    for key, losses in ours.items():
        assert theirs[key] == pytest.approx(losses, abs=1e-4), key


SLOW = """
import os, runpy, sys, time
import data.loader
batches = data.loader.train_batches
def slow_batches(*arguments):
    for batch in batches(*arguments):
        time.sleep(0.5)
        yield batch
if os.environ["JAX_PROCESS_ID"] == "1":
    data.loader.train_batches = slow_batches
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.slow
def test_a_slow_host_is_named_at_each_logged_step(folder):  # noqa: F811
    (folder / "slow.py").write_text(SLOW)
    short = ("--steps=10", "--log.every_steps=5", "--run_dir=slow")
    finish(start(folder, *short, command=(folder / "slow.py", ROOT / "train.py", *OPTIONS)), 0)
    lines = [line["hosts"] for line in read_metrics(folder / "slow") if "loss" in line]
    assert len(lines) == 2
    for own in (line["own_seconds"] for line in lines):
        assert own["max_host"].startswith("1 (") and own["min_host"].startswith("0 (") and own["max"] > 2 * own["min"]


def begin(folder: Path, run_dir: str, *options) -> list[subprocess.Popen]:  # noqa: F811
    """Start two processes, and return them after three steps."""
    began, processes = time.time(), start(folder, f"--run_dir={run_dir}", *options)
    new = lambda: [line for line in read_metrics(folder / run_dir) if line["time"] > began and "loss" in line]
    while len(new()) < 3:
        assert all(process.poll() is None for process in processes), finish(processes, 0)
        time.sleep(0.01)
    return processes


@pytest.mark.slow
def test_two_processes_stopped_and_continued_end_as_one_device(folder, one_device, monkeypatch):  # noqa: F811
    """Preempt one of two: both end, and are resumed. One process resumes on another mesh. (tests/bench/test_chaos.py
    kills them.)"""
    run_dir, fsdp = folder / "two", "--mesh.fsdp=2"
    processes = begin(folder, "two", fsdp)
    processes[1].send_signal(signal.SIGTERM)
    outputs = finish(processes, PREEMPTED)
    assert "the same command continues it" in outputs[0]
    saved = max(int(path.name) for path in (run_dir / "checkpoints").iterdir())
    assert f"stopped after step {saved} of 40" in outputs[0]

    subprocess.run(["cp", "-r", "two", "elsewhere"], cwd=folder, check=True)
    outputs = finish(start(folder, "--run_dir=two", fsdp), 0)
    first = "process 0 of 2, with 2 of 4 cpu devices; mesh: "
    assert first + "data 2, fsdp 2, tensor 1\n" in outputs[0] and "seconds: start " in outputs[0]
    assert "continuing after step" in outputs[0]
    assert "bits per byte" in outputs[0] and "bits per byte" not in outputs[1]
    assert_same(run_dir, one_device)

    monkeypatch.chdir(folder)
    assert run("train", monkeypatch, *OPTIONS, "--run_dir=never", fsdp, devices=4) == 0
    assert_same(run_dir, folder / "never", steps=40)
    assert run("train", monkeypatch, *OPTIONS, "--run_dir=elsewhere", fsdp, "--mesh.tensor=2", devices=4) == 0
    assert_same(folder / "elsewhere", folder / "never", steps=40)


@pytest.mark.slow
def test_machines_that_share_only_a_bucket_are_lost_and_replaced(folder, tmp_path, one_device, monkeypatch):  # noqa: F811
    """Their disks are lost with them. The run continues from gs:// alone, and its record is complete."""
    server = FakeGCS()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)

    def machines(generation: str) -> list[Path]:
        folders = [tmp_path / f"{generation}{i}" for i in range(2)]
        for machine in folders:
            machine.mkdir()
            subprocess.run(["cp", "-r", folder / "tiny.py", folder / "text", f"{machine}/"], check=True)
        return folders

    options = ("--run_dir=gs://bucket/runs/pod",)
    first, second = machines("first"), machines("second")
    processes = start(folder, *options, folders=first)
    while not any("checkpoints/20/facts/metadata" in name for name in list(server.objects)):
        assert all(process.poll() is None for process in processes), finish(processes, 0)
        time.sleep(0.01)
    for process in processes:
        process.kill()
        process.communicate()
    outputs = finish(start(folder, *options, folders=second), 0)
    assert "continuing after step" in outputs[0] and "bits per byte" in outputs[0]
    assert not any((machine / "runs").exists() for machine in second)
    record = tmp_path / "pod"
    record.mkdir()
    for name in ("config.json", "metrics.jsonl", "summary.json"):
        (record / name).write_bytes(server.objects[f"runs/pod/{name}"][1])
    assert_same(record, one_device)
    steps = [line["step"] for line in read_metrics(record) if "loss" in line]
    assert steps == list(range(1, 41))
    server.shutdown()
