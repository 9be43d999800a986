"""Run the scripts of a TPU host, each twice, as gcloud may repeat them."""

import fcntl
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.tools.launch.stand_in import wait_for
from tools.launch import host_scripts
from tools.launch.job import JobOptions, make_job


@pytest.fixture
def host(repository, tmp_path):
    """Return a function that runs a command twice, as ssh may, the repository, and a function that installs it."""
    home = tmp_path / "home"
    home.mkdir()
    environment = os.environ | {"HOME": str(home), "LAUNCH_PAUSE": "0.02", "LAUNCH_ROOT": str(tmp_path / "var")}

    def ssh(command: str) -> str:
        for _ in range(2):
            done = subprocess.run(["bash", "-c", command], cwd=home, env=environment, capture_output=True, timeout=60)
            assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    job = make_job(JobOptions("v5e:1x1", max_crashes=1), ["--config=tiny.py", "--checkpoint.folder=gs://bucket/it's"])
    (home / f"launch-{job.code.name}.tar").write_bytes(job.code.archive)
    setup = f"echo set up >> {tmp_path}/set-up && {repository.setup}"

    def prepare(typed: int, until: int = round(time.time()) + 10**6) -> str:
        return ssh(host_scripts.prepare(job, setup, typed, until, "gs://none", ["touch", f"{tmp_path}/deleted"]))

    prepare(1)
    assert (tmp_path / "set-up").read_text() == "set up\n"
    yield ssh, repository, prepare
    kill(tmp_path / "var")


def kill(folder) -> None:
    """Kill every process whose working folder is there, as a reboot does. Wait until all have ended, since a process
    keeps its locks until then."""
    alive = True
    while alive:
        alive = False
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (entry / "cwd").readlink().is_relative_to(folder):
                    alive = True
                    os.kill(int(entry.name), signal.SIGKILL)


def test_a_start_after_the_end_starts_nothing_until_the_end_is_reset(host):
    ssh, repository, prepare = host
    repository.plan([0])
    ssh(host_scripts.start("tiny"))
    wait_for(lambda: " ended 0" in ssh(host_scripts.state("tiny")))
    prepare(1)
    ssh(host_scripts.start("tiny"))
    assert " ended 0" in ssh(host_scripts.state("tiny"))
    prepare(2)
    ssh(host_scripts.start("tiny"))
    wait_for(lambda: " ended 0" in ssh(host_scripts.state("tiny")))
    assert len(repository.starts()) == 2
    assert repository.starts()[0]["arguments"][1] == "--checkpoint.folder=gs://bucket/it's"


def test_a_stop_saves_and_lasts(host):
    ssh, repository, prepare = host
    repository.plan(["wait"])
    assert ssh(host_scripts.state("tiny")).split()[1] == "idle"
    ssh(host_scripts.start("tiny"))
    wait_for(lambda: len(repository.starts()) == 1)
    assert ssh(host_scripts.state("tiny")).split()[1] == "running"
    ssh(host_scripts.stop("tiny"))
    wait_for(lambda: " ended 143" in ssh(host_scripts.state("tiny")))
    prepare(1)  # as after the replacement of another host
    ssh(host_scripts.start("tiny"))
    assert " ended 143" in ssh(host_scripts.state("tiny")) and len(repository.starts()) == 1
    # Without preparation nothing is started or stopped. A lost disk looks the same: `state` reports it.
    assert ssh(host_scripts.start("other")) == ssh(host_scripts.stop("other")) == ""
    assert ssh(host_scripts.state("other")).split()[1] == "none"


def test_crashes_are_counted_over_a_reboot_and_reset_by_a_user(host, tmp_path):
    ssh, repository, prepare = host
    repository.plan(["kill"], ["wait"], ["kill"])
    ssh(host_scripts.start("tiny"))
    wait_for(lambda: len(repository.starts()) == 2)
    kill(tmp_path / "var")
    ssh(host_scripts.start("tiny"))
    wait_for(lambda: " ended 137" in ssh(host_scripts.state("tiny")))  # the second crash, of a repeatable kind
    assert len(repository.starts()) == 3
    prepare(2)
    ssh(host_scripts.start("tiny"))
    wait_for(lambda: len(repository.starts()) == 5)


def test_a_restart_during_the_save_at_the_limit_keeps_the_slices(host, tmp_path):
    ssh, repository, prepare = host
    repository.plan(["wait"])
    prepare(2, until=round(time.time()) + 1)
    (tmp_path / "var/tiny/lock").touch()
    with (tmp_path / "var/tiny/lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # like a run that saves for long
        ssh(host_scripts.start("tiny"))
        wait_for((tmp_path / "var/tiny/stop").exists)
        soon = round(time.time()) + 15  # longer than preparation takes on a busy machine
        prepare(3, until=soon)
    ssh(host_scripts.start("tiny"))
    wait_for(lambda: len(repository.starts()) == 1)
    while time.time() < soon - 1:
        assert not (tmp_path / "deleted").exists() and ssh(host_scripts.state("tiny")).split()[1] == "running"
    wait_for((tmp_path / "deleted").exists)
    assert " ended 143" in ssh(host_scripts.state("tiny"))
