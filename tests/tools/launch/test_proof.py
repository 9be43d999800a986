"""The proof: train.py itself, launched, and taken away in the middle, ends with the parameters of a run that was left
alone. (The other tests here launch a stand-in for it.)"""

import json
import shutil
import signal
import sys
import threading
from pathlib import Path
from shlex import quote

import pytest
import yaml

from run.lines import read_metrics
from tests.fake_gcs import FakeGCS
from tests.test_train import ROOT, environment_of, folder  # noqa: F401
from tests.tools.launch.fake_kubernetes import Cluster, environment_with
from tests.tools.launch.stand_in import wait_for
from tests.tools.launch.test_tpu import cloud  # noqa: F401
from tools.launch.__main__ import main
from tools.launch.code import Code, pack

SECONDS = 500


def steps(run_dir: Path) -> int:
    """The newest step that was told of."""
    return max([0, *(line["step"] for line in read_metrics(run_dir) if "loss" in line)])


def result(run_dir: Path) -> str:
    return json.loads((run_dir / "summary.json").read_text())["params_sha256"]


@pytest.mark.slow
def test_pods_that_are_drained_and_killed_end_as_pods_that_were_left_alone(folder, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tools.launch.job.pack", lambda root: Code(b"", frozenset()))
    shutil.copytree(folder / "text", tmp_path / "disk" / "text")
    options = ["--hardware=2x cpu:2", "--image=I", "--claim=disk", "--max_crashes=1", "--dry_run"]
    arguments = [f"--config={folder}/tiny.py", "--data.source=/runs/text", "--log.every_steps=1", "--steps=80"]
    shas = []
    for name in ("left-alone", "harmed"):
        assert main(["k8s", "up", *options, f"--name={name}", "--", *arguments]) == 0
        jobset = yaml.safe_load(capsys.readouterr().out.partition(" <<'END'\n")[2].removesuffix("END\n"))
        environment = environment_of(2) | {"PATH": environment_with(sys.executable, tmp_path / f"bin-{name}")["PATH"]}
        cluster = Cluster(jobset, ROOT, {"runs": tmp_path / "disk"}, environment)
        run_dir, done = tmp_path / "disk" / name, []

        def harm(cluster, run_dir=run_dir, done=done):
            at = steps(run_dir)
            if not done and at >= 15:
                done.append(cluster.evict((0, 1)))
            if len(done) == 1 and cluster.restarts == 1 and at >= 35:
                done.append(cluster.pods[0, 0].send_signal(signal.SIGKILL))

        assert cluster.run(SECONDS, harm if name == "harmed" else lambda cluster: None) == "Completed", cluster.said
        assert cluster.restarts == len(done)
        shas.append(result(run_dir))
    assert len(done) == 2 and shas[0] == shas[1]


@pytest.mark.slow
def test_a_slice_that_is_taken_from_a_run_leaves_no_trace_in_it(folder, cloud, tmp_path, monkeypatch):  # noqa: F811
    cloud.set("workers", 1)
    monkeypatch.setattr("tools.launch.hardware.Hardware.hosts_per_group", 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tools.launch.job.pack", lambda here: pack(ROOT))
    server = FakeGCS()
    for name, value in (server.environment() | environment_of(8)).items():
        monkeypatch.setenv(name, value)
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'  # a link would not find its packages
    setup = f"mkdir -p .venv/bin && printf %s {quote(python)} > .venv/bin/python && chmod +x .venv/bin/python"
    options = ["--hardware=v5e:2x4", "--project=project", "--zones", "us-central1-a", "us-west4-a", f"--setup={setup}"]
    arguments = [f"--config={folder}/tiny.py", "--data.source=configs", "--steps=80"]

    def launched(name: str) -> str:
        """The digest of the parameters that a launched run ends with."""
        bucket = f"--checkpoint.folder=gs://bucket/{name}"
        assert main(["tpu", "run", *options, f"--name={name}", "--", *arguments, bucket]) == 0
        return result(tmp_path / "runs" / name)

    def take() -> None:
        saved = lambda step: any(f"harmed/checkpoints/{step}/commit_success" in name for name in list(server.objects))
        for step in (20, 40):
            wait_for(lambda step=step: saved(step), SECONDS)
            cloud.take()

    left_alone = launched("left-alone")
    cloud.plan(us_central1_a=["active", "stockout"], us_west4_a=["active"])
    harming = threading.Thread(target=take)
    harming.start()
    assert launched("harmed") == left_alone
    harming.join()
    assert len(cloud.asked("create")) >= 4 and not cloud.left()
    server.shutdown()
