"""TPU VMs of Google Cloud: python -m launch tpu up|run|status|logs|stop|down, through queued resources and gcloud.

`up` gets slices and starts the run on their hosts, where a loop keeps it going without this machine. `run` does that
too, and stays: it makes a slice anew that was taken away, brings the record back when the run is complete, and deletes
all at the end or at the deadline. It must live somewhere that stays on (a small VM); what it leaves, `down` deletes.
"""

import os
import time
from pathlib import Path
from shlex import join

from configs.exit_codes import Exit
from configs.schema import UserError
from launch import hosts
from launch.code import Code, pack
from launch.hardware import machines
from launch.job import Job, job_name
from launch.queued import GONE, OVER, Slices, pause
from launch.shell import Shell, say, warn
from launch.tpu_request import TpuOptions, checked, require_project, say_cost


def up(options: TpuOptions, train: list[str]) -> int:
    """Gets slices, sends the code, and starts the run. The same command again goes on where this one ended."""
    job, zones = checked(options, train)
    say_cost(job, options)
    slices = get_and_start(job, options, zones, pack(Path.cwd()))
    if slices and not options.dry_run:
        rest = f"--project={options.project} --zones {slices.zone} --name={job.name}"
        say(f"started; nothing watches its cost: it runs until python -m launch tpu down {rest}")
        say(f"python -m launch tpu logs {rest}   # or status, stop")
    return Exit.COMPLETE if slices else Exit.FAILED


def run(options: TpuOptions, train: list[str]) -> int:
    """As `up`, and stays: replaces slices that are taken, and deletes all when the run is over or at the deadline."""
    job, zones = checked(options, train)
    say_cost(job, options)
    code, deadline = pack(Path.cwd()), time.time() + 3600 * options.hours
    if not options.dry_run:
        say(f"this process must live until the run is over: it watches the deadline, {options.hours:g} h from now")
    try:
        outcome = run_to_the_end(job, options, zones, code, deadline)
    except UserError as error:
        if options.dry_run:
            raise
        warn(f"error: {error}")
        outcome = f"ended {int(Exit.MISTAKE)}"
    say(f"# the run is over: {outcome}")
    for zone in zones:  # in every zone, whatever happened: a request may still wait in one
        there = Slices(Shell(options.dry_run), job.name, options.project, zone)
        if options.dry_run or there.state() != GONE:
            there.delete()
    if not options.dry_run:
        say("nothing is left in " + ", ".join(zones))
    if outcome == "deadline":
        return Exit.PREEMPTED
    return int(outcome.split()[1]) if outcome.startswith("ended") else Exit.COMPLETE


def run_to_the_end(job: Job, options: TpuOptions, zones: tuple[str, ...], code: Code, deadline: float) -> str:
    """`ended CODE` or `deadline`, whatever slices are taken meanwhile."""
    while True:
        slices = get_and_start(job, options, zones, code, deadline)
        if options.dry_run:
            return "ended 0"
        outcome = watch(slices, job, code, options, deadline) if slices else "nothing"
        if outcome == "nothing" and time.time() > deadline:
            return "deadline"
        if outcome not in ("taken", "nothing"):
            return outcome
        if outcome == "nothing":
            say("no zone has the slices; all are asked again")
            pause()


def get_and_start(
    job: Job, options: TpuOptions, zones: tuple[str, ...], code: Code, deadline: float = float("inf")
) -> Slices | None:
    """Slices in the first zone that has them, with the run started on all hosts; None where no zone has them, or they
    were taken meanwhile. What was asked for in vain is deleted."""
    shell = Shell(options.dry_run)
    places = [Slices(shell, job.name, options.project, zone) for zone in zones]
    there = [] if options.dry_run else [slices for slices in places if slices.state() != GONE]
    for slices in there + [slices for slices in places if slices not in there]:
        if time.time() > deadline:
            return None
        if options.dry_run:
            slices.create(job.hardware, options.capacity, options.service_account)
        elif not obtain(slices, job, options, deadline):
            continue
        try:
            start(slices, job, code, options, forget=True)
            return slices
        except UserError as error:
            if options.dry_run or slices.state() not in OVER:
                raise
            warn(f"taken while it was being set up: {error}")
    return None


def obtain(slices: Slices, job: Job, options: TpuOptions, deadline: float) -> bool:
    """Waits for the slices in one zone. False where it has none, nothing being left of the request."""
    try:
        if slices.state() in ("FAILED", "SUSPENDING", "SUSPENDED", "DELETING"):
            slices.delete()
        slices.create(job.hardware, options.capacity, options.service_account)
    except UserError as error:
        if "MAY COST" in str(error):
            raise
        warn(str(error))
        return False
    if slices.wait(min(60 * options.wait_minutes, deadline - time.time())) == "ACTIVE":
        return True
    say(f"{slices.zone} has none: the request is deleted")
    slices.delete()
    return False


def start(slices: Slices, job: Job, code: Code, options: TpuOptions, forget: bool) -> None:
    """Sends the code, sets it up, and starts the loop on every host that has none; where the run has ended or was
    stopped, only with `forget`. UserError where a host fails."""
    cache = Path(os.environ.get("TOKENSUM_CACHE") or "~/.cache/tokensum").expanduser()
    archive = cache / "launch" / f"launch-{code.name}.tar"
    slices.shell.write(archive, code.archive)
    if slices.copy(str(archive), f"{slices.name}:{archive.name}"):
        raise UserError(f"the code could not be sent to the hosts of {slices.name}")
    slices.ssh(hosts.prepare(job, code, options.setup, forget))
    for _ in range(3):  # a connection may break after a host was told, and before it did it
        slices.ssh(hosts.start(job.name))
        # "none": a host lost its disk since it was prepared, and `watch` prepares it anew.
        if options.dry_run or "idle" not in {state for state, _ in states(slices).values()}:
            return
        pause(0.2)
    raise UserError(f"the run does not start on every host of {slices.name}: {states(slices)}")


def states(slices: Slices) -> dict[str, tuple[str, str]]:
    """Of each host that answers: none, idle, running, or ended, with its exit code."""
    _, said = slices.ssh(hosts.state(slices.name), check=False)
    lines = [line.split() for line in said.splitlines()]
    found = {line[0]: (line[1], line[2] if len(line) > 2 else "") for line in lines if len(line) in (2, 3)}
    return {host: state for host, state in found.items() if state[0] in ("none", "idle", "running", "ended")}


def watch(slices: Slices, job: Job, code: Code, options: TpuOptions, deadline: float) -> str:
    """Until the run is over: `ended CODE`, `taken` or `deadline`. Saves first at the deadline, and where a host ended
    with a code that must not be repeated."""
    while True:
        try:
            over = slices.state() in OVER
        except UserError as error:  # gcloud or the network fails for a while; the run goes on without it
            warn(str(error))
            over = False
        if over:
            say(f"the slices in {slices.zone} were taken away; new ones are asked for")
            slices.delete()
            return "taken"
        known = states(slices)
        if failed := [f"{host} {code}" for host, (state, code) in known.items() if state == "ended" and code != "0"]:
            say(f"ended by itself: {', '.join(failed)}")
            save(slices)
            return f"ended {failed[0].split()[1]}"
        now = {state for state, _ in known.values()}
        if "ended" in now:  # with 0, as all others are about to: one that was made anew meanwhile would wait for them
            if "running" not in now and len(known) == job.hardware.hosts:
                fetch(slices)
                return "ended 0"
        elif "none" in now:  # a host was made anew, with an empty disk
            try:
                start(slices, job, code, options, forget=False)
            except UserError as error:
                warn(str(error))
        elif "idle" in now:  # a host was started anew
            slices.ssh(hosts.start(slices.name), check=False)
        if time.time() > deadline:
            save(slices)
            return "deadline"
        pause()


def save(slices: Slices) -> None:
    """Tells every host to save and end, and waits for it, up to ten minutes."""
    slices.ssh(hosts.stop(slices.name), check=False)
    until = time.time() + 600
    while time.time() < until and any(state == "running" for state, _ in states(slices).values()):
        pause(0.5)


def fetch(slices: Slices) -> None:
    """Brings the run's record from the first host to runs/NAME; its checkpoints lie in the bucket."""
    target = Path("runs") / slices.name
    if target.exists():
        target = target.with_name(f"{slices.name}.{int(time.time())}")
    target.parent.mkdir(exist_ok=True)
    if slices.copy(f"{slices.name}:launch/{slices.name}/runs/{slices.name}", str(target), everywhere=False):
        warn(f"the run's record could not be copied to {target}; its checkpoints, metrics and config are in the bucket")
    else:
        say(f"the run's record is in {target}")


def found(options: TpuOptions) -> list[Slices]:
    """The job's resources in the zones that are named, or in every zone of launch/machines.toml."""
    require_project(options.project)
    if not options.name:
        raise UserError("--name is missing: the job's name, as `tpu up` printed it")
    every = sorted({zone for facts in machines().values() for zone in facts.get("zones", [])})
    shell, name = Shell(options.dry_run), job_name(options.name)
    places = [Slices(shell, name, options.project, zone) for zone in options.zones or every]
    return places if options.dry_run else [slices for slices in places if slices.state() != GONE]


def status(options: TpuOptions, train: list[str]) -> int:
    """Shows where the job has slices, their state, and each host's."""
    for slices in found(options):
        if options.dry_run:
            say(join(slices.words("describe", slices.name, "--format=json")))
            continue
        state = slices.state()
        say(f"{slices.name} in {slices.zone}: {state}")
        for host, (what, code) in sorted(states(slices).items()) if state == "ACTIVE" else []:
            say(f"  {host}: {what} {code}".rstrip())
    return Exit.COMPLETE


def logs(options: TpuOptions, train: list[str]) -> int:
    """Follows the log lines of all hosts, each with its host's name, until Ctrl-C."""
    places = found(options)
    if not places:
        raise UserError(f"there are no slices of {options.name}; its checkpoints and metrics are in its bucket")
    command = f"--command={hosts.logs(options.name, 100)}"
    words = places[0].words("ssh", options.name, "--node=all", "--worker=all", command)
    places[0].shell.become(words)
    return Exit.COMPLETE


def stop(options: TpuOptions, train: list[str]) -> int:
    """Saves and ends the run on its hosts. The slices stay, and cost; `up` goes on."""
    for slices in found(options):
        slices.ssh(hosts.stop(slices.name))
        if not options.dry_run:
            save(slices)
            say(f"stopped on {len(states(slices))} host(s) in {slices.zone}; the slices are still there")
    return Exit.COMPLETE


def down(options: TpuOptions, train: list[str]) -> int:
    """Saves and ends the run, and deletes whatever of the job is left in any zone. What is in the bucket stays."""
    for slices in found(options):
        if not options.dry_run and slices.state() == "ACTIVE":
            save(slices)
        slices.delete()
        if not options.dry_run:
            say(f"{slices.name} in {slices.zone} is deleted")
    if not options.dry_run:
        say("nothing is left")
    return Exit.COMPLETE


COMMANDS = {f.__name__: (f, TpuOptions) for f in (up, run, status, logs, stop, down)}
