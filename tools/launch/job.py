"""Describe a job for all schedulers: a name, the arguments of train.py, and the hardware: `v5e:4x4`, `2x v5e:4x4` (two
slices), `64x h200:8` (64 nodes of eight GPUs)."""

import os
import re
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from os.path import normpath
from pathlib import Path
from shlex import quote
from typing import Any

from configs.command_line import Exit, parse
from configs.files import cache_dir
from configs.schema import Config, DataConfig, NotNegative, UserError, options
from data.mixture import read_source
from hosts.machines import Topology, name_of
from tools.launch.code import Code, pack
from tools.programs.topologies import parse_topology, shapes_of
from training.layout import AXES, mesh_shape, step_shape

CATALOG = Path(__file__).with_name("catalog.toml")

DONE, AGAIN = (Exit.COMPLETE,), tuple(code for code in Exit if code.start_again)
NEVER = (Exit.FAILED, Exit.MISTAKE, Exit.UNREADABLE, Exit.INTERRUPTED)
"""Exit codes of train.py after which the run is over, all processes restart, or nothing restarts. Any other code (134,
an abort; 137, killed; 139, a segmentation fault) is a crash, after which all restart up to `max_crashes` times."""


class Hardware(Topology):
    """Slices of a TPU, or nodes with GPUs or CPUs, of a kind in tools/launch/catalog.toml."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return this kind's entry in tools/launch/catalog.toml."""
        return catalog()[self.kind]

    @property
    def is_tpu(self) -> bool:
        return "dimensions" in self.facts

    @property
    def hosts_per_slice(self) -> int:
        """Return the hosts of a slice: four chips each, except slices of one or eight chips on one host (v5e, v6e)."""
        return self.chips_inside // 4 if self.is_tpu and self.chips_inside > 4 and self.chips != (2, 4) else 1

    @property
    def hosts(self) -> int:
        return self.slices * self.hosts_per_slice

    @property
    def devices_per_host(self) -> int:
        return self.chips_inside // self.hosts_per_slice

    @property
    def shape(self) -> str:
        """Return the chips of a slice (`4x4`), or the devices of a node (`8`)."""
        return "x".join(map(str, self.chips))

    def __str__(self) -> str:
        return name_of(self)


@cache
def catalog() -> dict[str, dict[str, Any]]:
    """Read tools/launch/catalog.toml, which users edit. Raise UserError if it cannot be read."""
    try:
        return tomllib.loads(CATALOG.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{CATALOG}: {error}") from error


def parse_hardware(text: str) -> Hardware:
    """Return the hardware that `text` names. Raise UserError, with what would be right, for an unknown kind or size."""
    hardware = Hardware(*parse_topology(text, "--hardware"))
    if hardware.kind not in catalog():
        raise UserError(f'--hardware="{text}": {hardware.kind} is unknown; {CATALOG} has {", ".join(catalog())}')
    most = hardware.facts.get("devices_per_host", 8)
    if hardware.is_tpu:
        right = shapes_of(hardware, hardware.facts["dimensions"])
    else:
        fits = len(hardware.chips) == 1 and hardware.inside <= most
        right = "" if fits else f"a number of devices of one node, 1 to {most}"
    if right:
        raise UserError(f'--hardware="{text}": a slice or node of {hardware.kind} is {right}')
    return hardware


@dataclass(frozen=True)
class JobOptions:
    """Options of every `python -m tools.launch`. Arguments of train.py follow after `--`."""

    hardware: str = ""
    """`v5e:4x4`, `"2x v5e:4x4"` (slices), `"64x h200:8"` (nodes); kinds are in tools/launch/catalog.toml."""
    name: str = ""
    """The job's name; empty: the name of the run's config."""
    max_crashes: NotNegative[int] = 10
    """Restarts after crashes (exit codes 134, 137, 139 and the like) in the job's life. A preemption (143) or a lost
    peer (42) does not count."""
    env: tuple[str, ...] = ()
    """Names of this environment's variables to pass to train.py: --env WANDB_PROJECT HF_HOME."""
    secret: tuple[str, ...] = ()
    """The same for keys: --secret WANDB_API_KEY HF_TOKEN. Their values are in no command line, log or config.json."""
    dry_run: bool = False
    """Print exactly what the command would do, and do nothing."""


@dataclass(frozen=True)
class TimedOptions(JobOptions):
    """Options of the launchers that count hours and dollars."""

    hours: NotNegative[float] = 0.0
    """Hours after `up`, time in a queue included, after which the run saves and ends; 0: only when complete."""
    price: NotNegative[float] = 0.0
    """US dollars per device and hour; 0: the price in tools/launch/catalog.toml, if it has one."""


@dataclass(frozen=True)
class TrainOptions:
    """train.py's own options, next to the config's."""

    accept_changes: bool = False
    """As in train.py."""


@dataclass(frozen=True)
class Job:
    """Describe what to run."""

    name: str
    code: Code
    hardware: Hardware
    train: tuple[str, ...]
    """Arguments of train.py, as typed."""
    config: Config
    """The config that they give."""
    max_crashes: int = 10
    env: dict[str, str] = field(default_factory=dict)
    """Variables of train.py's environment."""
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """The same; a launcher shows their names alone."""

    def train_in(self, run_dir: str) -> list[str]:
        """Return the arguments of train.py, with this `--run_dir` unless they have one."""
        return [*self.train, *([] if is_given("run_dir", self.train) else [f"--run_dir={run_dir}"])]

    @property
    def exports(self) -> str:
        """Return shell lines that set the job's variables and secrets."""
        return "".join(f"export {name}={quote(value)}\n" for name, value in (self.env | self.secrets).items())


def is_given(option: str, words: Sequence[str]) -> bool:
    return any(word.split("=")[0].replace("-", "_") == f"__{option}" for word in words)


def make_job(given: JobOptions, train: list[str], *mounts: str) -> Job:
    """Return the job, checked as far as it can be without its machines. `mounts` are folders that the hosts see. Raise
    UserError for what cannot work; what tyro refuses in train.py's arguments ends the process with code 2."""
    if not given.hardware:
        raise UserError('--hardware is missing; try --hardware=v5e:4x4 or --hardware="2x h200:8"')
    hardware = parse_hardware(given.hardware)
    if not train:
        raise UserError("train.py's arguments are missing; they follow after --: -- --config=configs/small.py")
    config, _ = parse("Arguments of train.py, after --.", TrainOptions, train)
    shape = mesh_shape(config.mesh, hardware.devices, f"{hardware.devices} devices of {hardware}")
    step_shape(config.batch, dict(zip(AXES, shape)))
    env, secrets = variables(given.env, "env"), variables(given.secret, "secret")
    name, code = job_name(given.name, config.name), pack(Path.cwd())
    require_seen(config, train, code.names, mounts)
    return Job(name, code, hardware, tuple(train), config, given.max_crashes, env, secrets)


def require_seen(config: Config, train: Sequence[str], code: Collection[str], mounts: Sequence[str]) -> None:
    """Raise UserError if the hosts cannot see the text or another file of the run, or if no text is named."""
    shared = ["the absolute path of a shared folder" if mount == "/" else f"a path below {mount}" for mount in mounts]
    places = ", or ".join(["gs://BUCKET/FOLDER", *shared, "a file of the code"])
    if config.data.source == DataConfig.source and not is_given("data.source", train):
        raise UserError(f"--data.source is missing: give {places}, or stdlib to train on Python's own library")
    others = {name: options(config)[name] for name in ("data.tokenizer", "init_from", "eval.bundle")}
    if Path(config.data.tokenizer).is_relative_to(cache_dir()):  # which each host makes for itself: configs/chat.py
        del others["data.tokenizer"]
    for option, path in [*(("data.source", name) for name in read_source(config.data.source)[0]), *others.items()]:
        travels = any(fnmatch(name, normpath(path)) or name.startswith(normpath(path) + "/") for name in code)
        remote = "://" in path and not path.startswith(("file://", "local://"))
        seen = remote or path.startswith(("hf:", "tiktoken:", *(mount.rstrip("/") + "/" for mount in mounts)))
        if path not in ("", "stdlib", "chat-stdlib") and not (travels or seen):
            raise UserError(f"--{option}={path} is on this machine, and the hosts cannot see it; give {places}")


def variables(names: Sequence[str], option: str) -> dict[str, str]:
    """Return variables of this environment. Raise UserError for one that is not set, and for a word that is no name,
    which the message does not repeat: it may be a secret."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"--{option} takes names of variables alone; their values come from this environment")
        if name not in os.environ:
            raise UserError(f"--{option} {name}: there is no {name} in this environment; export it first")
    return {name: os.environ[name] for name in names}


def cost(job: Job, price: float, hours: float, capacity: str = "on_demand") -> str:
    """Return a line on what the job costs an hour, and until its deadline, in `hours` (0: it has none). `price` is in
    US dollars a device and hour; 0: the price in tools/launch/catalog.toml, if it has one."""
    price = price or job.hardware.facts.get("price", {}).get(capacity, 0)
    devices = f"{job.hardware.devices} {'chips' if job.hardware.is_tpu else 'devices'} ({capacity})"
    if not price:
        return f"# {devices}: no price is known; give --price, in dollars per device and hour"
    hourly = price * job.hardware.devices
    end = f", ${hourly * hours:,.2f} in {hours:g} h" if hours else "; it has no deadline: --hours sets one"
    return f"# {devices} x ${price:g} = ${hourly:,.2f} an hour{end}"


def job_name(given: str, otherwise: str = "") -> str:
    """Return a name that every scheduler takes. Raise UserError for a given one that none takes, or if there is
    none."""
    name = given or re.sub(r"[^a-z0-9]+", "-", otherwise.lower()).strip("-")[:40].rstrip("-")
    if not name:
        raise UserError("--name is missing: the job's name, as `up` printed it")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise UserError(
            f"--name={name}: up to 40 small letters, digits and '-', that begin with a letter and do not end with '-'"
        )
    return name


def require_bucket(job: Job, why: str) -> str:
    """Return the run's folder in a bucket. Raise UserError if it has none."""
    folder = job.config.checkpoint.folder
    if not folder.startswith("gs://") or not folder.removeprefix("gs://").split("/")[0]:
        raise UserError(f"--checkpoint.folder=gs://BUCKET/FOLDER is missing: {why}")
    return folder


def pattern(codes: Sequence[Exit]) -> str:
    """Return the pattern of any of these codes for the shell's `case`."""
    return "|".join(str(int(code)) for code in codes)
