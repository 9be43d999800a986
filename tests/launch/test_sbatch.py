"""Test launch/train.sbatch on SLURM itself: this machine acts as three nodes."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.real_slurm import real
from tests.launch.stand_in import StandIn, wait_for

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("array", "requeued"),
    [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "3"}, "6_3")],
)
def test_only_the_task_of_an_array_that_was_preempted_is_requeued(tmp_path, array, requeued):
    for name, script in (("srun", "exit 143"), ("scontrol", f'echo "$@" >> {tmp_path}/asked')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1", **array}
    path = f"{tmp_path}:{os.environ['PATH']}"
    ended = subprocess.run(["bash", "launch/train.sbatch"], cwd=ROOT, env={**job, "PATH": path})
    assert ended.returncode == 143
    assert (tmp_path / "asked").read_text().splitlines() == ["show hostnames n1", f"requeue {requeued}"]


@pytest.mark.slow
def test_it_trains_on_every_node_goes_back_into_the_queue_when_preempted_and_ends_when_told(tmp_path, monkeypatch):
    repository = StandIn(tmp_path / "repository")
    (repository.root / "runs").mkdir()
    monkeypatch.chdir(repository.root)
    monkeypatch.setenv("PAUSE", "0")
    monkeypatch.setenv("API_KEY", "s3cret")
    repository.plan("42 wait signal11 wait")
    counts = lambda: [len(repository.starts(process)) for process in range(2)]

    def slurm(*words: str) -> str:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

    with real(monkeypatch):
        slurm("sbatch", "--nodes=2", "launch/train.sbatch", "--config=tiny.py", "--run_dir=/shared/x")
        wait_for(lambda: counts() == [2, 2], 300)
        slurm("scancel", "--signal=TERM", "1")  # as SLURM does before the time limit
        wait_for(lambda: slurm("squeue", "--noheader", "--format=%t") == "PD", 300)
        slurm("scontrol", "update", "JobId=1", "StartTime=now")  # SLURM delays a requeued job by two minutes
        wait_for(lambda: counts() == [4, 4], 300)
        slurm("scontrol", "update", "JobId=1", "Requeue=0")
        slurm("scancel", "--signal=TERM", "1")
        wait_for(lambda: not slurm("squeue", "--noheader"), 300)
    assert repository.starts(0) == repository.starts(1) == ["s3cret --config=tiny.py --run_dir=/shared/x"] * 4
    text = (repository.root / "runs/slurm-1.log").read_text()
    assert text.count("train.py ended with 143") == 4 and text.count("train.py ended with 139") == 2
    written = [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert {path.name for path in written} == {"starts.0", "starts.1"}
