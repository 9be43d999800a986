"""Cloud TPU's queued resources, through gcloud: asked for, waited for, reached by ssh, and deleted for certain.

States are those of the API (QueuedResourceState): CREATING, ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING, ACTIVE,
SUSPENDING, SUSPENDED (its machines are gone), FAILED, DELETING. Every command is accepted by
`gcloud meta lint-gcloud-commands` of Google Cloud SDK 528.
"""

import json
import os
import time
from dataclasses import dataclass
from typing import Literal

from configs.schema import UserError
from launch.hardware import Hardware
from launch.shell import Shell, say, warn

Capacity = Literal["on_demand", "spot", "reserved"]
GONE = "GONE"
OVER = ("FAILED", "SUSPENDING", "SUSPENDED", "DELETING", GONE)
"""States from which none becomes ACTIVE again."""
TRIES = 5  # of an ssh that breaks, beyond gcloud's own ten, and of a deletion that is refused


def pause(times: float = 1) -> None:
    """Waits between two questions: 20 s, or LAUNCH_PAUSE."""
    time.sleep(times * float(os.environ.get("LAUNCH_PAUSE", "20")))


@dataclass(frozen=True)
class Slices:
    """The queued resource of a job in one zone."""

    shell: Shell
    name: str
    project: str
    zone: str

    def words(self, *words: str, track: tuple[str, ...] = ()) -> list[str]:
        where = [f"--project={self.project}", f"--zone={self.zone}", "--quiet"]
        return ["gcloud", *track, "compute", "tpus", "queued-resources", *words, *where]

    def create(self, hardware: Hardware, capacity: Capacity, service_account: str) -> None:
        """Asks for the slices. One of that name that is there already is as good."""
        facts, track = hardware.facts, ()
        if facts["dimensions"] == 3:  # several shapes have as many chips
            shape, track = [f"--type={facts['type']}", f"--topology={hardware.topology}"], ("alpha",)
        else:
            shape = [f"--accelerator-type={facts['type']}-{hardware.devices_per_group * facts['units_per_chip']}"]
        many = hardware.groups > 1
        nodes = (
            [f"--node-count={hardware.groups}", f"--node-prefix={self.name}"] if many else [f"--node-id={self.name}"]
        )
        words = ["create", self.name, *shape, f"--runtime-version={facts['runtime']}", *nodes]
        words += [] if capacity == "on_demand" else [f"--{capacity}"]
        words += [f"--service-account={service_account}"] if service_account else []
        done = self.shell.change(self.words(*words, track=track), check=False)
        if done.returncode and "ALREADY_EXISTS" not in done.stderr:
            raise UserError(f"{self.zone} does not take the request: {done.stderr.strip()[-500:]}")

    def state(self) -> str:
        """Its state, or GONE. UserError where gcloud fails for another reason, several times."""
        for attempt in range(TRIES):
            done = self.shell.ask(self.words("describe", self.name, "--format=json"), check=False)
            if done.returncode == 0:
                return json.loads(done.stdout).get("state", {}).get("state", "STATE_UNSPECIFIED")
            if "NOT_FOUND" in done.stderr and self.name in done.stderr:  # and not: the project is not found
                return GONE
            pause(attempt / TRIES)
        raise UserError(f"gcloud cannot describe {self.name} in {self.zone}: {done.stderr.strip()[-500:]}")

    def wait(self, seconds: float) -> str:
        """Waits until it is ACTIVE, or can no longer become so, or so long. Returns its state."""
        deadline, last = time.time() + seconds, ""
        while True:
            state = self.state()
            if state != last:
                say(f"{self.name} in {self.zone}: {state}")
                last = state
            if state == "ACTIVE" or state in OVER or time.time() > deadline:
                return state
            pause()

    def delete(self) -> None:
        """Deletes it with its machines, and sees that it is gone. UserError where it is not: it may cost money."""
        for attempt in range(TRIES):
            done = self.shell.change(self.words("delete", self.name, "--force"), check=False)
            if self.shell.dry_run or self.state() == GONE:
                return
            warn(f"{self.name} in {self.zone} is not deleted yet: {done.stderr.strip()[-300:]}")
            pause(attempt + 1)
        raise UserError(
            f"{self.name} in {self.zone} could not be deleted and MAY COST MONEY: "
            f"python -m launch tpu down --project={self.project} --zones {self.zone} --name={self.name}"
        )

    def ssh(self, command: str, check: bool = True) -> tuple[int, str]:
        """Runs a command on every host, again where the connection breaks (255). Returns its code and what it said.
        UserError where it fails, unless `check` is False."""
        words = self.words("ssh", self.name, "--node=all", "--worker=all", f"--command={command}")
        for attempt in range(TRIES):
            done = self.shell.change(words, check=False)
            if done.returncode != 255:
                break
            pause(attempt + 1)
        if check and done.returncode:
            said = (done.stdout + done.stderr).strip()[-1500:]
            raise UserError(f"a command on the hosts of {self.name} ended with {done.returncode}: {said}")
        return done.returncode, done.stdout

    def copy(self, source: str, target: str, everywhere: bool = True) -> int:
        """Copies a file to every host, or a folder from the first. Returns gcloud's code."""
        which = ["--node=all", "--worker=all"] if everywhere else ["--node=0", "--worker=0", "--recurse"]
        for attempt in range(TRIES):
            done = self.shell.change(self.words("scp", source, target, *which), check=False)
            if done.returncode == 0:
                break
            pause(attempt + 1)
        return done.returncode
