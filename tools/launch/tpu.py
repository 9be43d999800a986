"""Run on TPU VMs of Google Cloud, as queued resources: python -m tools.launch tpu up|run|status|logs|stop|down.

`up` gets slices and starts the run on their hosts, where a loop keeps it running without this machine. `run` also
stays: it replaces a slice that was taken away, copies the record here when the run is complete, and deletes all at the
end or at the deadline. Start it on a machine that stays on (a small VM); `down` deletes what it leaves.
"""

import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join

from configs.command_line import Exit
from configs.messages import start_hook
from configs.schema import UserError
from tools.launch import host_scripts, queued
from tools.launch.job import Job, catalog, cost, is_given, job_name, make_job, require_bucket
from tools.launch.queued import GONE, STATES, Slices, TpuOptions, delete_all, fetch, give_back, look, save, states_of
from tools.launch.shell import Shell, Trouble, patient, pause, say, warn

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

    def notify(self, event: str, message: str) -> None:
        """Start the user's command (--log.on_event) here, with what happened to the machines."""
        start_hook(self.job.config, event, message, name=self.job.name, wait=10)


def up(options: TpuOptions, train: list[str]) -> int | None:
    """Get slices, send the code, and start the run. The same command again continues where this one ended."""
    launch, places = prepared(options, train)
    if options.dry_run:
        return show(launch, places[0], ())
    states = dict(look(places))
    new = [slices for slices, state in states.items() if state == GONE]
    try:
        slices = get(launch, states)
        for attempt in patient(launch.deadline, FIRST):
            with attempt:
                start(launch, slices)
    except Trouble as trouble:  # no host may have a limit
        warn(f"error: {trouble}; this command's requests are deleted")
        delete_all(new, until=launch.limit)
        return Exit.FAILED
    rest = f"--project={options.project} --zones {slices.zone} --name={launch.job.name}"
    hours = (launch.limit - launch.typed) / 3600
    say(f"started; it saves and ends after {hours:.1f} h at the latest. Nothing watches its cost until then:")
    say(f"python -m tools.launch tpu down {rest}   # deletes it")
    say(f"python -m tools.launch tpu logs {rest}   # or status, stop")


def run(options: TpuOptions, train: list[str]) -> int | None:
    """Do as `up`, and stay: replace slices that are taken away, and delete all at the end or at the deadline."""
    launch, places = prepared(options, train)
    if options.dry_run:
        return show(launch, places[0], places)
    say(f"this process must live until the run is over: it watches the deadline, {options.hours:g} h from now")
    states = dict(look(places))
    try:
        outcome = run_to_the_end(launch, states)
    except Exception as error:  # after any error, no request may remain
        warn(f"error: {error}" if isinstance(error, UserError) else traceback.format_exc())
        outcome = f"ended {int(Exit.FAILED)}"
    say(f"# the run is over: {outcome}")
    give_back(list(states), options)  # in every zone: a request may still wait in one
    say("nothing is left in " + ", ".join(slices.zone for slices in states))
    launch.notify("over", outcome)
    return Exit.PREEMPTED if outcome == DEADLINE else int(outcome.split()[1])


def prepared(options: TpuOptions, train: list[str]) -> tuple[Launch, list[Slices]]:
    """Return the launch, and the queued resource of each zone, which need not exist. Raise UserError before anything is
    created."""
    job = make_job(options, train)
    if not job.hardware.is_tpu:
        raise UserError(f"--hardware={job.hardware} is no TPU; `python -m tools.launch slurm` or `k8s` take it")
    require_project(options)
    known = job.hardware.facts["zones"]
    if others := set(options.zones) - set(known):
        raise UserError(
            f"--zones {others.pop()} has no {job.hardware.kind}: tools/launch/catalog.toml has {', '.join(known)}; add "
            "it there if that is wrong"
        )
    bucket = require_bucket(job, "the hosts' disks disappear with them")
    if is_given("run_dir", train):
        raise UserError(f"--run_dir cannot be given: on the hosts the run is in {host_scripts.ROOT}/NAME/runs/NAME")
    if options.reservation and options.capacity != "reserved":
        raise UserError("--reservation needs --capacity=reserved")
    if options.capacity == "flex_start" and options.hours > 168:
        raise UserError(f"--hours={options.hours:g}: flex_start gives slices for 168 hours at most")
    # Shows at once a bucket that is not there, or that this user may not write to.
    shell = Shell(options.dry_run)
    words = ["gcloud", "storage", "cp", "-", f"{bucket}/launched", f"--project={options.project}"]
    shell.run(words, stdin=f"{job.name}\n".encode(), seconds=queued.ANSWER)
    say(cost(job, options.price, options.hours, options.capacity))
    places = [Slices(shell, job.name, zone, options) for zone in options.zones or known]
    return Launch(job, options, bucket, time.time()), places


def require_project(options: TpuOptions) -> None:
    if not options.project:
        raise UserError("--project is missing: the Google Cloud project, `gcloud projects list` shows yours")


def show(launch: Launch, first: Slices, deleted: Sequence[Slices]) -> None:
    """Print the dry run, as if the first zone had the slices."""
    first.create(launch.job.hardware, launch.deadline)
    start(launch, first)
    give_back(deleted, launch.options)


def run_to_the_end(launch: Launch, states: dict[Slices, str]) -> str:
    """Return `ended CODE` or DEADLINE; replace slices that are taken away. Raise UserError if no start works."""
    worked, missed, failures = False, False, 0

    def attempt() -> tuple[Slices, str]:
        """Return the slices that the run had, and how it ended there."""
        nonlocal worked, missed, failures
        try:
            slices = get(launch, states)
        except Trouble as trouble:
            if worked and not missed:
                launch.notify("unavailable", str(trouble))
            missed = True
            raise
        missed = False
        # Another process may have started it.
        worked = worked or "running" in {state for state, _ in states_of(slices).values()}
        try:
            start(launch, slices)
            worked = True
        except Trouble as trouble:
            failures += STATES[slices.state()] == "active"
            if not worked and failures == FIRST:
                raise UserError(str(trouble)) from trouble
            raise
        outcome = watch(launch, slices)
        if outcome == TAKEN:
            launch.notify("preempted", f"{TAKEN} in {slices.zone}")
            delete_all([slices], until=launch.deadline)
            states[slices] = GONE
        return slices, outcome

    try:
        while True:  # a preemption is no failure: the pauses start again
            slices, outcome = patient(launch.deadline)(attempt)
            if outcome != TAKEN:
                return outcome
            warn(f"{TAKEN} in {slices.zone}; new ones are requested")
    except Trouble as trouble:
        warn(str(trouble))
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
                states[slices] = "ACTIVE"
                return slices
            say(f"{slices.zone} has none: the request is deleted")
        except Trouble as trouble:
            warn(str(trouble))
        delete_all([slices], until=launch.deadline)  # also if the answer was lost and the request was not
        states[slices] = GONE
    raise Trouble("no zone has the slices")


def start(launch: Launch, slices: Slices) -> None:
    """Send the code, set it up, and start the loop on every host that has none; if the run has ended or was stopped,
    only if that was before the command was typed. Raise Trouble if a host fails."""
    job, typed = launch.job, int(1000 * launch.typed)
    delete = slices.words("delete", slices.name, "--force", "--async")
    setup = launch.options.setup or host_scripts.SETUP
    prepare = host_scripts.prepare(job, setup, typed, launch.limit, launch.bucket, delete)
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


def existing(options: TpuOptions) -> Iterator[tuple[Slices, str]]:
    """Yield the job's resource and its state in each named zone that has it, by default in every zone of
    tools/launch/catalog.toml. Finally raise as `look` does."""
    require_project(options)
    name, shell = job_name(options.name), Shell(options.dry_run)
    every = sorted({zone for facts in catalog().values() for zone in facts.get("zones", [])})
    places = [Slices(shell, name, zone, options) for zone in options.zones or every]
    seen = ((slices, "ACTIVE") for slices in places) if options.dry_run else look(places, bool(options.zones))
    yield from (found for found in seen if found[1] != GONE)


def status(options: TpuOptions, train: list[str]) -> None:
    """Show the zones in which the job has slices, their state, and each host's."""
    for slices, state in existing(options):
        if options.dry_run:
            say(join(slices.words("describe", slices.name, "--format=json")))
            continue
        say(f"{slices.name} in {slices.zone}: {state}")
        for host, (what, code) in sorted(states_of(slices).items()) if state == "ACTIVE" else []:
            say(f"  {host}: {what} {code}".rstrip())


def logs(options: TpuOptions, train: list[str]) -> None:
    """Follow the log lines of all hosts, each with its host's name, until Ctrl-C."""
    for slices, _ in existing(options):
        slices.shell.become(slices.ssh_words(host_scripts.logs(slices.name, 100)))
    if not options.dry_run:
        raise UserError(f"there are no slices of {options.name}; its logs are in its bucket, in logs/")


def stop(options: TpuOptions, train: list[str]) -> None:
    """Save and end the run on its hosts. The slices stay, and cost; `up` resumes."""
    for slices, _ in existing(options):
        save(slices, options)
        if not options.dry_run:
            say(f"stopped on {len(states_of(slices))} host(s) in {slices.zone}; the slices are still there")


def down(options: TpuOptions, train: list[str]) -> None:
    """Save and end the run, and delete the job's resources in every zone. The bucket stays."""
    places: list[Slices] = []
    try:
        places.extend(slices for slices, _ in existing(options))
    finally:  # also if another zone does not answer
        give_back(places, options)
        for slices in places:
            slices.shell.say(f"{slices.name} in {slices.zone} is deleted")
    Shell(options.dry_run).say("nothing is left")


COMMANDS = {f.__name__: (f, TpuOptions) for f in (up, run, status, logs, stop, down)}
