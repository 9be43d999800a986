"""Launch train.py itself and preempt it: it ends with the parameters of an undisturbed run. (Other tests here launch a
stand-in.)"""

import json
import sys
from shlex import quote

import pytest

from tests.fake_gcs import FakeGCS
from tests.test_train import ROOT, environment_of, folder  # noqa: F401
from tests.tools.launch.stand_in import wait_for
from tests.tools.launch.test_tpu import cloud, meanwhile  # noqa: F401
from tools.launch.__main__ import main
from tools.launch.code import pack


@pytest.mark.slow
def test_a_preempted_slice_changes_no_parameter(folder, cloud, tmp_path, monkeypatch):  # noqa: F811
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
        """Return the digest of the final parameters of a launched run."""
        bucket = f"--checkpoint.folder=gs://bucket/{name}"
        assert main(["tpu", "run", *options, f"--name={name}", "--", *arguments, bucket]) == 0
        return json.loads((tmp_path / "runs" / name / "summary.json").read_text())["params_sha256"]

    def take_after(step: int) -> None:
        marker = f"harmed/checkpoints/{step}/commit_success"
        wait_for(lambda: any(marker in name for name in list(server.objects)), 500)
        cloud.take()

    left_alone = launched("left-alone")
    cloud.plan(us_central1_a=["active", "stockout"], us_west4_a=["active"])
    with meanwhile(lambda: take_after(20), lambda: take_after(40)):
        assert launched("harmed") == left_alone
    assert len(cloud.asked("create")) >= 4 and not cloud.left()
    server.shutdown()
