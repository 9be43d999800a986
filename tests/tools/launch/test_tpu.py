"""Test `python -m tools.launch tpu` on a stand-in for gcloud (fake_gcloud.py). Runs on two hosts meet stockouts, broken
connections, preempted slices and refused deletions. No resource may remain."""

import fcntl
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.schema import UserError
from tests.tools.launch import fake_gcloud
from tests.tools.launch.stand_in import BUCKET, StandIn, put_on_path, wait_for
from tools.launch import host_scripts, queued, tpu
from tools.launch.__main__ import main
from tools.launch.shell import Trouble

ZONES = ("us-central1-a", "us-west4-a")
NETWORK = ["--network=n", "--subnetwork=s", "--internal_ips", "--tunnel_through_iap"]
HARDWARE = "v5e:2x4"
"""Of one host in truth. The stand-in's slices have two."""


class Cloud:
    """The stand-in's folder, with its state and faults."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def plan(self, **zones: list[str]) -> None:
        (self.folder / "plan").write_text(json.dumps({zone.replace("_", "-"): turns for zone, turns in zones.items()}))

    def set(self, name: str, times: int) -> None:
        (self.folder / "fresh").write_text(str(times))
        (self.folder / "fresh").rename(self.folder / name)

    def times(self, name: str) -> int:
        """Return how often a fault will still occur."""
        return int((self.folder / name).read_text())

    def asked(self, verb: str = "") -> list[list[str]]:
        path = self.folder / "log"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [words for words in lines if not verb or verb in words]

    def left(self) -> list[Path]:
        """Return the resources that exist, and cost money."""
        return [path.parent for path in self.folder.glob("resources/*/*/facts")]

    def logs(self) -> list[str]:
        """Return the hosts' logs in the bucket."""
        return [path.read_text() for path in sorted(self.folder.glob("bucket/tiny/logs/host-*.log"))]

    def take(self) -> None:
        """Preempt the existing slices."""
        for path in self.left():
            fake_gcloud.take(path)

    def reboot(self) -> None:
        """End every process on the hosts."""
        for path in self.left():
            fake_gcloud.kill_in(path)

    def take_host(self, name: str) -> None:
        """Replace a host of the slices by an empty one."""
        for path in self.left():
            fake_gcloud.take_hosts(path, name)


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    made = Cloud(tmp_path / "cloud")
    put_on_path(tmp_path / "bin", {"gcloud": f'exec {sys.executable} -IS {fake_gcloud.__file__} "$@"'}, monkeypatch)
    for name, value in {"FAKE_GCLOUD": made.folder, "LAUNCH_PAUSE": "0.05", "TOKENSUM_CACHE": tmp_path / "c"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("tools.launch.job.Hardware.hosts_per_slice", 2)
    made.plan(us_central1_a=["active"], us_west4_a=["active"])
    yield made
    made.take()


def launch(repository: StandIn, command: str, *options: str, train: tuple[str, ...] = (BUCKET,)) -> int:
    words = [f"--hardware={HARDWARE}", "--project=project", f"--setup={repository.setup}", "--zones", *ZONES, *options]
    if command not in ("up", "run"):
        return main(["tpu", command, "--project=project", "--name=tiny", *options])
    return main(["tpu", command, *words, "--", "--config=tiny.py", *train])


@contextmanager
def meanwhile(*steps):
    """Run the steps in order, in a thread."""
    thread = threading.Thread(target=lambda: [step() for step in steps])
    thread.start()
    yield
    thread.join()


def started(repository: StandIn, times: int = 1):
    """Return a step of `meanwhile` that waits until both hosts have started `times` times."""
    return lambda: wait_for(lambda: repository.counts() == [times, times])


def test_run_takes_a_job_and_its_secrets_to_the_end_over_broken_connections_and_refused_deletions(
    repository, cloud, monkeypatch, capsys
):
    """gcloud repeats a command whose connection broke after it has run."""
    monkeypatch.setenv("GIVEN_KEY", "s3cret 'quoted'\nline")
    monkeypatch.setenv("GIVEN_PROJECT", "mine")
    options = ["--price=0.5", "--secret", "GIVEN_KEY", "--env", "GIVEN_PROJECT"]
    assert launch(repository, "run", "--dry_run", *options) == 0
    shown = capsys.readouterr().out
    repository.plan([143, 143], [42, 42], [0, 0])
    for fault, times in {"breaks": 12, "deaf": 2, "refuses": 3, "slow": 2}.items():
        cloud.set(fault, times)
    quoted = '--log.on_event=: "it\'s"'
    assert launch(repository, "run", *options, train=(BUCKET, quoted)) == 0
    assert repository.counts() == [3, 3] and not cloud.left()
    first, output = repository.starts()[0], capsys.readouterr()
    assert "8 chips (on_demand) x $0.5 = $4.00 an hour, $96.00 in 24 h" in output.out
    assert "nothing is left" in output.out
    costs = "MAY COST MONEY: python -m tools.launch tpu down --project=project --zones us-central1-a --name=tiny"
    assert output.err.count(costs) >= 3
    assert first["arguments"] == ["--config=tiny.py", BUCKET, quoted, "--run_dir=runs/tiny"]
    assert (repository.root / "runs" / "tiny").is_dir()  # the record, copied back
    assert (first["GIVEN_KEY"], first["GIVEN_PROJECT"]) == ("s3cret 'quoted'\nline", "mine")
    assert "GIVEN_KEY" in shown and cloud.logs()
    assert "s3cret" not in shown + output.out + output.err + str(cloud.asked()) + str(cloud.logs())


def test_a_permanent_code_ends_the_run_and_its_log_outlives_the_slice(repository, cloud):
    repository.plan([1, "wait"])
    assert launch(repository, "run") == 1
    assert repository.counts() == [1, 1] and not cloud.left()
    assert "start 0 of process 0" in cloud.logs()[0] and "ended with 1" in cloud.logs()[0]


def test_crashes_are_counted_over_a_reboot(repository, cloud):
    repository.plan(["kill", "wait"], ["wait", "wait"], ["kill", "wait"], ["wait", "wait"])
    with meanwhile(lambda: wait_for(lambda: repository.counts() == [2, 1]), cloud.reboot):
        assert launch(repository, "run", "--max_crashes=1") == 137  # the second crash, of a repeatable kind
    assert repository.counts() == [3, 2] and not cloud.left()


def test_up_leaves_no_request_if_no_zone_has_capacity(repository, cloud):
    cloud.plan(us_central1_a=["stockout"], us_west4_a=["waits"])
    assert launch(repository, "up", "--wait_minutes=0.005") == 1 and not cloud.left()


def test_a_failed_up_deletes_only_its_own_requests(repository, cloud, capsys):
    repository.plan(["wait", "wait"])
    cloud.set("failing", 3)
    assert launch(repository, "up") == 1 and not cloud.left()
    assert "pip: connection reset" in (output := capsys.readouterr()).err and "started" not in output.out
    assert launch(repository, "up", "--hours=2", "--save_minutes=30") == 0
    assert "it saves and ends after 2.7 h at the latest" in capsys.readouterr().out
    (repository.root / "train.py").write_text((repository.root / "train.py").read_text() + "# another set-up\n")
    cloud.set("failing", 3)
    assert launch(repository, "up") == 1 and len(cloud.left()) == 1
    started(repository)()


def test_a_preempted_slice_is_replaced_and_the_watcher_s_events_run_the_user_s_command(repository, cloud, tmp_path):
    hook = f'echo "$TOKENSUM_RUN $TOKENSUM_EVENT" >> {tmp_path}/events'
    repository.plan(["wait", "wait"], ["wait", "wait"], [0, 0])
    cloud.plan(us_central1_a=["active", "stockout", "stockout", "active"], us_west4_a=["refused", "active"])
    with meanwhile(started(repository), cloud.take, started(repository, 2), cloud.take):
        assert launch(repository, "run", "--capacity=spot", train=(BUCKET, f"--log.on_event={hook}")) == 0
    assert repository.counts() == [3, 3] and not cloud.left()
    assert all("--spot" in words for words in cloud.asked("create"))
    events = (tmp_path / "events").read_text().splitlines()
    assert events == ["tiny preempted", "tiny unavailable", "tiny preempted", "tiny over"]


def test_a_log_whose_reader_has_ended_ends_no_watch(repository, cloud):
    repository.plan(["wait", "wait"], [0, 0])
    code = "import sys, tools.launch.__main__ as it, tools.launch.job as job; job.Hardware.hosts_per_slice = 2; "
    code += "sys.exit(it.main(sys.argv[1:]))"
    words = f"tpu run --hardware={HARDWARE} --project=project --zones {ZONES[0]} -- --config=tiny.py {BUCKET}".split()
    command = [sys.executable, "-c", code, *words[:2], f"--setup={repository.setup}", *words[2:]]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    watcher = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    started(repository)()
    watcher.stdout.close()
    cloud.take()
    assert watcher.wait() == 0 and repository.counts() == [2, 2] and not cloud.left()


def test_a_host_that_lost_its_disk_is_prepared_again(repository, cloud):
    """Its slice remains ACTIVE."""
    repository.plan(["wait", "wait"], [0, 0])
    lose = lambda: cloud.take_host("host-0-0")
    prepared = lambda: wait_for(lambda: repository.counts() == [2, 1])
    end = lambda: os.kill(repository.starts(1)[0]["pid"], 15)  # the other one lost its peer
    with meanwhile(started(repository), lose, prepared, end):
        assert launch(repository, "run") == 0
    assert repository.counts() == [2, 2] and not cloud.left() and len(cloud.asked("create")) == 1


def test_a_host_that_is_lost_while_the_run_ends_is_not_started_again(monkeypatch):
    """A new process would wait for those that have ended."""
    seen = [{"a": ("ended", "0"), "b": ("none", ""), "c": ("running", "")}]
    seen += [{"a": ("ended", "0"), "b": ("idle", "")}, {**seen[0], "c": ("ended", "0")}]
    slices, job = SimpleNamespace(state=lambda: "ACTIVE"), SimpleNamespace(hardware=SimpleNamespace(hosts=3))
    fetched = []
    monkeypatch.setattr(tpu, "states_of", lambda slices: seen.pop(0))
    monkeypatch.setenv("LAUNCH_PAUSE", "0")
    monkeypatch.setattr(tpu, "fetch", fetched.append)
    assert tpu.watch(SimpleNamespace(deadline=math.inf, job=job), slices) == "ended 0"  # pyright: ignore
    assert fetched == [slices] and not seen


def test_a_zone_that_fails_to_delete_does_not_hinder_others(monkeypatch):
    asked = []

    def place(zone: str, failures: int) -> SimpleNamespace:
        def delete(before) -> None:
            asked.append(zone)
            if asked.count(zone) <= failures:
                raise Trouble("no answer")

        return SimpleNamespace(zone=zone, options=queued.TpuOptions(), name="tiny", delete=delete)

    monkeypatch.setenv("LAUNCH_PAUSE", "0")
    queued.delete_all([place("a", 2), place("b", 1), place("c", 0)])  # pyright: ignore
    assert asked == ["a", "b", "c", "a", "b", "a"]


def test_a_forbidden_zone_does_not_hide_others(repository, cloud, capsys):
    repository.plan(["wait", "wait"])
    assert launch(repository, "up") == 0
    (cloud.folder / "closed").write_text("us-central2-b")
    for command in ("status", "stop", "down"):
        assert launch(repository, command) == 0
        output = capsys.readouterr().out
        assert "passed over, since this project may not look there: us-central2-b" in output, command
    assert "tiny in us-central1-a is deleted" in output and not cloud.left()
    with pytest.raises(
        UserError, match="what is in us-central2-b cannot be seen, and MAY COST MONEY: gcloud cannot describe"
    ):
        launch(repository, "down", "--zones", "us-central2-b")


def test_expired_credentials_are_no_user_error_and_no_resource_is_called_deleted(repository, cloud, capsys):
    cloud.set("expired", 3)  # all attempts in the first zone
    assert launch(repository, "down", "--zones", *ZONES) == 42
    output = capsys.readouterr()
    assert "what is in us-central1-a cannot be seen, and MAY COST MONEY" in output.err
    assert "nothing is left" not in output.out


@pytest.fixture
def deadline(monkeypatch):
    """Return a deadline that passes when it is set, whatever the clock."""
    come = threading.Event()
    late = property(lambda launch: 0.0 if come.is_set() else time.time() + 1e6)
    monkeypatch.setattr(tpu.Launch, "deadline", late)
    return come


def test_a_command_that_stalls_does_not_stop_the_watch(repository, cloud, deadline, monkeypatch, capsys):
    repository.plan(["wait", "wait"])
    monkeypatch.setattr(queued.Slices.ssh, "__defaults__", (5,))
    monkeypatch.setattr(queued, "COPY", 5)  # the code may still be on its way to a host
    stall = lambda: cloud.set("stalls", 1)
    with meanwhile(started(repository), stall, lambda: wait_for(lambda: cloud.times("stalls") == 0), deadline.set):
        assert launch(repository, "run") == 143
    assert not cloud.left() and "no answer in 5 s" in capsys.readouterr().err


def test_credentials_lost_at_the_deadline_only_delay_the_end(repository, cloud, deadline, capsys):
    repository.plan(["wait", "wait"])
    lose = lambda: cloud.set("expired", 9)
    with meanwhile(started(repository), lose, lambda: wait_for(lambda: cloud.times("expired") < 8), deadline.set):
        assert launch(repository, "run") == 143
    output = capsys.readouterr()
    assert not cloud.left() and cloud.times("expired") == 0 and repository.counts() == [1, 1]
    assert "nothing is left in us-central1-a, us-west4-a" in output.out
    assert "MAY COST MONEY" in output.err and all("saved by process" in text for text in cloud.logs())


def test_after_a_success_also_by_another_process_a_failed_set_up_is_retried(repository, cloud):
    repository.plan(["wait", "wait"], [0, 0])
    assert launch(repository, "up") == 0
    started(repository)()
    cloud.set("failing", 4)
    with meanwhile(lambda: wait_for(lambda: cloud.times("failing") == 0), lambda: cloud.set("failing", 4), cloud.take):
        assert launch(repository, "run") == 0
    assert repository.counts() == [2, 2] and not cloud.left() and cloud.times("failing") == 0


def test_a_set_up_that_never_works_ends_it_and_leaves_nothing(repository, cloud, capsys):
    cloud.set("failing", 100)
    assert launch(repository, "run") == 1
    assert not cloud.left() and cloud.times("failing") == 97 and "pip: connection reset" in capsys.readouterr().err


def test_hosts_end_by_themselves_without_a_watcher(repository, cloud, monkeypatch):
    repository.plan(["wait", "wait"])
    soon = time.time() + 6  # longer than `up` takes on a busy machine
    monkeypatch.setattr(tpu.Launch, "limit", property(lambda launch: round(soon)))
    assert launch(repository, "up") == 0
    wait_for(lambda: cloud.asked("delete"))
    assert launch(repository, "status") == 0 and not cloud.left()
    assert len(cloud.logs()) == 2 and all("ended with 143" in text for text in cloud.logs())


def test_a_start_around_the_limit_keeps_the_slices(tmp_path):
    host = tmp_path / "var" / "tiny"
    host.mkdir(parents=True)
    (host / "limit").write_text("0")
    environment = os.environ | {"LAUNCH_PAUSE": "0.02", "LAUNCH_ROOT": str(tmp_path / "var")}
    script = host_scripts.limit("tiny", ["touch", str(tmp_path / "deleted")])
    with (host / "preparing").open("w") as preparing, (host / "lock").open("w") as run:
        fcntl.flock(preparing, fcntl.LOCK_EX)
        fcntl.flock(run, fcntl.LOCK_EX)
        limiting = subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True)
        try:
            time.sleep(0.5)
            assert not (host / "stop").exists()  # a set-up takes long
            fcntl.flock(preparing, fcntl.LOCK_UN)
            wait_for((host / "stop").exists)
            (host / "limit").write_text(str(10**11))  # a start while the run saves
            fcntl.flock(run, fcntl.LOCK_UN)
            time.sleep(0.5)
            assert limiting.poll() is None and not (tmp_path / "deleted").exists()
        finally:
            os.killpg(limiting.pid, signal.SIGKILL)


def test_a_save_is_waited_for_as_long_as_is_asked(monkeypatch, capsys):
    clock = iter(range(0, 100_000, 700))  # each call is 700 s later
    monkeypatch.setattr(queued, "time", SimpleNamespace(time=lambda: next(clock), sleep=lambda seconds: None))
    states = [{"a": ("running", "")}] * 4 + [{"a": ("ended", "143")}]
    monkeypatch.setattr(queued, "states_of", lambda slices: states.pop(0))
    slices = SimpleNamespace(name="tiny", ssh=lambda command: (0, ""), shell=SimpleNamespace(dry_run=False))
    queued.save(slices, SimpleNamespace(save_minutes=60.0))  # pyright: ignore
    assert not states and not capsys.readouterr().err
    states += [{"a": ("running", "")}] * 9
    queued.save(slices, SimpleNamespace(save_minutes=60.0))  # pyright: ignore
    assert states and "not all hosts of tiny have saved in 60 min" in capsys.readouterr().err


def test_the_loop_outlives_up_and_every_command_of_anybody_finds_it(repository, cloud, capsys, monkeypatch):
    repository.plan(["wait", "wait"])
    cloud.set("oslogin", 1)
    for person in ("ada", "bob"):  # the second `up` requests and starts nothing
        monkeypatch.setenv("USER", person)
        assert launch(repository, "up") == 0
        started(repository)()
    assert len(cloud.left()) == 1 and repository.counts() == [1, 1]
    os.kill(repository.starts()[0]["pid"], 15)
    os.kill(repository.starts(1)[0]["pid"], 15)
    started(repository, 2)()
    capsys.readouterr()
    assert launch(repository, "status") == 0
    assert "host-0-0: running" in capsys.readouterr().out
    following = subprocess.Popen(
        [sys.executable, "-m", "tools.launch", "tpu", "logs", "--project=project", "--name=tiny", "--zones", ZONES[0]],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
    )
    assert following.stdout.readline().decode().startswith("host-0-0: ---")
    following.kill()
    assert launch(repository, "stop") == 0
    assert "stopped on 2 host(s)" in capsys.readouterr().out and repository.counts() == [2, 2] and cloud.left()
    assert launch(repository, "up") == 0  # which a person typed after the stop
    started(repository, 3)()
    assert launch(repository, "down") == 0 and not cloud.left()
    assert launch(repository, "down") == 0  # the second `down` has nothing to do


def test_a_user_error_is_reported_before_anything_is_created(repository, cloud):
    for words, message in (
        (["--", "--config=tiny.py", BUCKET], "--project is missing"),
        (["--project=p", "--zones", "mars-a", "--", "--config=tiny.py", BUCKET], "mars-a has no v5e"),
        (["--project=p", "--", "--config=tiny.py"], "checkpoint.folder=gs://BUCKET/FOLDER is missing"),
        (["--project=project", "--", "--config=tiny.py", "--checkpoint.folder=gs://none/x"], "does not exist"),
        (["--project=p", "--hardware=h200:8", "--", "--config=tiny.py", BUCKET], "no TPU"),
        (["--project=p", "--", "--config=tiny.py", BUCKET, "--run_dir=x"], "--run_dir cannot be given"),
        (["--project=p", "--reservation=r", "--", "--config=tiny.py", BUCKET], "needs --capacity=reserved"),
        (["--project=p", "--capacity=flex_start", "--hours=200", "--", "--config=tiny.py", BUCKET], "168 hours"),
    ):
        with pytest.raises(UserError, match=message):
            main(["tpu", "up", f"--hardware={HARDWARE}", *words])
    assert not cloud.asked("create")


@pytest.fixture
def every_command(repository, monkeypatch, tmp_path, capsys) -> list[list[str]]:
    """Return the words of every gcloud command in dry runs for one slice and two. gcloud is not installed there."""
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "git").symlink_to(shutil.which("git"))
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    shown = []
    monkeypatch.setattr("tools.launch.shell.join", lambda words: shown.append(list(words)) or "")
    monkeypatch.setattr("tools.launch.tpu.join", lambda words: shown.append(list(words)) or "")
    for hardware, zone in (("v5e:4x4", "us-west4-a"), ("2x v5e:4x4", "us-west4-a"), ("2x v5p:2x2x2", "us-east5-a")):
        for capacity in ("on_demand", "spot", "reserved", "flex_start"):
            words = ["--project=p", "--zones", zone, f"--capacity={capacity}", "--service_account=a@p", "--dry_run"]
            words += {"spot": NETWORK, "reserved": ["--reservation=r"]}.get(capacity, [])
            assert main(["tpu", "run", f"--hardware={hardware}", *words, "--", "--config=tiny.py", BUCKET]) == 0
    for command in ("status", "logs", "stop", "down"):
        assert main(["tpu", command, "--project=p", "--zones", "us-west4-a", "--name=tiny", "--dry_run"]) == 0
    monkeypatch.undo()
    return shown


def test_a_dry_run_shows_scripts_that_can_be_read(repository, capsys, tmp_path):
    words = [f"--hardware={HARDWARE}", "--project=p", "--zones", "us-west4-a", "--dry_run", "--setup=make 'it so'"]
    assert main(["tpu", "run", *words, "--", "--config=tiny.py", BUCKET]) == 0
    output = capsys.readouterr().out
    assert ".venv/bin/python train.py --config=tiny.py" in output  # unquoted
    for name, start, end in (
        ("prepare", "launch-", "END"),
        ("loop", 'cat > "$here/loop', "LOOP"),
        ("limit", 'cat > "$here/limit.sh', "LIMIT"),
    ):
        script = output.partition(start)[2].partition("#!/bin/bash")[2].partition(f"\n{end}\n")[0]
        (tmp_path / name).write_text(f"#!/bin/bash{script}\n")
        assert subprocess.run(["bash", "-n", tmp_path / name], check=False).returncode == 0
    assert max(line.count("'\"'\"'") for line in output.splitlines()) <= 4  # only the set-up is quoted, once


def test_a_dry_run_shows_every_command_and_needs_no_gcloud(every_command):
    verbs = {words[-4 if words[1] == "storage" else words.index("queued-resources") + 1] for words in every_command}
    assert verbs >= {"create", "scp", "ssh", "delete", "describe"}
    creates = [words for words in every_command if "create" in words]
    assert any(
        {"--node-count=2", "--node-prefix=tiny", "--accelerator-type=v5litepod-16"} <= set(words) for words in creates
    )
    assert any({"alpha", "--type=v5p", "--topology=2x2x2", "--reserved"} <= set(words) for words in creates)
    assert any({"alpha", "--reserved", "--reservation=r"} <= set(words) for words in creates)
    assert any({"--network=n", "--subnetwork=s", "--internal-ips", "--spot"} <= set(words) for words in creates)
    assert any({"ssh", "--tunnel-through-iap"} <= set(words) for words in every_command)
    # Google's own limits: a request expires when nobody waits for it, and flex-start takes slices back.
    assert all("--valid-until-duration=1800s" in words for words in creates)
    limited = [words for words in creates if "--max-run-duration=86400s" in words]
    assert len(limited) == 3 and all({"alpha", "--provisioning-model=flex-start"} <= set(words) for words in limited)


@pytest.mark.slow
def test_gcloud_itself_accepts_every_command(every_command, tmp_path):
    if not shutil.which("gcloud"):
        pytest.skip("gcloud is not installed: `gcloud meta lint-gcloud-commands` did not run")
    without_script = lambda word: "--command=shell" if word.startswith("--command=") else word
    texts = sorted({shlex.join(map(without_script, command)) for command in every_command})
    (tmp_path / "commands").write_text(json.dumps([{"command_string": text} for text in texts]))
    words = ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={tmp_path}/commands"]
    results = json.loads(subprocess.run(words, capture_output=True, text=True, timeout=300, check=False).stdout)
    assert len(results) == len(texts) > 20
    assert not [(each["command_string"], each["error_message"]) for each in results if not each["success"]]
