"""Test launch/tpu_vm.sh with a stand-in for gcloud that records its commands, and run the hosts' script as hosts do."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.launch.stand_in import StandIn, wait_for

# Files in $STORE: `commands`; what was copied to the bucket; `script`, the hosts'; `state` and `names`, for answers.
GCLOUD = """#!/bin/bash
cd "$STORE" || exit
printf '%q ' "$@" >> commands; echo >> commands
for word in "$@"; do case $word in --metadata-from-file=startup-script=*) cp "${word##*=}" script ;; esac; done
case "$*" in
    "storage cp - "*) cat > "bucket.${4##*/}" ;;
    "storage cp gs://"*) cat "bucket.${3##*/}" ;;
    *" describe "*) head -n 1 state; sed -i 1d state ;;
    *" list "*) next=$(head -n 1 names); sed -i 1d names; [ "$next" != fails ] && echo "$next" ;;
    "secrets "*) echo "the s3cret" ;;
    *" delete "*) [ ! -e refuses ] ;;
esac
"""
TOOLS = {  # what a host has: make links this Python as the repository's
    "gcloud": GCLOUD,
    "systemctl": "#!/bin/sh\nexit 0\n",
    "python3": "#!/bin/sh\nexit 0\n",
    "home/.local/bin/uv": "#!/bin/sh\necho python3.12\n",
    "make": f"""#!/bin/sh
echo "$*" >> "$STORE/made"; mkdir -p code/.venv/bin; ln -s {sys.executable} code/.venv/bin/python
""",
}
SETTINGS = {"NAME": "d12", "PROJECT": "p", "ZONE": "us-west4-a", "BUCKET": "gs://b/d12"}
TRAIN = ("--config=tiny.py", "--run_dir=gs://b/d12", "--name=it's $HOME")


class Cloud:
    """The commands of launch/tpu_vm.sh in a repository."""

    def __init__(self, folder: Path) -> None:
        self.repository, self.store, self.home = StandIn(folder / "repository"), folder / "store", folder / "tools/home"
        self.store.mkdir()
        for name, text in TOOLS.items():
            path = folder / "tools" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        path = f"{folder}/tools:{os.environ['PATH']}"
        ours = {
            "TYPE": "v5litepod-16",
            "SERVICE_ACCOUNT": "me@p",
            "RUNTIME": "v2-alpha-tpuv5-lite",
            "PATH": path,
            "STORE": str(self.store),
            "PAUSE": "0",
        }
        self.environment = os.environ | SETTINGS | ours

    def run(self, *words: str, **settings: str) -> subprocess.CompletedProcess:
        command = [self.repository.root / "launch/tpu_vm.sh", *words]
        environment = self.environment | settings
        return subprocess.run(
            command, cwd=self.repository.root, env=environment, capture_output=True, text=True, timeout=60
        )

    def commands(self) -> list[list[str]]:
        path = self.store / "commands"
        return [shlex.split(line) for line in path.read_text().splitlines()] if path.exists() else []

    def deletions(self) -> list[list[str]]:
        return [words for words in self.commands() if "delete" in words]

    def host(self, **settings: str) -> subprocess.Popen:
        """Boot a host: run the script that `create` gave, with this folder for the host's own, then its service."""
        there = self.store.parent / "host"
        (there / "systemd").mkdir(parents=True, exist_ok=True)
        script = (self.store / "script").read_text().replace("/var/lib/tokensum", str(there))
        script = script.replace("/etc/systemd/system", f"{there}/systemd").replace("HOME=/root", f"HOME={self.home}")
        environment = self.environment | settings
        subprocess.run(["bash", "-c", script], env=environment, check=True)
        assert f"ExecStart=/bin/bash {there}/run.sh\n" in (there / "systemd/tokensum.service").read_text()
        self.code = there / "code"
        return subprocess.Popen(["/bin/bash", there / "run.sh"], env=environment, start_new_session=True)

    def starts(self) -> list[str]:
        path = self.code / "starts.0"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def cloud(tmp_path) -> Cloud:
    return Cloud(tmp_path)


def end(host: subprocess.Popen) -> None:
    """Switch the host off."""
    os.killpg(host.pid, 9)
    host.wait()


def test_what_is_committed_is_copied_and_nothing_else(cloud):
    (cloud.repository.root / ".env").write_text("API_KEY=s3cret")
    cloud.repository.plan("0")  # ignored
    assert cloud.run("create", *TRAIN).returncode == 0
    (code,) = cloud.store.glob("bucket.code-*.tar")
    with tarfile.open(code) as archive:
        names = {name for name in archive.getnames() if not name.startswith("launch")}
    assert names == {".gitignore", "train.py"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, {"--spot", "--node-id=d12", "--valid-until-duration=86400s"}),
        ({"CAPACITY": "on-demand", "SLICES": "2", "HOURS": "2"}, {"--node-count=2", "--valid-until-duration=7200s"}),
        ({"CAPACITY": "reserved"}, {"--reserved", "--service-account=me@p"}),
        ({"CAPACITY": "flex-start", "HOURS": "2"}, {"--provisioning-model=flex-start", "--max-run-duration=7200s"}),
    ],
)
def test_slices_are_requested_as_they_are_bought(cloud, settings, words):
    assert cloud.run("create", *TRAIN, **settings).returncode == 0
    create = cloud.commands()[-1]
    assert words | {"--project=p", "--zone=us-west4-a", "--accelerator-type=v5litepod-16"} <= {*create}
    assert ("alpha" in create) == ("--max-run-duration=7200s" in words)


def test_a_mistake_requests_nothing(cloud):
    assert cloud.run("create", "--run_dir=runs/x").returncode == 2
    assert cloud.run("create", *TRAIN, CAPACITY="free").returncode == 2
    assert cloud.run("make").returncode == 2
    assert "TYPE" in cloud.run("create", *TRAIN, TYPE="").stderr
    (cloud.repository.root / "train.py").write_text("changed")
    assert cloud.run("create", *TRAIN).returncode == 2
    assert not cloud.commands()


def test_a_host_sets_itself_up_trains_again_after_a_reboot_and_deletes_the_slices_at_the_end(cloud):
    assert cloud.run("create", *TRAIN, SECRETS="API_KEY", API_KEY="the s3cret").returncode == 0
    host = cloud.host()
    wait_for(lambda: (cloud.code / "launch").exists() and (cloud.store / "made").exists())
    (cloud.code / "plan").write_text("wait wait 42 0")
    wait_for(lambda: len(cloud.starts()) == 1)
    end(host)
    host = cloud.host(PAUSE="0.2")
    wait_for(lambda: len(cloud.starts()) == 2)
    assert not cloud.deletions()
    end(host)
    host = cloud.host()
    wait_for(cloud.deletions)
    end(host)
    assert cloud.starts() == [f"the s3cret {' '.join(TRAIN)}"] * 4
    assert (cloud.store / "made").read_text() == "-C code setup EXTRA=tpu,gcs PYTHON=python3.12\n"
    written = [path for path in cloud.store.parent.rglob("*") if path.is_file() and "tools" not in path.parts]
    assert [path.name for path in written if b"s3cret" in path.read_bytes()] == ["starts.0"]
    before = len(cloud.deletions())
    host = cloud.host()  # rebooted before it was deleted: it asks again, and trains no more
    wait_for(lambda: len(cloud.deletions()) > before)
    end(host)
    assert len(cloud.starts()) == 4 and {"--force", "d12"} <= {*cloud.deletions()[-1]}


def test_the_hosts_delete_the_slices_if_the_run_hangs_or_cannot_be_set_up(cloud):
    assert cloud.run("create", *TRAIN, HOURS="-1").returncode == 0  # the limit has passed
    (cloud.store.parent / "tools/make").write_text("#!/bin/sh\nsleep 600\n")
    host = cloud.host()
    wait_for(lambda: len(cloud.deletions()) > 1)  # again and again, until the host is gone
    end(host)
    assert cloud.run("create", *TRAIN).returncode == 0
    (cloud.store.parent / "tools/make").write_text("#!/bin/sh\nexit 1\n")
    before = len(cloud.deletions())
    host = cloud.host()
    wait_for(lambda: len(cloud.deletions()) > before)
    end(host)
    assert not cloud.starts()


def test_delete_lets_a_host_save_first(cloud):
    assert cloud.run("create", *TRAIN).returncode == 0
    host = cloud.host(PAUSE="600")  # it asks for its own deletion later
    wait_for(lambda: (cloud.code / "launch").exists())
    (cloud.code / "plan").write_text("wait")
    wait_for(cloud.starts)
    cloud.run("delete")
    (stop,) = [words[-1].partition("=")[2] for words in cloud.commands() if "ssh" in words]
    stop = stop.replace("/var/lib/tokensum", str(cloud.code.parent)).replace("sudo ", "")
    subprocess.run(["bash", "-c", stop], check=True, timeout=60)
    wait_for((cloud.code.parent / "over").exists)
    assert "143" in (cloud.code.parent / "over").read_text()
    end(host)


def test_delete_asks_until_no_list_has_the_slices(cloud):
    (cloud.store / "names").write_text("fails\nd12\nfails\nd12\nd12-other\n")
    (cloud.store / "refuses").touch()
    done = cloud.run("delete")
    assert done.returncode == 0 and "d12 is deleted" in done.stdout and "COST MONEY" in done.stderr
    assert len(cloud.deletions()) == 4 and "ssh" in cloud.commands()[0]


def test_wait_ends_with_the_slices_or_the_request(cloud):
    (cloud.store / "state").write_text("WAITING_FOR_RESOURCES\n\nACTIVE\nPROVISIONING\nFAILED\n")
    assert cloud.run("wait").returncode == 0
    assert cloud.run("wait").returncode == 1


@pytest.mark.medium
def test_gcloud_itself_accepts_every_command(cloud):
    if not shutil.which("gcloud"):
        pytest.skip("gcloud is not installed: `gcloud meta lint-gcloud-commands` did not run")
    for settings in ({}, {"SLICES": "2"}, {"CAPACITY": "reserved"}, {"CAPACITY": "flex-start"}):
        cloud.run("create", *TRAIN, **settings)
    (cloud.store / "state").write_text("ACTIVE\nACTIVE\n")
    (cloud.store / "names").write_text("d12\n\n")
    for verb in ("wait", "status", "logs", "delete"):
        cloud.run(verb)
    shell = lambda word: "--command=shell" if word.startswith("--command=") else word
    texts = sorted({" ".join(["gcloud", *map(shell, words)]) for words in cloud.commands()})
    commands = cloud.store / "lint.json"
    commands.write_text(json.dumps([{"command_string": text} for text in texts]))
    words = ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={commands}"]
    results = json.loads(subprocess.run(words, capture_output=True, text=True, timeout=300).stdout)
    assert len(results) == len(texts) > 8
    assert not [(each["command_string"], each["error_message"]) for each in results if not each["success"]]
