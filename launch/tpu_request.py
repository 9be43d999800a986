"""What a TPU job asks for: its options, its zones and its cost, checked before anything is made."""

from dataclasses import dataclass

from configs.schema import NotNegative, Positive, UserError
from launch import hosts
from launch.hardware import Hardware
from launch.job import Job, JobOptions, make_job, require_bucket
from launch.queued import Capacity
from launch.shell import Shell, say


@dataclass(frozen=True)
class TpuOptions(JobOptions):
    """Options of `python -m launch tpu`."""

    project: str = ""
    """The Google Cloud project."""
    zones: tuple[str, ...] = ()
    """Zones in order of preference: --zones us-east5-a us-east5-b. None: all that launch/machines.toml has."""
    capacity: Capacity = "on_demand"
    """How the slices are bought. A `spot` slice may be taken away at any time."""
    service_account: str = ""
    """The account that hosts act as, which may write to the bucket; empty: the project's default."""
    wait_minutes: Positive[float] = 30.0
    """How long a zone is waited for before the next one is tried."""
    hours: Positive[float] = 24.0
    """`run`: after so many hours everything is saved and deleted."""
    price: NotNegative[float] = 0.0
    """US dollars per chip and hour; 0: what launch/machines.toml says, if it does."""
    setup: str = hosts.SETUP
    """The command that makes .venv in the code's folder on each host."""


def checked(options: TpuOptions, train: list[str]) -> tuple[Job, tuple[str, ...]]:
    """The job and its zones. UserError before anything is made."""
    job = make_job(options, train)
    if not job.hardware.is_tpu:
        raise UserError(f"--hardware={job.hardware} is no TPU; `python -m launch slurm` or `k8s` take it")
    require_project(options.project)
    zones = zones_of(options.zones, job.hardware)
    folder = require_bucket(job, "the hosts' disks go with them")
    if any(word.split("=")[0] in ("--run_dir", "--run-dir") for word in train):
        raise UserError("--run_dir cannot be given: on the hosts the run lies in ~/launch/NAME/runs/NAME")
    if not options.setup.strip():
        raise UserError("--setup is empty; give a command that makes .venv, or --setup=true where there is one")
    # Tells at once of a bucket that is not there, or that this user may not write to.
    words = ["gcloud", "storage", "cp", "-", f"{folder}/launched", f"--project={options.project}"]
    Shell(options.dry_run).change(words, stdin=f"{job.name}\n".encode())
    return job, zones


def require_project(project: str) -> None:
    if not project:
        raise UserError("--project is missing: the Google Cloud project, `gcloud projects list` shows yours")


def zones_of(given: tuple[str, ...], hardware: Hardware) -> tuple[str, ...]:
    """UserError for a zone that does not have the hardware."""
    known = hardware.facts["zones"]
    for zone in given:
        if zone not in known:
            raise UserError(
                f"--zones {zone} has no {hardware.kind}, as far as launch/machines.toml knows: {', '.join(known)}; add "
                "it there where it is wrong"
            )
    return given or tuple(known)


def say_cost(job: Job, options: TpuOptions) -> None:
    """What it costs an hour, and until the deadline."""
    price = options.price or job.hardware.facts.get("price", {}).get(options.capacity, 0)
    chips = f"{job.hardware.devices} chips ({options.capacity})"
    if not price:
        say(f"# {chips}: no price is known; --price, or launch/machines.toml, gives dollars per chip and hour")
        return
    hourly = price * job.hardware.devices
    say(f"# {chips} x ${price:g} = ${hourly:,.2f} an hour, ${hourly * options.hours:,.2f} in {options.hours:g} h")
