"""Run on TPU VMs of Google Cloud, as queued resources: python -m tools.launch tpu up|run|status|logs|stop|down.

`up` gets slices and starts the run on their hosts, where a loop keeps it running without this machine. `run` also
stays: it replaces a slice that was taken away, copies the record here when the run is complete, and deletes all at the
end or at the deadline. Start it on a machine that stays on (a small VM); `down` deletes what it leaves.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from shlex import join

from configs.exit_codes import Exit
from configs.schema import UserError
from tools.launch import host_scripts
from tools.launch.hardware import catalog
from tools.launch.job import cost, is_given, job_name, make_job, require_bucket
from tools.launch.queued import ANSWER, GONE, Slices, TpuOptions, delete_all
from tools.launch.shell import Denied, Shell, Trouble, patient, say, warn
from tools.launch.tpu_run import (
    DEADLINE,
    FIRST,
    TAKEN,
    Launch,
    begin,
    get,
    give_back,
    notify,
    run_to_the_end,
    save,
    start,
    states_of,
)


def up(options: TpuOptions, train: list[str]) -> int:
    """Get slices, send the code, and start the run. The same command again continues where this one ended."""
    launch, places = prepared(options, train)
    if options.dry_run:
        return show(launch, places[0], ())
    states = look(places)
    new = [slices for slices, state in states.items() if state == GONE]
    try:
        slices = get(launch, states)
        if not begin(launch, slices, FIRST):
            raise Trouble(f"{TAKEN} while they were being set up")
    except Trouble as trouble:  # no host may have a limit
        warn(f"error: {trouble}; this command's requests are deleted")
        delete_all(new, until=launch.limit)
        return Exit.FAILED
    rest = f"--project={options.project} --zones {slices.zone} --name={launch.job.name}"
    hours = (launch.limit - launch.typed) / 3600
    say(f"started; it saves and ends after {hours:.1f} h at the latest. Nothing watches its cost until then:")
    say(f"python -m tools.launch tpu down {rest}   # deletes it")
    say(f"python -m tools.launch tpu logs {rest}   # or status, stop")
    return Exit.COMPLETE


def run(options: TpuOptions, train: list[str]) -> int:
    """Do as `up`, and stay: replace slices that are taken away, and delete all at the end or at the deadline."""
    launch, places = prepared(options, train)
    if options.dry_run:
        return show(launch, places[0], places)
    say(f"this process must live until the run is over: it watches the deadline, {options.hours:g} h from now")
    states = look(places)
    try:
        outcome = run_to_the_end(launch, states)
    except Exception as error:  # after any error, no request may remain
        warn(f"error: {error}" if isinstance(error, UserError | Trouble) else traceback.format_exc())
        outcome = f"ended {int(Exit.FAILED)}"
    say(f"# the run is over: {outcome}")
    give_back(list(states), options)  # in every zone: a request may still wait in one
    say("nothing is left in " + ", ".join(slices.zone for slices in states))
    notify(launch.job, "over", outcome)
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
    shell.run(words, stdin=f"{job.name}\n".encode(), seconds=ANSWER)
    say(cost(job, options.price, options.hours, options.capacity))
    places = [Slices(shell, job.name, zone, options) for zone in options.zones or known]
    return Launch(job, options, bucket, time.time()), places


def require_project(options: TpuOptions) -> None:
    if not options.project:
        raise UserError("--project is missing: the Google Cloud project, `gcloud projects list` shows yours")


def show(launch: Launch, first: Slices, deleted: Sequence[Slices]) -> int:
    """Print the dry run, as if the first zone had the slices."""
    first.create(launch.job.hardware, launch.deadline)
    start(launch, first)
    give_back(deleted, launch.options)
    return Exit.COMPLETE


def look(
    places: Sequence[Slices], named: bool = False, act: Callable[[Slices, str], object] = lambda slices, state: None
) -> dict[Slices, str]:
    """Return the state in each zone that answers, and call `act` with those that have the resource.

    Print the zones that this project may not read, if others answer and the user `named` none: not every project has
    every zone. Raise Trouble for one that does not answer, UserError if none may be read: something there may cost
    money."""
    states: dict[Slices, str] = {}
    hidden: dict[Slices, Trouble] = {}
    for slices in places:
        try:
            for attempt in patient(times=3):
                with attempt:
                    try:
                        states[slices] = slices.state()
                    except Denied as denied:  # a second query does not change that
                        hidden[slices] = denied
        except Trouble as trouble:
            hidden[slices] = trouble
    for slices, state in states.items():
        if state != GONE:
            act(slices, state)
    zones = ", ".join(slices.zone for slices in hidden)
    silent = [trouble for trouble in hidden.values() if not isinstance(trouble, Denied)]
    if silent or (hidden and (named or not states)):
        error = Trouble if silent else UserError
        raise error(f"what is in {zones} cannot be seen, and MAY COST MONEY: {[*silent, *hidden.values()][0]}")
    if hidden:
        say(f"passed over, since this project may not look there: {zones}")
    return states


def in_each_zone(options: TpuOptions, act: Callable[[Slices, str], object]) -> int:
    """Call `act` with the job's resource and its state in each named zone that has it, by default in every zone of
    tools/launch/catalog.toml. Raises as `look` does."""
    require_project(options)
    name, shell = job_name(options.name), Shell(options.dry_run)
    every = sorted({zone for facts in catalog().values() for zone in facts.get("zones", [])})
    places = [Slices(shell, name, zone, options) for zone in options.zones or every]
    if options.dry_run:
        for slices in places:
            act(slices, "ACTIVE")
    else:
        look(places, bool(options.zones), act)
    return Exit.COMPLETE


def status(options: TpuOptions, train: list[str]) -> int:
    """Show the zones in which the job has slices, their state, and each host's."""

    def act(slices: Slices, state: str) -> None:
        if options.dry_run:
            return say(join(slices.words("describe", slices.name, "--format=json")))
        say(f"{slices.name} in {slices.zone}: {state}")
        for host, (what, code) in sorted(states_of(slices).items()) if state == "ACTIVE" else []:
            say(f"  {host}: {what} {code}".rstrip())

    return in_each_zone(options, act)


def logs(options: TpuOptions, train: list[str]) -> int:
    """Follow the log lines of all hosts, each with its host's name, until Ctrl-C."""

    def act(slices: Slices, state: str) -> None:
        slices.shell.become(slices.ssh_words(host_scripts.logs(slices.name, 100)))

    in_each_zone(options, act)
    if options.dry_run:
        return Exit.COMPLETE
    raise UserError(f"there are no slices of {options.name}; its logs are in its bucket, in logs/")


def stop(options: TpuOptions, train: list[str]) -> int:
    """Save and end the run on its hosts. The slices stay, and cost; `up` resumes."""

    def act(slices: Slices, state: str) -> None:
        save(slices, options)
        if not options.dry_run:
            say(f"stopped on {len(states_of(slices))} host(s) in {slices.zone}; the slices are still there")

    return in_each_zone(options, act)


def down(options: TpuOptions, train: list[str]) -> int:
    """Save and end the run, and delete the job's resources in every zone. The bucket stays."""
    places: list[Slices] = []
    try:
        in_each_zone(options, lambda slices, state: places.append(slices))
    finally:  # also if another zone does not answer
        give_back(places, options)
        for slices in () if options.dry_run else places:
            say(f"{slices.name} in {slices.zone} is deleted")
    if not options.dry_run:
        say("nothing is left")
    return Exit.COMPLETE


COMMANDS = {f.__name__: (f, TpuOptions) for f in (up, run, status, logs, stop, down)}
