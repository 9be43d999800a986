"""Test `python -m tools.launch slurm` and all ends of jobs of two tasks, on a stand-in for SLURM, and in one test on
SLURM itself, if slurmctld and slurmd are installed: this machine acts as three."""

import subprocess
import sys
from pathlib import Path

import pytest

from configs.schema import UserError
from tests.tools.launch.real_slurm import real
from tests.tools.launch.stand_in import StandIn, put_on_path, wait_for
from tools.launch.__main__ import main

STAND_IN = Path(__file__).with_name("fake_slurm.py")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Put the stand-in's commands first on PATH."""
    (tmp_path / "slurm").mkdir()
    names = ("sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
    scripts = {name: f'exec {sys.executable} {STAND_IN} {name} "$@"' for name in names}
    put_on_path(tmp_path / "bin", scripts, monkeypatch)
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "slurm"))


def launch(repository: StandIn, command: str, *options: str, hardware: str = "2x cpu:1") -> int:
    jobs = repository.folder.parent / "jobs"
    if command != "up":
        return main(["slurm", command, f"--folder={jobs}", "--name=tiny", *options])
    words = [f"--hardware={hardware}", f"--folder={jobs}", f"--setup={repository.setup}", *options]
    return main(["slurm", "up", *words, "--", "--config=tiny.py"])


def job_folder(repository: StandIn) -> Path:
    return repository.folder.parent / "jobs" / "tiny"


def queued() -> str:
    words = ["squeue", "--me", "--name=tiny", "--noheader", "--format=%i"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def run_to_its_end(repository: StandIn, *options: str) -> str:
    """Start a job, wait until it leaves the queue, and return its log."""
    assert launch(repository, "up", *options) == 0
    wait_for(lambda: not queued(), 120)
    return (job_folder(repository) / "log").read_text()


def preempt() -> None:
    """Signal the job as SLURM does before its time limit."""
    subprocess.run(["scancel", "--me", "--name=tiny", "--state=RUNNING", "--signal=TERM"], check=True)


def test_it_starts_again_after_143_and_42_and_a_secret_is_in_a_file_of_the_owner_s_alone(
    slurm, repository, monkeypatch, capsys
):
    monkeypatch.setenv("GIVEN_KEY", "it's s3cret")
    repository.plan([143, 143], [42, 42], [0, 0])
    assert launch(repository, "up", "--dry_run", "--secret", "GIVEN_KEY") == 0
    log, folder = run_to_its_end(repository, "--secret", "GIVEN_KEY"), job_folder(repository)
    assert repository.counts() == [3, 3]
    assert "again (143 on" in log and "again (42 on" in log and "--- done" not in log
    assert "0: start 0 of process 0" in log and "1: start 2 of process 1" in log  # appended, over all starts
    first, other = repository.starts(0)[0], repository.starts(1)[0]
    assert first["JAX_NUM_PROCESSES"] == "2" and first["JAX_COORDINATOR_ADDRESS"] == other["JAX_COORDINATOR_ADDRESS"]
    assert first["arguments"] == ["--config=tiny.py", f"--run_dir={folder}/run"]
    assert first["cwd"].startswith(str(folder / "code"))
    output, kept = capsys.readouterr().out, folder / "environment"
    assert kept.stat().st_mode & 0o777 == 0o600 and first["GIVEN_KEY"] == "it's s3cret"
    assert "python -m tools.launch slurm logs" in output
    assert "s3cret" not in log + output + (folder / "job.sh").read_text()
    monkeypatch.delenv("GIVEN_KEY")
    run_to_its_end(repository)
    assert not kept.exists() and "GIVEN_KEY" not in repository.starts()[3]


def test_a_permanent_code_is_not_retried_whatever_its_peers_return(repository, slurm):
    repository.plan([143, 3], [0, 0])
    assert "never (3 on" in run_to_its_end(repository) and len(repository.starts()) == 1


def test_a_crash_is_repeated_a_bounded_number_of_times_and_its_host_named(slurm, repository):
    repository.plan(["kill", 42], [134, 42], [139, 139], [0, 0])
    log = run_to_its_end(repository, "--max_crashes=2")
    assert len(repository.starts()) == 3
    assert "has crashed 2 times" in log and "more than 2 crashes" in log
    crashes = (job_folder(repository) / "crashes").read_text()
    assert [line.split()[0] for line in crashes.splitlines()] == ["137", "134", "139"]
    run_to_its_end(repository, "--max_crashes=2")  # a user may resume it
    assert len(repository.starts()) == 4


def test_a_preempted_job_continues_with_its_code_and_down_saves_and_ends_it(slurm, repository, tmp_path, capsys):
    (tmp_path / "slurm" / "deaf").write_text("2")  # the controller does not answer at once
    repository.plan(["wait", "wait"])
    assert launch(repository, "up") == 0
    wait_for(lambda: repository.counts() == [1, 1])
    assert launch(repository, "up") == 0 and "in the queue already" in capsys.readouterr().out
    (repository.root / "train.py").write_text("raise SystemExit(1)")
    preempt()
    wait_for(lambda: repository.counts() == [2, 2])
    assert launch(repository, "status") == 0 and "tiny" not in capsys.readouterr().err
    assert launch(repository, "down") == 0
    wait_for(lambda: not queued())
    log = (job_folder(repository) / "log").read_text()
    assert len(repository.starts()) == 2 and log.count("saved by process") == 4 and "stopped by launch" in log


@pytest.mark.slow
def test_slurm_itself_leaves_out_a_node_that_crashed_twice_starts_a_preempted_job_again_and_ends_it(
    repository, monkeypatch
):
    repository.plan(["kill", 42], ["kill", 42], ["wait", "wait"])
    with real(monkeypatch):
        assert launch(repository, "up") == 0
        wait_for(lambda: repository.counts() == [3, 3], 300)
        preempt()
        wait_for(lambda: repository.counts() == [4, 4], 300)
        assert launch(repository, "down") == 0
        wait_for(lambda: not queued(), 300)
    log = (job_folder(repository) / "log").read_text()
    assert "node0 has crashed 2 times" in log and "left out from now on: node0" in log and "again (143 on" in log
    assert log.count(" on node[0-1]") == 2 and log.count(" on node[1-2]") == 2
    assert log.count("saved by process") == 4 and "stopped by launch" in log


def test_at_the_deadline_it_saves_and_is_not_started_again(repository, slurm, capsys):
    repository.plan(["wait", "wait"])
    log = run_to_its_end(repository, f"--hours={8 / 3600}", "--price=3")
    assert len(repository.starts()) == 1 and log.count("saved by process") == 2 and "at its deadline" in log
    assert "2 devices (on_demand) x $3 = $6.00 an hour" in capsys.readouterr().out
    log = run_to_its_end(repository, "--hours=1e-9")
    assert len(repository.starts()) == 1 and "the deadline has passed" in log


def test_a_dry_run_shows_the_script_and_needs_no_slurm(repository, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert launch(repository, "up", "--dry_run", "--sbatch=--partition=gpu --account=mine", hardware="4x h200:8") == 0
    output = capsys.readouterr().out
    for line in ("--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--signal=TERM@300", "--partition=gpu"):
        assert f"#SBATCH {line}\n" in output
    assert output.splitlines()[-1] == f"sbatch {job_folder(repository)}/job.sh"
    assert not job_folder(repository).exists()
    for command in ("status", "logs", "down"):
        assert launch(repository, command, "--dry_run") == 0
    script = output.split("<<'END'\n")[1].split("\nEND\n")[0]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_user_error_is_reported_before_anything_is_created(repository, slurm, tmp_path, monkeypatch):
    for words, message in (
        (["--folder=jobs"], "give an absolute path"),
        ([], "--folder is missing"),
        (["--folder=/proc/none"], "/proc/none/.* cannot be written"),
        (["--folder=/tmp/x", "--hardware=v5e:4x4"], "TPUs are launched by"),
        (["--folder=/tmp/x", "--time=1h"], "--time=1h: sbatch takes minutes"),
    ):
        with pytest.raises(UserError, match=message):
            main(["slurm", "up", "--hardware=2x cpu:1", *words, "--", "--config=tiny.py"])
    assert not list((tmp_path / "slurm").iterdir())
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # without SLURM
    with pytest.raises(UserError, match="squeue"):
        launch(repository, "up")
    assert not job_folder(repository).parent.exists()
