"""Compare a run on one device with one of two machines of two devices each, which share only a bucket."""

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from run.folder import RunFolder
from system.errors import Exit
from tests.commands import CONFIG, PREEMPTED, ROOT, run, write_folder
from tests.evaluation.core_bundle import make_bundle
from tests.fake_gcs import FakeGCS
from tests.hosts.processes import fail_elsewhere, finish, start

OPTIONS = (
    *("--config=tiny.py", "--steps=20", "--log.every_steps=1", "--eval.every_steps=20", "--checkpoint.every_steps=5"),
    *("--eval.tasks=core", "--eval.prompts=", "--model.depth=1"),
)
RUN = "gs://bucket/runs/pod"


def of_steps(run_dir: Path) -> list[dict]:
    return [line for line in RunFolder(run_dir).metrics() if "loss" in line]


@pytest.mark.medium
def test_a_text_that_one_host_cannot_read_ends_both_with_one_code(tmp_path):
    """Otherwise loop.sh would end on one host, and start the other again."""
    hosts = [tmp_path / "with text", tmp_path / "without"]
    for host in hosts:
        host.mkdir()
        write_folder(host)
    shutil.rmtree(hosts[1] / "text")
    command = [ROOT / "train.py", "--config=tiny.py", f"--run_dir={tmp_path}/run"]
    for said in finish(start(command, command, folders=hosts), Exit.MISTAKE):
        assert "error: process 1: text: nothing found there" in said


@pytest.mark.medium
def test_what_one_host_cannot_read_ends_the_others_before_the_first_step(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(write_folder(tmp_path))
    bundle = make_bundle(tmp_path / "bundle")
    options = ("--config=tiny.py", "--steps=4", "--eval.prompts=", "--eval.tasks=core", f"--eval.bundle={bundle}")
    plain = ("--config=tiny.py", "--steps=4", "--run_dir=complete")
    assert run("train", monkeypatch, *plain, devices=1) == Exit.COMPLETE
    commands = [
        ("train", (*options, "--run_dir=new"), ["their text", "the held-out rows", "its bundle", "its benchmark"]),
        ("train", (*options, "--run_dir=new", "--eval.tasks="), ["its metrics"]),
        ("evaluate", ("--run_dir=complete",), ["its runs", "the run complete", "the run's text"]),
        ("evaluate", ("--run_dir=complete", "--source=text"), ["their text", "a tokenizer"]),
        ("evaluate", ("--run_dir=complete", "--tasks=core", f"--bundle={bundle}"), ["its bundle", "its benchmark"]),
    ]
    for command, words, places in commands:
        for where in places:
            with monkeypatch.context() as patch:
                fail_elsewhere(patch, where)
                assert run(command, patch, *words, devices=1) == Exit.MISTAKE, where
            assert capfd.readouterr().err.endswith("error: process 1: it is not there\n"), where


@pytest.mark.slow
def test_machines_that_share_only_a_bucket_are_preempted_replaced_and_end_as_one_device(tmp_path, monkeypatch):
    """Preempt one of two: both end, and their disks are lost. Two others continue from gs:// alone, with a complete
    record. CORE's figures are one device's too. (tests/bench/test_chaos.py kills processes.)"""
    folder = write_folder(tmp_path, CONFIG.replace("sample_tokens=8", "sample_tokens=8, items=12"))
    monkeypatch.chdir(folder)
    tasks = make_bundle(folder / "bundle") / "core.yaml"
    tasks.write_text(yaml.safe_dump({"icl_tasks": yaml.safe_load(tasks.read_text())["icl_tasks"][::4]}))  # of each kind
    options = (*OPTIONS, f"--eval.bundle={tasks.parent}")
    assert run("train", monkeypatch, *options, "--run_dir=one", devices=1) == 0
    server = FakeGCS()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)

    def machines(generation: str) -> list[subprocess.Popen]:
        folders = [tmp_path / f"{generation}{i}" for i in range(2)]
        for machine in folders:
            shutil.copytree(folder / "text", machine / "text")
            shutil.copy(folder / "tiny.py", machine)
        command = [ROOT / "train.py", *options, f"--run_dir={RUN}", "--mesh.fsdp=2"]
        return start(command, command, folders=folders, devices=[2])

    processes = machines("first")
    while not any("checkpoints/5/facts/metadata" in name for name in list(server.objects)):
        assert all(process.poll() is None for process in processes), finish(processes, 0)
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGTERM)
    assert "the same command continues it" in finish(processes, PREEMPTED)[0]

    first, second = finish(machines("second"), 0)
    assert "process 0 of 2, with 2 of 4 cpu devices; mesh: data 2, fsdp 2, tensor 1\n" in first
    assert "continuing after step" in first and "bits per byte" in first and "bits per byte" not in second
    assert not list(tmp_path.glob("*/runs"))
    record = tmp_path / "pod"
    record.mkdir()
    for name in ("config.json", "metrics.jsonl", "summary.json"):
        (record / name).write_bytes(server.objects[f"runs/pod/{name}"][1])
    server.shutdown()
    ours, theirs = RunFolder(record).metrics(), RunFolder(folder / "one").metrics()
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, expected in zip(ours, theirs):
        for name in line.keys() & {"loss", "grad_norm", "val_loss", "val_bpb", "core", "core_tasks"}:
            assert line[name] == pytest.approx(expected[name], rel=1e-5), (line["step"], name)
    assert [line["step"] for line in of_steps(record)] == list(range(1, 21)) and "core" in ours[-1]
