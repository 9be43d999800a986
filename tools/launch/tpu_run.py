"""Run on TPU slices until the end: get them, start, watch, replace those that are taken away, and delete them."""

import math
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.messages import start_hook
from tools.launch import host_scripts, queued
from tools.launch.job import Job
from tools.launch.queued import STATES, Slices, TpuOptions, delete_all
from tools.launch.shell import Trouble, patient, pause, say, warn

FIRST = 3  # tries of a start before any has worked; then the set-up counts as wrong
TAKEN, DEADLINE = "the slices were taken away", "the deadline"


@dataclass(frozen=True)
class Launch:
    """Describe a launch: the job, its options, and its deadline."""

    job: Job
    options: TpuOptions
    bucket: str
    typed: float
    """Seconds since 1970."""

    @property
    def deadline(self) -> float:
        return self.typed + 3600 * self.options.hours

    @property
    def limit(self) -> int:
        """Return when the hosts end by themselves: after `run` would end them."""
        return round(self.deadline + 60 * self.options.save_minutes + 600)


def run_to_the_end(launch: Launch, states: dict[Slices, str]) -> str:
    """Return `ended CODE` or DEADLINE; replace slices that are taken away. Raise Trouble if no start works."""
    tries = FIRST
    while True:
        try:
            for attempt in patient(launch.deadline):
                with attempt:
                    try:
                        slices = get(launch, states)
                    except Trouble as trouble:
                        if tries > FIRST and attempt.retry_state.attempt_number == 1:
                            notify(launch.job, "unavailable", str(trouble))
                        raise
            if "running" in {state for state, _ in states_of(slices).values()}:
                tries = math.inf  # a process before this one has started it
            outcome = TAKEN
            if begin(launch, slices, tries):
                tries, outcome = math.inf, watch(launch, slices)
            if outcome != TAKEN:
                return outcome
            warn(f"{TAKEN} in {slices.zone}; new ones are requested")
            notify(launch.job, "preempted", f"{TAKEN} in {slices.zone}")
            delete_all([slices], until=launch.deadline)
            states[slices] = queued.GONE
        except Trouble:
            if time.time() < launch.deadline:
                raise
            return DEADLINE


def get(launch: Launch, states: dict[Slices, str]) -> Slices:
    """Return slices of the first zone that has them: first zones with this job, then the given order. Raise Trouble if
    none has; a request that got nothing is deleted, and GONE in `states`."""
    for slices in sorted(states, key=lambda slices: ["active", "waits", "over", "gone"].index(STATES[states[slices]])):
        if time.time() >= launch.deadline:
            break
        try:
            if STATES[states[slices]] == "over":
                delete_all([slices], until=launch.deadline)
            if STATES[states[slices]] != "active":
                slices.create(launch.job.hardware, launch.deadline)
            if slices.wait(min(time.time() + 60 * launch.options.wait_minutes, launch.deadline)) == "ACTIVE":
                return slices
            say(f"{slices.zone} has none: the request is deleted")
        except Trouble as trouble:
            warn(str(trouble))
        delete_all([slices], until=launch.deadline)  # also if the answer was lost and the request was not
        states[slices] = queued.GONE
    raise Trouble("no zone has the slices")


def begin(launch: Launch, slices: Slices, tries: float) -> bool:
    """Start the run on all hosts. Return False if the slices were taken away. Raise Trouble after `tries` failures, or
    at the deadline."""
    for attempt in patient(launch.deadline, tries):
        with attempt:
            if STATES[slices.state()] != "active":
                return False
            start(launch, slices)
    return True


def start(launch: Launch, slices: Slices) -> None:
    """Send the code, set it up, and start the loop on every host that has none; if the run has ended or was stopped,
    only if that was before the command was typed. Raise Trouble if a host fails."""
    job, typed = launch.job, int(1000 * launch.typed)
    delete = slices.words("delete", slices.name, "--force", "--async")
    prepare = host_scripts.prepare(
        job, launch.options.setup or host_scripts.SETUP, typed, launch.limit, launch.bucket, delete
    )
    with tempfile.TemporaryDirectory() as folder:
        # Secrets go in a file, since a command's words are in every list of processes.
        for name, content, names in (
            (f"launch-{job.code.name}.tar", job.code.archive, []),
            (f"launch-{typed}", job.exports, [*job.env, *job.secrets]),
            (f"launch-{typed}.sh", prepare, []),
        ):
            if content:
                slices.shell.write(Path(folder) / name, content, names)
                slices.copy(f"{folder}/{name}", f":{name}")
    if failed := slices.ssh(f'bash "$HOME/launch-{typed}.sh"', queued.SET_UP)[0]:
        raise Trouble(f"the set-up on the hosts of {slices.name} ended with {failed}")
    failed, _ = slices.ssh(host_scripts.start(job.name))
    # "none": a host lost its disk since it was prepared, and `watch` prepares it again.
    if not slices.shell.dry_run and (failed or "idle" in {state for state, _ in states_of(slices).values()}):
        raise Trouble(f"the run does not start on every host of {slices.name}: {states_of(slices)}")


def states_of(slices: Slices) -> dict[str, tuple[str, str]]:
    """Return the state of each host that answers: none, idle, running, or ended, with its exit code."""
    _, text = slices.ssh(host_scripts.state(slices.name))
    lines = re.findall(r"^(\S+) (none|idle|running|ended)(?: (\d+))?$", text, re.MULTILINE)
    return {host: (state, code) for host, state, code in lines}


def watch(launch: Launch, slices: Slices) -> str:
    """Wait until the run is over. Return `ended CODE`, TAKEN or DEADLINE. Repeat queries without an answer."""
    while time.time() < launch.deadline:
        try:
            if STATES[slices.state()] in ("over", "gone"):
                return TAKEN
            known = states_of(slices)
            now = {state for state, _ in known.values()}
            if codes := sorted({int(code) for state, code in known.values() if state == "ended"} - {0}):
                say(f"ended by itself: {known}")
                return f"ended {codes[0]}"
            if "ended" in now:  # with 0, as all others are about to: one replaced meanwhile would wait for them
                if "running" not in now and len(known) == launch.job.hardware.hosts:
                    fetch(slices)
                    return "ended 0"
            elif "none" in now:  # a host was replaced, with an empty disk
                start(launch, slices)
            elif "idle" in now:  # a host was rebooted
                slices.ssh(host_scripts.start(slices.name))
        except Trouble as trouble:
            warn(str(trouble))
        time.sleep(pause())
    return DEADLINE


def give_back(places: Sequence[Slices], options: TpuOptions) -> None:
    """Stop the run, which saves, copy the hosts' logs, and delete all, until all is gone."""

    def close(slices: Slices) -> None:
        save(slices, options)
        if slices.ssh(host_scripts.keep(slices.name), queued.COPY)[0]:
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


def notify(job: Job, event: Literal["preempted", "unavailable", "over"], message: str) -> None:
    """Start the user's command (--log.on_event) here, with what happened to the machines."""
    start_hook(job.config, event, message, name=job.name, wait=10)
