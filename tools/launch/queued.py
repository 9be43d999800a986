"""Request Cloud TPU's queued resources through gcloud, wait for them, reach them by ssh, and delete them for certain.

`gcloud meta lint-gcloud-commands` of Google Cloud SDK 528 accepts every command. Each runs once, within a time limit.
If it does not answer, it raises Trouble, and the caller retries.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.schema import Positive, UserError
from tools.launch import host_scripts
from tools.launch.job import Hardware, TimedOptions
from tools.launch.shell import Denied, Shell, Trouble, ask, patient, pause, say, warn

GONE = "GONE"
STATES = {
    **dict.fromkeys(("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING"), "waits"),
    "ACTIVE": "active",
    **dict.fromkeys(("FAILED", "SUSPENDING", "SUSPENDED", "DELETING"), "over"),
    GONE: "gone",
}
"""Meaning of the API's states (QueuedResourceState): it `waits` for machines, has them (`active`), will have none any
more (`over`), or does not exist, which is no state of the API's."""
ANSWER, COPY, SET_UP = 120, 600, 3600  # seconds that a query, a copy and a set-up on the hosts may take


@dataclass(frozen=True)
class TpuOptions(TimedOptions):
    """Options of `python -m tools.launch tpu`."""

    project: str = ""
    """The Google Cloud project."""
    zones: tuple[str, ...] = ()
    """Zones in order of preference: --zones us-east5-a us-east5-b. Empty: all in tools/launch/catalog.toml."""
    capacity: Literal["on_demand", "spot", "reserved", "flex_start"] = "on_demand"
    """How the slices are bought. A `spot` slice may be taken away at any time. `flex_start` waits in a queue, and
    Google itself deletes the slices after `hours`, 168 at most."""
    reservation: str = ""
    """The reservation to take the slices from, with --capacity=reserved; empty: any that fits."""
    service_account: str = ""
    """The account that hosts act as, which may write to the bucket; empty: the project's default."""
    network: str = ""
    """The hosts' VPC network; empty: `default`."""
    subnetwork: str = ""
    """The hosts' subnetwork; empty: the network's own of that region."""
    internal_ips: bool = False
    """Hosts without external addresses. This machine must be in their network, or take --tunnel_through_iap."""
    tunnel_through_iap: bool = False
    """Reach the hosts through Identity-Aware Proxy."""
    wait_minutes: Positive[float] = 30.0
    """Minutes to wait for a zone before the next one."""
    hours: Positive[float] = 24.0
    """Hours after which the run saves and ends; `run` then deletes everything."""
    save_minutes: Positive[float] = 60.0
    """Minutes that a stopped run may take to save before its slices are deleted anyway."""
    setup: str = ""
    """The command that makes .venv in the code's folder on each host; empty: `make setup` with a Python from uv."""


@dataclass(frozen=True)
class Slices:
    """Manage the queued resource of a job in one zone."""

    shell: Shell
    name: str
    zone: str
    options: TpuOptions

    def words(self, verb: str, *words: str, alpha: bool = False) -> list[str]:
        """Return a command of gcloud's."""
        place = [f"--project={self.options.project}", f"--zone={self.zone}", "--quiet"]
        return ["gcloud", *["alpha"] * alpha, "compute", "tpus", "queued-resources", verb, *words, *place]

    def create(self, hardware: Hardware, deadline: float) -> None:
        """Request the slices, until the time that this waits for them; with flex_start, Google deletes them at the
        deadline. An existing resource of that name counts. Raise Trouble if the zone does not take the request."""
        facts, options, left = hardware.facts, self.options, deadline - time.time()
        flex, several, cube = options.capacity == "flex_start", hardware.slices > 1, facts["dimensions"] == 3
        chips = hardware.chips_inside * facts["units_per_chip"]
        given = {
            "type": facts["type"] if cube else "",  # several shapes have as many chips
            "topology": hardware.shape if cube else "",
            "accelerator-type": "" if cube else f"{facts['type']}-{chips}",
            "runtime-version": facts["runtime"],
            "node-count": str(hardware.slices) if several else "",
            "node-prefix": self.name if several else "",
            "node-id": "" if several else self.name,
            "valid-until-duration": f"{max(1, round(min(60 * options.wait_minutes, left)))}s",
            # The only capacity for which the API takes a limit.
            "provisioning-model": "flex-start" if flex else "",
            "max-run-duration": f"{max(1, round(left))}s" if flex else "",
            "network": options.network,
            "subnetwork": options.subnetwork,
            "service-account": options.service_account,
            "reservation": options.reservation,
        }
        words = [f"--{option}={value}" for option, value in given.items() if value]
        words += ["--internal-ips"] * options.internal_ips
        words += [f"--{options.capacity}"] * (options.capacity in ("spot", "reserved"))
        alpha = cube or flex or bool(options.reservation)
        done = self.shell.run(self.words("create", self.name, *words, alpha=alpha), check=False, seconds=COPY)
        if done.returncode and "ALREADY_EXISTS" not in done.stderr:
            raise Trouble(f"{self.zone} does not take the request: {done.stderr.strip()[-500:]}")

    def state(self) -> str:
        """Return its state, a key of STATES. Denied if this project may not read the zone, Trouble if gcloud fails."""
        done = ask(self.words("describe", self.name, "--format=json"), check=False, seconds=ANSWER)
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
        """Wait until it is ACTIVE, can no longer become so, or `until` has passed. Return the last known state."""
        last = ""
        while True:
            state = last
            try:
                state = self.state()
            except Trouble as trouble:
                warn(str(trouble))
            if state != last:
                say(f"{self.name} in {self.zone}: {state}")
                last = state
            if STATES.get(state, "waits") != "waits" or time.time() > until:
                return state
            time.sleep(pause())

    def delete(self, before: Callable[["Slices"], None]) -> None:
        """Request its deletion with its machines, after `before` if they are there. Raise Trouble while it is not
        gone."""
        state = "ACTIVE" if self.shell.dry_run else self.state()
        if state not in (GONE, "DELETING"):
            if state == "ACTIVE":
                before(self)
            words = self.words("delete", self.name, "--force", "--async")
            done = self.shell.run(words, check=False, seconds=ANSWER)
            state = GONE if self.shell.dry_run else self.state()
            if state not in (GONE, "DELETING"):
                raise Trouble(f"{self.name} in {self.zone} is not deleted: {done.stderr.strip()[-300:]}")
        if state != GONE:
            raise Trouble(f"{self.name} in {self.zone} is {state}")

    def ssh_words(self, command: str) -> list[str]:
        """Return the words that run a command on every host."""
        ends = [f"{host_scripts.USER}@{self.name}", "--node=all", "--worker=all", f"--command={command}"]
        return self.words("ssh", *ends, *self.way)

    @property
    def way(self) -> list[str]:
        """Return the options of `ssh` and `scp` to reach the hosts."""
        if self.options.tunnel_through_iap:
            return ["--tunnel-through-iap"]
        return ["--internal-ip"] * self.options.internal_ips

    def ssh(self, command: str, seconds: float = ANSWER) -> tuple[int, str]:
        """Run a command on every host. Return its code and output, of some hosts if others stall."""
        done = self.shell.run(self.ssh_words(command), check=False, seconds=seconds)
        if done.returncode:
            warn(f"a command on the hosts of {self.name} ended with {done.returncode}: {done.stderr.strip()[-1500:]}")
        return done.returncode, done.stdout

    def copy(self, source: str, target: str, everywhere: bool = True) -> None:
        """Copy a file to every host, or a folder from the first. A host's path begins with ":". Raise Trouble if it
        fails."""
        which = ["--node=all", "--worker=all"] if everywhere else ["--node=0", "--worker=0", "--recurse"]
        ends = [f"{host_scripts.USER}@{self.name}{end}" if end.startswith(":") else end for end in (source, target)]
        done = self.shell.run(self.words("scp", *ends, *which, *self.way), check=False, seconds=COPY)
        if done.returncode:
            raise Trouble(f"{source} could not be copied to {target}: {done.stderr.strip()[-500:]}")


def delete_all(
    places: Sequence[Slices], before: Callable[[Slices], None] = lambda slices: None, until: float = math.inf
) -> None:
    """Delete the resources, zone after zone, until all are gone; call `before` first with those that are ACTIVE. Raise
    Trouble at `until`, if one is not gone."""
    left = list(places)
    for attempt in patient(until):
        with attempt:
            failures = []
            for slices in list(left):
                try:
                    slices.delete(before)
                    left.remove(slices)
                except Trouble as trouble:
                    failures.append(
                        f"{trouble}. Until it is gone it MAY COST MONEY: python -m tools.launch tpu down "
                        f"--project={slices.options.project} --zones {slices.zone} --name={slices.name}"
                    )
            if failures:
                raise Trouble("\n".join(failures))


def states_of(slices: Slices) -> dict[str, tuple[str, str]]:
    """Return the state of each host that answers: none, idle, running, or ended, with its exit code."""
    _, text = slices.ssh(host_scripts.state(slices.name))
    lines = re.findall(r"^(\S+) (none|idle|running|ended)(?: (\d+))?$", text, re.MULTILINE)
    return {host: (state, code) for host, state, code in lines}


def fetch(slices: Slices) -> None:
    """Bring the run's record from the first host to runs/NAME; its checkpoints are in the bucket."""
    target = Path("runs") / slices.name
    if target.exists():
        target = target.with_name(f"{slices.name}.{int(time.time())}")
    target.parent.mkdir(exist_ok=True)
    try:
        slices.copy(f":{host_scripts.ROOT}/{slices.name}/runs/{slices.name}", str(target), everywhere=False)
        say(f"the run's record is in {target}")
    except Trouble as trouble:
        warn(f"{trouble}; checkpoints, metrics and config are in the bucket")


def give_back(places: Sequence[Slices], options: TpuOptions) -> None:
    """Stop the run, which saves, copy the hosts' logs, and delete all, until all is gone."""

    def close(slices: Slices) -> None:
        save(slices, options)
        if slices.ssh(host_scripts.keep(slices.name), COPY)[0]:
            warn("not all logs of the hosts could be copied to the bucket")

    delete_all(places, close)


def save(slices: Slices, options: TpuOptions) -> None:
    """Stop the run on every host, and wait until it has saved: for `save_minutes`, or ten minutes if none answers."""
    heard = began = time.time()
    slices.ssh(host_scripts.stop(slices.name))
    while not slices.shell.dry_run:
        known, now = states_of(slices), time.time()
        if known and "running" not in {state for state, _ in known.values()}:
            return
        heard = now if known else heard
        if now - began >= 60 * options.save_minutes or now - heard >= 600:
            return warn(f"not all hosts of {slices.name} have saved in {options.save_minutes:g} min: {known}")
        time.sleep(pause() / 2)
        slices.ssh(host_scripts.stop(slices.name))  # which may not have reached all


def look(places: Sequence[Slices], named: bool = False) -> Iterator[tuple[Slices, str]]:
    """Yield the resource of each zone that answers, and its state.

    Finally print the zones that this project may not read, if others answer and the user `named` none: not every
    project has every zone. Raise Trouble for one that does not answer, UserError if none may be read: something there
    may cost money."""
    hidden: dict[Slices, Trouble] = {}
    for slices in places:
        try:
            for attempt in patient(times=3):
                with attempt:
                    try:
                        state = slices.state()
                    except Denied as denied:  # a second query does not change that
                        hidden[slices] = denied
        except Trouble as trouble:
            hidden[slices] = trouble
        if slices not in hidden:
            yield slices, state
    zones = ", ".join(slices.zone for slices in hidden)
    silent = [trouble for trouble in hidden.values() if not isinstance(trouble, Denied)]
    if silent or (hidden and (named or len(hidden) == len(places))):
        error = Trouble if silent else UserError
        raise error(f"what is in {zones} cannot be seen, and MAY COST MONEY: {[*silent, *hidden.values()][0]}")
    if hidden:
        say(f"passed over, since this project may not look there: {zones}")
