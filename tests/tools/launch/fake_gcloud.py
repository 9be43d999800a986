"""Imitate gcloud's queued resources: hosts are folders, and ssh runs local processes.

State is in the folder FAKE_GCLOUD. For each zone, `plan` lists how its requests end: `active`, `stockout` (FAILED),
`waits` (WAITING_FOR_RESOURCES forever) or `refused`. A request moves on by one state each time it is described. As with
gcloud, ssh repeats a command if its connection broke, and ends with 255 if it keeps breaking. These files hold counts:

    breaks    connections that break after the command has run
    deaf      ssh calls that end with 255 and run nothing
    refuses   deletions that are refused
    stalls    ssh and scp calls that never return
    expired   commands that fail because the credentials have expired
    failing   set-ups that fail on one host
    slow      descriptions as DELETING after a deletion

`closed` names a zone that the project may not use. If `oslogin` exists, users log in under their local name.

With ssh, a command gets LAUNCH_ROOT for what the users of a host share. gs://bucket is the folder `bucket`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

HOME = Path(os.environ.get("FAKE_GCLOUD", ""))  # none if tests import this
STEPS = ["ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]


def counted(name: str) -> bool:
    """Use up one of the times that are set for `name`; return False if none is left."""
    path = HOME / name
    left = int(path.read_text()) if path.exists() else 0
    if left:  # always a complete number, since tests read and write it too
        path.with_suffix(".new").write_text(str(left - 1))
        path.with_suffix(".new").rename(path)
    return left > 0


def fail(text: str, code: int = 1) -> int:
    print(f"ERROR: (gcloud) {text}", file=sys.stderr)
    return code


def options(words: list[str]) -> dict[str, str]:
    return dict(re.fullmatch(r"--([a-z-]+)=?(.*)", word, re.DOTALL).groups() for word in words if word.startswith("--"))


def update(path: Path, **facts) -> dict:
    known = (json.loads((path / "facts").read_text()) if (path / "facts").exists() else {}) | facts
    if not facts:  # nothing to write: it could undo another process's write
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
    closed = HOME / "closed"
    if closed.exists() and closed.read_text() == path.parent.name:
        return fail(f"PERMISSION_DENIED: Permission denied on 'locations/{path.parent.name}' (or it may not exist).")
    if not path.exists():
        return fail(f"NOT_FOUND: Resource {path.name} was not found")
    facts = update(path)
    if facts["state"] == "DELETING" and not counted("slow"):
        shutil.rmtree(path)
        return fail(f"NOT_FOUND: Resource {path.name} was not found")
    if facts["state"] in ("CREATING", *STEPS[:-1]):
        ends = {"active": "ACTIVE", "stockout": "FAILED", "waits": "WAITING_FOR_RESOURCES"}[facts["ends"]]
        now = STEPS.index(facts["state"]) if facts["state"] in STEPS else -1
        reached = facts["state"] == "WAITING_FOR_RESOURCES" and ends != "ACTIVE"
        facts = update(path, state=ends if reached else STEPS[now + 1])
    print(json.dumps({"name": path.name, "state": {"state": facts["state"]}}))
    return 0


def kill_in(folder: Path) -> None:
    """Kill every process whose working folder is there, and wait until all have ended: they keep locks until then."""
    alive = True
    while alive:
        alive = False
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (entry / "cwd").readlink().is_relative_to(folder):
                    alive = True
                    os.kill(int(entry.name), signal.SIGKILL)


def take(path: Path, state: str = "SUSPENDED") -> None:
    """Remove the machines, with all that runs on them."""
    update(path, state=state)
    take_hosts(path, "host-")


def take_hosts(path: Path, name: str) -> None:
    """Remove the hosts whose names start with `name` at once, disks first: a command that arrives meanwhile finds an
    empty disk."""
    lost = Path(tempfile.mkdtemp(dir=path.parent))
    for host in path.glob(f"{name}*"):
        host.rename(lost / host.name)
    kill_in(lost)
    shutil.rmtree(lost, ignore_errors=True)


def delete(path: Path, given: dict[str, str]) -> int:
    if not path.exists():
        return fail("NOT_FOUND: it was not found")
    if counted("refuses"):
        return fail("INTERNAL: the resource could not be deleted")
    if update(path)["state"] == "ACTIVE" and "force" not in given:
        return fail("FAILED_PRECONDITION: it has nodes")
    assert "async" in given
    take(path, "DELETING")
    return 0


def hosts(path: Path, given: dict[str, str]) -> list[Path]:
    nodes = range(update(path)["nodes"]) if given["node"] == "all" else [int(given["node"])]
    workers = range(2) if given["worker"] == "all" else [int(given["worker"])]
    result = [path / f"host-{node}-{worker}" for node in nodes for worker in workers]
    for host in result:
        (host / "bin").mkdir(parents=True, exist_ok=True)
        (host / "bin" / "hostname").write_text(f"#!/bin/sh\necho {host.name}\n")
        (host / "bin" / "hostname").chmod(0o755)
    return result


def home(host: Path, words: list[str]) -> Path:
    """Return the home folder of the user who logs in."""
    asked = next((word.split("@")[0] for word in words if "@" in word and not word.startswith("--")), "")
    user = os.environ.get("USER", "root") if (HOME / "oslogin").exists() or not asked else asked
    (host / f"home-{user}").mkdir(exist_ok=True)
    return host / f"home-{user}"


def ssh(path: Path, words: list[str], given: dict[str, str]) -> int:
    if counted("deaf"):
        return fail("[ssh] exited with return code [255]", 255)
    code = 0
    if "/launch-" in given["command"] and counted("failing"):
        return fail("pip: connection reset", 1)
    for number, host in enumerate(hosts(path, given)):
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIVEN_")}
        environment = own | {"HOME": str(home(host, words)), "STAND_IN_PROCESS": str(number)}
        environment |= {"PATH": f"{host}/bin:{os.environ['PATH']}", "LAUNCH_ROOT": str(host / "var")}
        for _ in range(10):
            done = subprocess.run(["bash", "-c", given["command"]], cwd=host, env=environment, stdin=subprocess.DEVNULL)
            code = code or done.returncode
            if not counted("breaks"):
                break
    return code


def scp(path: Path, words: list[str], given: dict[str, str]) -> int:
    source, target = [word for word in words if not word.startswith("--")]
    for host in hosts(path, given):
        end = (source if ":" in source else target).split(":")[1]
        there = home(host, words) / end.replace("/var/tmp/tokensum", str(host / "var"))
        if ":" in source:
            shutil.copytree(there, target)
        else:
            shutil.copy(source, there)
    return 0


def main(words: list[str]) -> int:
    with (HOME / "log").open("a") as log:
        print(json.dumps(words), file=log)
    if counted("expired"):
        return fail("There was a problem refreshing your current auth tokens: invalid_grant: Bad Request")
    if words[:2] == ["storage", "cp"]:
        source, target = [word for word in words[2:] if not word.startswith("--")]
        if target.startswith("gs://none"):
            return fail("404: the bucket does not exist")
        there = HOME / target.removeprefix("gs://")
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes())
        return 0
    words = words[1:] if words[0] == "alpha" else words
    assert words[:3] == ["compute", "tpus", "queued-resources"]
    verb, words = words[3], words[4:]
    given = options(words)
    assert given["project"] == "project" and "quiet" in given
    name = next(m[1] for word in words if (m := re.fullmatch(r"(?:[a-z]+@)?([a-z][a-z0-9-]*)(?::.*)?", word)))
    path = HOME / "resources" / given["zone"] / name
    if verb in ("scp", "ssh"):
        if not path.exists() or update(path)["state"] != "ACTIVE":
            return fail("the node is not there")
        if counted("stalls"):
            time.sleep(600)
        return {"scp": scp, "ssh": ssh}[verb](path, words, given)
    return describe(path) if verb == "describe" else {"create": create, "delete": delete}[verb](path, given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
