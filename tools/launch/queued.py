"""Cloud TPU's queued resources, through gcloud: asked for, waited for, reached by ssh, and deleted for certain.

Every command is accepted by `gcloud meta lint-gcloud-commands` of Google Cloud SDK 528. Each is asked once, within a
time limit: Trouble is what it did not answer, and the caller tries again.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tools.launch.hardware import Hardware
from tools.launch.host_scripts import USER
from tools.launch.shell import Denied, Shell, Trouble, patient, pause, say, warn

Capacity = Literal["on_demand", "spot", "reserved", "flex_start"]
GONE = "GONE"
STATES = {
    "CREATING": "waits",
    "ACCEPTED": "waits",
    "WAITING_FOR_RESOURCES": "waits",
    "PROVISIONING": "waits",
    "ACTIVE": "active",
    "FAILED": "over",
    "SUSPENDING": "over",
    "SUSPENDED": "over",
    "DELETING": "over",
    GONE: "gone",
}
"""What the API's states (QueuedResourceState) mean: `waits` for machines, has them (`active`), will have none any more
(`over`), or is not there, which is no state of the API's."""
ANSWER, COPY, SET_UP = 120, 600, 3600  # seconds that a question, a copy and a set-up on the hosts may take


@dataclass(frozen=True)
class Network:
    """How the hosts are reached."""

    network: str = ""
    subnetwork: str = ""
    internal_ips: bool = False
    tunnel_through_iap: bool = False

    @property
    def of_hosts(self) -> list[str]:
        """Options of `create`."""
        words = [f"--network={self.network}"] * bool(self.network) + ["--internal-ips"] * self.internal_ips
        return words + [f"--subnetwork={self.subnetwork}"] * bool(self.subnetwork)

    @property
    def of_ssh(self) -> list[str]:
        """Options of `ssh` and `scp`."""
        return ["--tunnel-through-iap"] if self.tunnel_through_iap else ["--internal-ip"] * self.internal_ips


@dataclass(frozen=True)
class Slices:
    """The queued resource of a job in one zone."""

    shell: Shell
    name: str
    project: str
    zone: str
    network: Network = Network()

    def words(self, verb: str, *words: str, track: tuple[str, ...] = ()) -> list[str]:
        where = [f"--project={self.project}", f"--zone={self.zone}", "--quiet"]
        return ["gcloud", *track, "compute", "tpus", "queued-resources", verb, *words, *where]

    def create(
        self,
        hardware: Hardware,
        capacity: Capacity,
        wait: float,
        run: float,
        service_account: str = "",
        reservation: str = "",
    ) -> None:
        """Asks for the slices, which Google is not to give later than `wait` seconds from now; with flex_start, it
        deletes them after `run` seconds. One of that name that is there already is as good. Trouble where the zone
        does not take the request."""
        facts, track = hardware.facts, ()
        if facts["dimensions"] == 3:  # several shapes have as many chips
            shape, track = [f"--type={facts['type']}", f"--topology={hardware.topology}"], ("alpha",)
        else:
            shape = [f"--accelerator-type={facts['type']}-{hardware.devices_per_group * facts['units_per_chip']}"]
        many = hardware.groups > 1
        nodes = (
            [f"--node-count={hardware.groups}", f"--node-prefix={self.name}"] if many else [f"--node-id={self.name}"]
        )
        words = [self.name, *shape, f"--runtime-version={facts['runtime']}", *nodes, *self.network.of_hosts]
        words += [f"--valid-until-duration={max(1, round(wait))}s"]
        if capacity == "flex_start":  # the only one for which the API takes a limit
            words += ["--provisioning-model=flex-start", f"--max-run-duration={max(1, round(run))}s"]
        elif capacity != "on_demand":
            words += [f"--{capacity}"]
        words += [f"--service-account={service_account}"] if service_account else []
        words += [f"--reservation={reservation}"] if reservation else []
        track = ("alpha",) if reservation or capacity == "flex_start" else track
        done = self.shell.change(self.words("create", *words, track=track), check=False, seconds=COPY)
        if done.returncode and "ALREADY_EXISTS" not in done.stderr:
            raise Trouble(f"{self.zone} does not take the request: {done.stderr.strip()[-500:]}")

    def state(self) -> str:
        """Its state, a key of STATES. Denied where this project may not look there, Trouble where gcloud fails."""
        done = self.shell.ask(self.words("describe", self.name, "--format=json"), check=False, seconds=ANSWER)
        if "NOT_FOUND" in done.stderr and self.name in done.stderr:  # and not: the project is not found
            return GONE
        try:
            state = json.loads(done.stdout)["state"]["state"]
        except (ValueError, KeyError, TypeError):
            state = ""
        if state in STATES:
            return state
        error = Denied if "PERMISSION_DENIED" in done.stderr else Trouble
        raise error(f"gcloud cannot describe {self.name} in {self.zone}: {(done.stderr.strip() or state)[-500:]}")

    def wait(self, until: float) -> str:
        """Waits until it is ACTIVE, or can no longer become so, or until then. Returns the last state that was seen."""
        last = ""
        while True:
            try:
                state = self.state()
            except Trouble as trouble:
                warn(str(trouble))
                state = last
            if state != last:
                say(f"{self.name} in {self.zone}: {state}")
                last = state
            if STATES.get(state, "waits") != "waits" or time.time() > until:
                return state
            time.sleep(pause())

    def delete(self, before: Callable[["Slices"], None]) -> None:
        """Asks for its deletion with its machines, with `before` done first where they are there. Trouble while it is
        not gone."""
        state = "ACTIVE" if self.shell.dry_run else self.state()
        if state not in (GONE, "DELETING"):
            if state == "ACTIVE":
                before(self)
            words = self.words("delete", self.name, "--force", "--async")
            done = self.shell.change(words, check=False, seconds=ANSWER)
            state = GONE if self.shell.dry_run else self.state()
            if state not in (GONE, "DELETING"):
                raise Trouble(f"{self.name} in {self.zone} is not deleted: {done.stderr.strip()[-300:]}")
        if state != GONE:
            raise Trouble(f"{self.name} in {self.zone} is {state}")

    def ssh(self, command: str, seconds: float = ANSWER) -> tuple[int, str]:
        """Runs a command on every host. Returns its code, and what it said: of some hosts, where others stall."""
        words = ["ssh", f"{USER}@{self.name}", "--node=all", "--worker=all", f"--command={command}"]
        done = self.shell.change(self.words(*words, *self.network.of_ssh), check=False, seconds=seconds)
        if done.returncode:
            warn(f"a command on the hosts of {self.name} ended with {done.returncode}: {done.stderr.strip()[-1500:]}")
        return done.returncode, done.stdout

    def copy(self, source: str, target: str, everywhere: bool = True) -> None:
        """Copies a file to every host, or a folder from the first. A host's path begins with ":". Trouble where it
        fails."""
        which = ["--node=all", "--worker=all"] if everywhere else ["--node=0", "--worker=0", "--recurse"]
        ends = [f"{USER}@{self.name}{end}" if end.startswith(":") else end for end in (source, target)]
        done = self.shell.change(self.words("scp", *ends, *which, *self.network.of_ssh), check=False, seconds=COPY)
        if done.returncode:
            raise Trouble(f"{source} could not be copied to {target}: {done.stderr.strip()[-500:]}")


def delete_all(
    places: Sequence[Slices], before: Callable[[Slices], None] = lambda slices: None, until: float = math.inf
) -> None:
    """Deletes what is there, zone after zone, again and again until all is gone; `before` is done first with what is
    ACTIVE. Trouble at `until`, if it is not gone."""
    left = list(places)
    for attempt in patient(until):
        with attempt:
            said = []
            for slices in list(left):
                try:
                    slices.delete(before)
                    left.remove(slices)
                except Trouble as trouble:
                    said.append(
                        f"{trouble}. Until it is gone it MAY COST MONEY: python -m tools.launch tpu down "
                        f"--project={slices.project} --zones {slices.zone} --name={slices.name}"
                    )
            if said:
                raise Trouble("\n".join(said))
