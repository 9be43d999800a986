"""The start of a run, before its devices compute: the processes, the text, the folder, the checkpoints."""

import json
from dataclasses import asdict
from hashlib import sha256
from typing import Any, NamedTuple

from hosts.distributed import check_hosts_agree, on_first_process
from hosts.preflight import preflight, require_room
from hosts.runtime import describe_processes
from hosts.watchdog import io_limit
from options.arguments import StartArguments
from options.schema import Config, free_to_change, options
from run.checkpoint import Checkpoints
from run.dtype import with_dtype
from run.fitting import Fitting
from run.folder import RunFolder
from run.lock import take_over
from run.record import Place, place_of
from run.recovery import open_cleared, set_aside_after
from run.source import Stage
from run.status import RunStatus, claim_folder
from system.errors import UserError
from system.messages import LOGGER
from training.build import Build
from training.mesh import make_mesh


class Prepared(NamedTuple):
    """A run whose folder is claimed, and that nothing hinders any more."""

    folder: RunFolder
    stage: Stage
    fitting: Fitting
    built: Build
    """With the rows that an earlier start chose, or with one."""
    material: Any
    """What it learns from: a `run.source.Material`."""
    status: RunStatus
    checkpoints: Checkpoints

    @property
    def is_complete(self) -> bool:
        """Return whether the run has all its steps, and its summary."""
        return self.status.finished == self.checkpoints.newest == self.built.config.steps


def prepare(config: Config, arguments: StartArguments, stage: Stage, folder: RunFolder) -> Prepared:
    """Check everything that can be wrong with a start, and claim the run's folder. Raise UserError for a mistake. Every
    process must call it."""
    check_processes(config, arguments)
    fitting = Fitting(with_dtype(config, folder), folder)
    built, material = stage.open(fitting.first_config(), folder)
    status = claim_folder(folder, built.config, material, arguments.accept_changes)
    if status.finished < built.config.steps:
        require_room(built.config)
    preflight(built.config, built.mesh, material.tokenizer.sha256)  # before anything that needs the devices
    checkpoints = open_checkpoints(folder, built.config, arguments.resume_step)
    LOGGER.info(outlook(folder, built.config, material, checkpoints.newest))
    return Prepared(folder, stage, fitting, built, material, status, checkpoints)


def check_processes(config: Config, arguments: StartArguments) -> None:
    """Log the run's processes and devices. Raise UserError if the processes have different options, the command's own
    (`arguments`) included."""
    check_hosts_agree("their options", json.dumps([asdict(config), asdict(arguments)]))
    LOGGER.info(describe_processes(make_mesh(config.mesh)))


def open_checkpoints(folder: RunFolder, config: Config, resume_step: int | None) -> Checkpoints:
    """Take the run over, delete what a kill left half written, and return the run's complete checkpoints, back at
    `resume_step`. Raise UserError if they have more steps than the run should have."""
    with io_limit(config.hang, "opening the checkpoints"):
        on_first_process(lambda: folder.writing(take_over, folder))
        checkpoints = open_cleared(folder)
        if resume_step is not None:
            checkpoints = go_back_to(resume_step, config, checkpoints)
    if checkpoints.newest > config.steps:
        raise UserError(f"--steps={config.steps}, but {folder} has come to step {checkpoints.newest} already")
    return checkpoints


def go_back_to(step: int, config: Config, checkpoints: Checkpoints) -> Checkpoints:
    """Set aside the checkpoints newer than `step`'s, record it, and return the others. Do nothing if the same command
    did so before: with the same options the run would take the same course. Raise UserError if there is no such
    checkpoint."""
    folder = checkpoints.run
    deciding = {name: value for name, value in options(config).items() if not free_to_change(name)}
    asked = {"step": step, "options_sha256": sha256(json.dumps(deciding).encode()).hexdigest()}
    went_back = on_first_process(lambda: [event for event in folder.events.read() if event["event"] == "went_back"])
    if went_back and {name: went_back[-1][name] for name in asked} == asked:
        LOGGER.info(f"--resume_step={step}: the run went back there in an earlier start, and continues")
        return checkpoints
    if step not in checkpoints.steps:
        there = ", ".join(map(str, checkpoints.steps)) or "none"
        raise UserError(f"--resume_step={step}: {folder} has no such checkpoint; it has {there}")
    set_aside_after(step, checkpoints)
    on_first_process(lambda: folder.events.add("went_back", **asked))
    return Checkpoints(folder)


def outlook(folder: RunFolder, config: Config, material: Any, newest: int) -> str:
    """Return a line on what the run learns from, from the checkpoint `newest` to its end."""
    length, size = config.batch.sequence_length, config.batch.tokens_per_step
    place = Place(*on_first_process(lambda: place_of(folder.events.read(), newest, size)))
    rows = (place.tokens + (config.steps - newest) * size) // length
    return material.outlook_message(rows, length, place.tokens, place.mixture)
