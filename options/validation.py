"""Validation of configs: each option's value, and options that depend on each other.

msgspec checks what an option's type in options/schema.py says.
"""

import dataclasses
import math
import os
import re
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from options.schema import (
    SMEAR_CHANNELS,
    Config,
    ModelConfig,
    Role,
    hints,
    options,
    roles,
    with_options,
)
from system.errors import UserError

T = TypeVar("T")


def check_types(config: T) -> T:
    """Return `config` with each number in its field's type. Raise UserError, naming the option, for a value outside its
    type."""
    try:
        checked = msgspec.convert(dataclasses.asdict(config), type(config))  # pyright: ignore[reportArgumentType]
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        problem = problem[0].lower() + problem[1:]
        name = path.rstrip("`").partition("[")[0]
        kind = hints(type(config)).get(name)
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        if get_origin(kind) is Literal:
            problem = f"it is one of {', '.join(map(repr, get_args(kind)))}"
        raise UserError(f"--{name}={attrgetter(name)(config)} cannot work: {problem}") from error
    for name, value in options(checked).items():
        if problem := _problem(value):
            raise UserError(f"--{name}={value} cannot work: {problem}")
    for field in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
        if (value := getattr(config, field.name)) != (right := getattr(checked, field.name)):
            raise UserError(f"--{field.name}={value} cannot work: it must be of type {type(right).__name__}")
    return checked


def _problem(value: Any) -> str:
    """Return why no option of any type can have this value; empty if it can."""
    if isinstance(value, tuple):
        return next(filter(None, map(_problem, value)), "")
    if isinstance(value, float) and not abs(value) < 2.0**127:
        return "it must be a finite number"
    if isinstance(value, int) and abs(value) >= 2**31:
        return "it must be below 2^31"  # counts are 32-bit numbers on the devices
    if isinstance(value, str) and value != value.encode(errors="replace").decode():
        return "it must be text in UTF-8"
    return ""


def with_homes(config: T) -> T:
    """Return the config with ~ expanded in its paths. Raise UserError if there is no home folder, or for a URL in an
    option that takes only local paths: it would become a folder of that name."""

    def home(name: str, value: str, store: bool) -> str:
        path = os.path.expanduser(value)
        if path.startswith("~"):
            raise UserError(f"--{name}={value} cannot work: there is no such home folder")
        if "://" in path and not (store and re.fullmatch(r"gs://[^/]+/.*[^/]/*", path)):
            right = "give a path on this machine" + ", or gs://BUCKET/FOLDER" * store
            raise UserError(f"--{name.rstrip('_')}={value} cannot work: {right}")
        return path

    paths: dict[str, object] = {}
    for name, meant in roles(type(config)).items():
        if Role.PATH in meant:
            value, store = options(config)[name], Role.STORE in meant
            several = isinstance(value, tuple)
            paths[name] = tuple(home(name, one, store) for one in value) if several else home(name, str(value), store)
    return with_options(config, paths)


PROGRAMS = "its HumanEval has programs as answers, which this machine must run"


def validate(config: Config) -> None:
    """Raise UserError, naming the option, its value and what would work, for a config that cannot run anywhere.

    `training.mesh` checks what depends on the devices, such as how the rows of a step divide among them.
    """
    check_types(config)
    model, batch, mesh, flat = config.model, config.batch, config.mesh, options(config)

    def divisors(size: int) -> list[int]:
        return [n for n in range(1, min(size, 64) + 1) if size % n == 0]

    def require(condition: bool, name: str, expectation: str) -> None:
        if not condition:
            raise UserError(f"--{name}={flat[name]} cannot work: {expectation}")

    names_folder = config.name not in ("", ".", "..") and not {"/", "\0"} & set(config.name)
    require(names_folder, "name", "it names a folder: not empty, without '/'")
    first, last = profiled_steps(config) or (1, 1)
    require(1 <= first <= last, "profile.steps", "give FIRST:LAST, the first at least 1, such as 10:15")
    require(last <= config.steps or not config.steps, "profile.steps", f"the run has {config.steps} steps")
    require(not config.eval.tasks or config.eval.bundle != "", "eval.tasks", "give --eval.bundle=DIR, with its items")
    runs_code = config.eval.run_code or config.eval.tasks != "chatcore"
    require(runs_code, "eval.tasks", f"{PROGRAMS}: add --eval.run_code, or take chatcore4, which leaves them out")
    a_run = "it takes the moments of the run in init_from, which is empty"
    require(config.init_from != "" or not config.init_optimizer, "init_optimizer", a_run)
    divides = f"it must divide batch.sequence_length={batch.sequence_length}"
    require(batch.sequence_length % model.loss_chunks == 0, "model.loss_chunks", divides)
    divides = f"it must divide model.heads={model.heads}: one of {divisors(model.heads)}"
    require(model.heads % model.kv_heads == 0, "model.kv_heads", divides)
    letters = set(model.window_pattern) <= {"S", "L"} and model.window_pattern != ""
    require(letters, "model.window_pattern", "letters S (short) and L (long), one for each block, such as SSSL")
    for feature, channels in (("smear", SMEAR_CHANNELS), ("value_embeddings", model.value_gate_channels)):
        enough = model.width >= channels or not getattr(model, feature)
        require(enough, "model.width", f"model.{feature} reads {channels} channels of it")
    most = math.floor(10 * (87.3 - math.log(model.vocab_size))) / 10
    overflows = f"with model.vocab_size={model.vocab_size} the loss overflows float32; at most {most}"
    require(model.softcap <= most, "model.softcap", overflows)
    require(mesh.data != 0, "mesh.data", "give a number of replicas, or -1 for all")
    divides = f"it must divide model.vocab_size={model.vocab_size}, over which model.value_embeddings are shared"
    require(not model.value_embeddings or model.vocab_size % mesh.fsdp == 0, "mesh.fsdp", divides)
    require(model.width % mesh.fsdp == 0, "mesh.fsdp", f"it must divide model.width={model.width}")
    for name, size in (("heads", model.heads), ("vocab_size", model.vocab_size)):
        divides = f"it must divide model.{name}={size}: one of {divisors(size)}"
        require(size % mesh.tensor == 0, "mesh.tensor", divides)
    fits = [n for n in range(1, model.heads + 1) if model.heads % n == 0 and _shares_kv_heads(model, n)]
    divides = f"it must divide model.kv_heads={model.kv_heads}, or be a multiple that divides their channels: {fits}"
    require(
        _shares_kv_heads(model, mesh.tensor) and model.kv_heads * model.head_dim % mesh.tensor == 0,
        "mesh.tensor",
        divides,
    )
    require(4 * model.width % mesh.tensor == 0, "mesh.tensor", f"it must divide the MLP's width {4 * model.width}")
    multiple = f"it must be a multiple of batch.sequence_length={batch.sequence_length}"
    nearest = nearest_multiples(batch.tokens_per_step, batch.sequence_length)
    whole_rows = batch.tokens_per_step % batch.sequence_length == 0
    require(whole_rows, "batch.tokens_per_step", f"{multiple}; nearest: {nearest}")


def require_steps(config: Config) -> None:
    """Raise UserError for a command that needs a number of steps, if the config has an epoch in its place."""
    if not config.steps:
        raise UserError(
            "--steps=0 counts epochs of the text, as train.py and tools.plan do: give a number of steps here"
        )


def _shares_kv_heads(model: ModelConfig, devices: int) -> bool:
    """Return whether each device has key and value heads of its own, or shares one with others."""
    return 0 in (model.kv_heads % devices, devices % model.kv_heads)


def profiled_steps(config: Config) -> tuple[int, int] | None:
    """Return the first and the last step of `profile.steps`; (0, 0) if they cannot be read; None if it is empty."""
    first, _, last = config.profile.steps.partition(":")
    if not config.profile.steps:
        return None
    return (int(first), int(last)) if first.isdecimal() and last.isdecimal() else (0, 0)


def resolved(config: Config) -> Config:
    """Return the config with what follows from its other options filled in, and ~ in its paths."""
    config = with_homes(config)
    window = config.model.short_window or -(-config.batch.sequence_length // 4 // 128) * 128
    return with_options(config, {"run_dir": config.run_dir or f"runs/{config.name}", "model.short_window": window})


def nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of `unit` on both sides of `value`, for messages: `4096 or 6144`."""
    below = value // unit * unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple > 0)
