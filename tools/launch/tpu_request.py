"""What a TPU job asks for: its options, its zones and its cost, checked before anything is made."""

from dataclasses import dataclass

from configs.schema import NotNegative, Positive, UserError
from tools.launch import host_scripts
from tools.launch.hardware import Hardware
from tools.launch.job import Job, JobOptions, make_job, require_bucket
from tools.launch.queued import ANSWER, Capacity, Network, Slices
from tools.launch.shell import Shell


@dataclass(frozen=True)
class TpuOptions(JobOptions):
    """Options of `python -m tools.launch tpu`."""

    project: str = ""
    """The Google Cloud project."""
    zones: tuple[str, ...] = ()
    """Zones in order of preference: --zones us-east5-a us-east5-b. None: all that tools/launch/catalog.toml has."""
    capacity: Capacity = "on_demand"
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
    """How long a zone is waited for before the next one is tried."""
    hours: Positive[float] = 24.0
    """After so many hours the run saves and ends; `run` then deletes everything."""
    save_minutes: Positive[float] = 60.0
    """How long a run that is told to end may take to save, before its slices are deleted all the same."""
    price: NotNegative[float] = 0.0
    """US dollars per chip and hour; 0: what tools/launch/catalog.toml says, if it does."""
    setup: str = host_scripts.SETUP
    """The command that makes .venv in the code's folder on each host."""


def checked(options: TpuOptions, train: list[str]) -> tuple[Job, list[Slices], str]:
    """The job, its queued resource in each zone, which need not be there, and the run's folder in a bucket. UserError
    before anything is made."""
    job = make_job(options, train)
    if not job.hardware.is_tpu:
        raise UserError(f"--hardware={job.hardware} is no TPU; `python -m tools.launch slurm` or `k8s` take it")
    require_project(options.project)
    zones = zones_of(options.zones, job.hardware)
    bucket = require_bucket(job, "the hosts' disks go with them")
    if any(word.split("=")[0] in ("--run_dir", "--run-dir") for word in train):
        raise UserError(f"--run_dir cannot be given: on the hosts the run is in {host_scripts.ROOT}/NAME/runs/NAME")
    if not options.setup.strip():
        raise UserError("--setup is empty; give a command that makes .venv, or --setup=true where there is one")
    if options.reservation and options.capacity != "reserved":
        raise UserError("--reservation is of --capacity=reserved")
    if options.capacity == "flex_start" and options.hours > 168:
        raise UserError(f"--hours={options.hours:g}: flex_start gives slices for 168 hours at most")
    # Shows at once a bucket that is not there, or that this user may not write to.
    shell = Shell(options.dry_run)
    words = ["gcloud", "storage", "cp", "-", f"{bucket}/launched", f"--project={options.project}"]
    shell.change(words, stdin=f"{job.name}\n".encode(), seconds=ANSWER)
    return job, in_zones(shell, job.name, options, zones), bucket


def in_zones(shell: Shell, name: str, options: TpuOptions, zones: tuple[str, ...]) -> list[Slices]:
    """The job's queued resource in each zone, which need not be there."""
    network = Network(options.network, options.subnetwork, options.internal_ips, options.tunnel_through_iap)
    return [Slices(shell, name, options.project, zone, network) for zone in zones]


def require_project(project: str) -> None:
    if not project:
        raise UserError("--project is missing: the Google Cloud project, `gcloud projects list` shows yours")


def zones_of(given: tuple[str, ...], hardware: Hardware) -> tuple[str, ...]:
    """UserError for a zone that does not have the hardware."""
    known = hardware.facts["zones"]
    for zone in given:
        if zone not in known:
            raise UserError(
                f"--zones {zone} has no {hardware.kind}: tools/launch/catalog.toml has {', '.join(known)}; add it "
                "there if that is wrong"
            )
    return given or tuple(known)
