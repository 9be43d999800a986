"""The same run on one device, on a mesh of eight, and on two processes of four."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from run.metrics import read_metrics
from tests.fake_gcs import FakeGCS
from tests.test_train import ROOT, folder, summary  # noqa: F401

OPTIONS = ("--config=tiny.py", "--steps=40", "--log.every_steps=1", "--eval.every_steps=20", "--model.kv_heads=2")


def start(folder, devices: int, processes: int, *arguments, per_process=((), ()), folders=()):  # noqa: F811
    """Starts train.py in so many processes of so many CPU devices each, all in one folder or each in its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    for index in range(processes):
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        if processes > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(processes),
                "JAX_PROCESS_ID": str(index),
            }
        command = [sys.executable, ROOT / "train.py", *OPTIONS, *arguments, *per_process[index]]
        pipe = subprocess.PIPE
        where = folders[index] if folders else folder
        started.append(subprocess.Popen(command, cwd=where, env=environment, stdout=pipe, stderr=subprocess.STDOUT))
    return started


def finish(processes, code=0) -> list[str]:
    """Waits for all and returns what they said."""
    said = [process.communicate(timeout=300)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), "\n---\n".join(said)
    return said


@pytest.fixture(scope="module")
def one_device(folder):  # noqa: F811
    finish(start(folder, 1, 1, "--run_dir=one"))
    return folder / "one"


def assert_same(run_dir: Path, other: Path) -> None:
    """Losses, norms and evaluations agree within 1e-5 over the first 20 steps, and each step is told once."""
    ours, theirs = read_metrics(run_dir), read_metrics(other)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, expected in zip(ours[:22], theirs):
        for name in line.keys() & {"loss", "grad_norm", "val_loss", "val_bpb"}:
            assert line[name] == pytest.approx(expected[name], rel=1e-5), (line["step"], name)


@pytest.mark.slow
def test_eight_devices_on_three_axes(folder, one_device):  # noqa: F811
    mesh = ("--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2")
    finish(start(folder, 8, 1, "--run_dir=three-axes", "--batch.rows_per_device=2", *mesh))
    assert_same(folder / "three-axes", one_device)


@pytest.mark.slow
def test_two_processes_of_four(folder, one_device):  # noqa: F811
    """Stopped by Ctrl-C on both and continued; written once, by the first."""
    options = ("--run_dir=two", "--batch.rows_per_device=1", "--mesh.fsdp=2", "--checkpoint.every_steps=10")
    processes = start(folder, 4, 2, *options, "--steps=40")
    said = finish(processes)
    assert "bits per byte" in said[0] and "bits per byte" not in said[1]
    assert_same(folder / "two", one_device)
    finish(start(folder, 8, 1, "--run_dir=eight", "--batch.rows_per_device=1", "--mesh.fsdp=2"))
    assert_same(folder / "two", folder / "eight")
    assert summary(folder / "two")["val_loss"] == pytest.approx(summary(folder / "eight")["val_loss"], rel=1e-5)


@pytest.mark.slow
def test_processes_that_disagree_refuse_with_code_2(folder):  # noqa: F811
    options = ("--run_dir=disagree", "--batch.rows_per_device=1")
    said = finish(start(folder, 4, 2, *options, per_process=((), ("--seed=1",))), code=2)
    for text in said:
        assert "[1] differ from process 0 in their config" in text and "Traceback" not in text
    assert not (folder / "disagree").exists()


@pytest.mark.slow
def test_a_mistake_is_told_by_every_process(folder, one_device):  # noqa: F811
    said = finish(start(folder, 4, 2, "--run_dir=one", "--batch.rows_per_device=1", "--seed=1"), code=2)
    for text in said:
        assert "seed: 0 -> 1" in text and "Traceback" not in text


def wait_for_lines(run_dir: Path, count: int, processes) -> None:
    while len(read_metrics(run_dir)) < count:
        assert all(process.poll() is None for process in processes), finish(processes)
        time.sleep(0.02)


LONG = ("--steps=80", "--batch.rows_per_device=1", "--mesh.fsdp=2", "--checkpoint.every_steps=10")


@pytest.fixture(scope="module")
def never_stopped(folder):  # noqa: F811
    finish(start(folder, 8, 1, "--run_dir=never", *LONG))
    return folder / "never"


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "sign", "codes"), [(1, signal.SIGTERM, [0, 0]), (0, signal.SIGINT, [130, 0])])
def test_one_process_is_asked_to_stop_and_all_save_and_stop(folder, never_stopped, asked, sign, codes):  # noqa: F811
    """And other numbers of processes and devices go on from there, on other meshes, as one that was never stopped."""
    name = f"stopped{asked}"
    processes = start(folder, 4, 2, f"--run_dir={name}", *LONG)
    wait_for_lines(folder / name, 15, processes)
    processes[asked].send_signal(sign)
    said = [process.communicate(timeout=120)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == codes, "\n---\n".join(said)
    assert "the same command continues it" in said[0]
    saved = max(int(path.name) for path in (folder / name / "checkpoints").iterdir())
    assert f"stopped after step {saved} of 80" in said[0]
    if asked:
        finish(start(folder, 8, 1, f"--run_dir={name}", *LONG, "--mesh.tensor=2", "--batch.rows_per_device=2"))
    else:
        finish(start(folder, 1, 1, f"--run_dir={name}", *LONG, "--mesh.fsdp=1", "--batch.rows_per_device=4"))
    ours, theirs = (
        {line["step"]: line["loss"] for line in read_metrics(run_dir) if "loss" in line}
        for run_dir in (folder / name, never_stopped)
    )
    assert ours.keys() == theirs.keys()
    for step in range(1, saved + 11):  # ten on the other mesh; rounding grows with every step
        assert ours[step] == pytest.approx(theirs[step], rel=1e-5), step


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_when_one_process_dies_the_other_ends_within_a_minute_and_both_go_on(folder, killed):  # noqa: F811
    name = f"killed{killed}"
    processes = start(folder, 4, 2, f"--run_dir={name}", *LONG)
    wait_for_lines(folder / name, 25, processes)
    processes[killed].kill()
    left = processes[1 - killed]
    said = left.communicate(timeout=60)[0].decode()
    assert left.returncode not in (0, None), said
    # Ours, or, where JAX's service notices first and ends the process, its own.
    assert "another one has stopped, or cannot be reached" in said or "another task died" in said
    said = finish(start(folder, 4, 2, f"--run_dir={name}", *LONG))
    assert "continuing after step" in said[0]


@pytest.mark.slow
def test_machines_that_share_only_a_bucket_are_lost_and_replaced(folder, tmp_path, one_device, monkeypatch):  # noqa: F811
    """Their disks are lost with them: nothing but gs:// is left, and the run goes on, its record whole."""
    server = FakeGCS()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)

    def machines(generation: str) -> list[Path]:
        folders = [tmp_path / f"{generation}{i}" for i in range(2)]
        for machine in folders:
            machine.mkdir()
            subprocess.run(["cp", "-r", folder / "tiny.py", folder / "text", f"{machine}/"], check=True)
        return folders

    options = ("--checkpoint.folder=gs://bucket/runs/pod", "--checkpoint.every_steps=10", "--batch.rows_per_device=1")
    first, second = machines("first"), machines("second")
    processes = start(folder, 4, 2, *options, folders=first)
    while not any("checkpoints/20/commit_success.txt" in name for name in list(server.objects)):
        assert all(process.poll() is None for process in processes), finish(processes)
        time.sleep(0.01)
    for process in processes:
        process.kill()
        process.communicate()
    said = finish(start(folder, 4, 2, *options, folders=second))
    assert "continuing after step" in said[0] and "bits per byte" in said[0]
    assert not (second[1] / "runs").exists()
    assert_same(second[0] / "runs" / "tiny", one_device)
    steps = [line["step"] for line in read_metrics(second[0] / "runs" / "tiny") if "loss" in line]
    assert steps == list(range(1, 41))
    server.shutdown()
