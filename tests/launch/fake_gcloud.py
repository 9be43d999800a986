"""A stand-in for gcloud's queued resources, whose hosts are folders and whose ssh runs local processes.

What it knows lies in the folder FAKE_GCLOUD. `plan` tells, for each zone, how each request in turn ends: `active`,
`stockout` (FAILED), `waits` (WAITING_FOR_RESOURCES for ever) or `refused`. A request goes on by a state whenever it is
described. As gcloud does, ssh runs a command again whose connection broke, and ends with 255 where it keeps breaking.

    breaks    so many times a connection breaks after the command has run
    deaf      so many times ssh ends with 255 without having run anything
    refuses   so many times a deletion is refused
    denied    so many times nothing is told of a resource
    workers   the hosts of a slice; 2 unless it is there
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

HOME = Path(os.environ["FAKE_GCLOUD"])
STEPS = ["ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]


def counted(name: str) -> bool:
    """Whether this is one of the times that are set for `name`."""
    path = HOME / name
    left = int(path.read_text()) if path.exists() else 0
    if left:
        path.write_text(str(left - 1))
    return left > 0


def fail(text: str, code: int = 1) -> int:
    print(f"ERROR: (gcloud) {text}", file=sys.stderr)
    return code


def options(words: list[str]) -> dict[str, str]:
    return dict(re.fullmatch(r"--([a-z-]+)=?(.*)", word, re.DOTALL).groups() for word in words if word.startswith("--"))


def resource(name: str, zone: str) -> Path:
    return HOME / "resources" / zone / name


def update(path: Path, **facts) -> dict:
    known = (json.loads((path / "facts").read_text()) if (path / "facts").exists() else {}) | facts
    if not facts:  # nothing to write, which could undo what another process writes meanwhile
        return known
    path.mkdir(parents=True, exist_ok=True)
    (path / "fresh").write_text(json.dumps(known))
    (path / "fresh").rename(path / "facts")
    return known


def create(path: Path, given: dict[str, str]) -> int:
    if path.exists():
        return fail(f"ALREADY_EXISTS: Resource {path.name} already exists")
    plan = json.loads((HOME / "plan").read_text())
    turns = plan.get(given["zone"]) or ["refused"]
    plan[given["zone"]] = turns[1:] or turns
    (HOME / "plan").write_text(json.dumps(plan))
    if turns[0] == "refused":
        return fail("PERMISSION_DENIED: quota exceeded for this zone")
    update(path, state="CREATING", ends=turns[0], nodes=int(given.get("node-count", 1)))
    return 0


def describe(path: Path) -> int:
    if counted("denied"):
        return fail("PERMISSION_DENIED: project not found, or no permission")
    if not path.exists():
        return fail(f"NOT_FOUND: Resource {path.name} was not found")
    facts = update(path)
    if facts["state"] in ("CREATING", *STEPS[:-1]):
        ends = {"active": "ACTIVE", "stockout": "FAILED", "waits": "WAITING_FOR_RESOURCES"}[facts["ends"]]
        now = STEPS.index(facts["state"]) if facts["state"] in STEPS else -1
        reached = facts["state"] == "WAITING_FOR_RESOURCES" and ends != "ACTIVE"
        facts = update(path, state=ends if reached else STEPS[now + 1])
    print(json.dumps({"name": path.name, "state": {"state": facts["state"]}}))
    return 0


def processes_in(folder: Path) -> list[int]:
    """Every process whose working folder lies there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "cwd").readlink().is_relative_to(folder):
                found.append(int(entry.name))
    return found


def take(path: Path, state: str = "SUSPENDED") -> None:
    """The machines are gone, with all that ran on them."""
    update(path, state=state)
    take_hosts(path, "host-")


def take_hosts(path: Path, name: str) -> None:
    """The hosts whose names begin so are gone, disks first, at once: a command that arrives meanwhile finds an empty
    disk."""
    lost = Path(tempfile.mkdtemp(dir=HOME))
    for host in path.glob(f"{name}*"):
        host.rename(lost / host.name)
    while running := processes_in(lost):
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(lost, ignore_errors=True)


def delete(path: Path, given: dict[str, str]) -> int:
    if not path.exists():
        return fail("NOT_FOUND: it was not found")
    if counted("refuses"):
        return fail("INTERNAL: the resource could not be deleted")
    if update(path)["state"] == "ACTIVE" and "force" not in given:
        return fail("FAILED_PRECONDITION: it has nodes")
    take(path, "DELETING")
    shutil.rmtree(path)
    return 0


def hosts(path: Path, given: dict[str, str]) -> list[Path]:
    nodes = range(update(path)["nodes"]) if given["node"] == "all" else [int(given["node"])]
    many = int((HOME / "workers").read_text()) if (HOME / "workers").exists() else 2
    workers = range(many) if given["worker"] == "all" else [int(given["worker"])]
    found = [path / f"host-{node}-{worker}" for node in nodes for worker in workers]
    for host in found:
        (host / "bin").mkdir(parents=True, exist_ok=True)
        (host / "bin" / "hostname").write_text(f"#!/bin/sh\necho {host.name}\n")
        (host / "bin" / "hostname").chmod(0o755)
    return found


def ssh(path: Path, given: dict[str, str]) -> int:
    if not path.exists() or update(path)["state"] != "ACTIVE":
        return fail("the node is not there")
    if counted("deaf"):
        return fail("[ssh] exited with return code [255]", 255)
    code = 0
    for number, host in enumerate(hosts(path, given)):
        environment = os.environ | {"HOME": str(host), "STAND_IN_PROCESS": str(number)}
        environment["PATH"] = f"{host}/bin:{os.environ['PATH']}"
        for _ in range(10):
            done = subprocess.run(["bash", "-c", given["command"]], cwd=host, env=environment, stdin=subprocess.DEVNULL)
            code = code or done.returncode
            if not counted("breaks"):
                break
    return code


def scp(path: Path, words: list[str], given: dict[str, str]) -> int:
    source, target = [word for word in words if not word.startswith("--")]
    if not path.exists() or update(path)["state"] != "ACTIVE":
        return fail("the node is not there")
    for host in hosts(path, given):
        if source.startswith(f"{path.name}:"):
            shutil.copytree(host / source.split(":")[1], target)
        else:
            shutil.copy(source, host / target.split(":")[1])
    return 0


def main(words: list[str]) -> int:
    with (HOME / "log").open("a") as log:
        print(json.dumps(words), file=log)
    if words[:2] == ["storage", "cp"]:
        return fail("404: the bucket does not exist") if "gs://none" in words[3] else 0
    words = words[1:] if words[0] == "alpha" else words
    assert words[:3] == ["compute", "tpus", "queued-resources"]
    verb, words = words[3], words[4:]
    given = options(words)
    assert given["project"] == "project" and "quiet" in given
    name = next(word.split(":")[0] for word in words if re.fullmatch(r"[a-z][a-z0-9-]*(:.*)?", word))
    path = resource(name, given["zone"])
    if verb == "scp":
        return scp(path, words, given)
    verbs = {"create": create, "delete": delete, "ssh": ssh}
    return verbs[verb](path, given) if verb in verbs else {"describe": describe}[verb](path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
