"""The state of a run by its folder: whether a command may continue it, and the claim of the folder for it."""

import dataclasses
import json
from functools import partial
from typing import Any, NamedTuple

from data.dataset import absolute
from hosts.distributed import on_first_process
from model.gpt import parameter_shapes
from options.schema import Config, free_to_change, options
from run.config_json import is_of_a_run, read_config_json, write_config_json
from run.folder import RunFolder
from run.record import saved_up_to
from run.source import Material
from system.errors import UserError


class RunStatus(NamedTuple):
    """The state of a run by its folder. It converts to JSON, so one process reads it for all."""

    has_steps: bool = False
    """Whether a start of it came to a step: a start without one does not bind later ones."""
    changes: list[str] = []  # noqa: RUF012
    """Options that differ from the first start's and change the result."""
    finished: int = 0
    """Steps in its summary; 0 without one."""
    saved: int = 0
    """The newest step that was ever saved."""
    row_order: int = 0
    """Number of the order in which its text gave rows; 0 for a version without numbers, and without text."""


def inspect_run(folder: RunFolder, config: Config, fingerprint: str) -> RunStatus:
    """Return the status of the run in a folder, for a start with this config and this text. Raise UserError if the
    folder contains something else, or a run of another network."""
    local = folder.local
    if not is_of_a_run(folder.config_json):
        # A start that ended while it claimed the folder may leave these, and a preflight its file.
        harmless = {"lock", f"{folder.config_json.name}.partial", ".preflight-0", "on_event.log"}
        harmless |= {path.name for path in local.glob("traceback-*.txt")}
        if {path.name for path in local.iterdir()} - harmless:
            raise UserError(f"--run_dir={folder} is not empty and holds no run; choose another folder")
    if not has_steps(folder):
        return RunStatus()
    facts, first = read_config_json(folder.config_json)
    changes = changed_options(facts["dataset"], first, fingerprint, config)
    if parameter_shapes(first.model) != parameter_shapes(config.model):
        raise UserError(
            f"{folder} holds a run of another network:\n  " + "\n  ".join(changes) + "\n"
            "give the first start's settings to continue it, or another --name to start a new run"
        )
    events = folder.events.read()
    saved = saved_up_to(events) if events else _logged(folder)
    return RunStatus(True, changes, _finished(folder), saved, facts.get("row_order", 0))


def has_steps(folder: RunFolder) -> bool:
    """Return whether a start of the run in a folder came to a step. One without binds no later start."""
    return bool(saved_up_to(folder.events.read()) or _logged(folder) or folder.finished_steps())


def _logged(folder: RunFolder) -> int:
    """Return the newest step in the metrics: all there is of a run before its first checkpoint, or of a version without
    events."""
    return max((line["step"] for line in folder.metrics() if "loss" in line), default=0)


def changed_options(dataset: str, first: Config, fingerprint: str, config: Config) -> list[str]:
    """Return the options that differ from a run's first start, and change its result, as lines for a person. `dataset`:
    the fingerprint of its text; `fingerprint`: of the text now."""
    before = options(first) | {"dataset": dataset}
    now = options(dataclasses.replace(config, data=absolute(config.data))) | {"dataset": fingerprint}
    # Another path of the same text is no change.
    named = {"data.source"} if dataset != fingerprint else set()
    return [
        f"{name}: {before.get(name)} -> {now[name]}"
        for name in now
        if before.get(name) != now[name] and (name in named or not free_to_change(name))
    ]


def _finished(folder: RunFolder) -> int:
    try:
        return int(json.loads((folder.local / "summary.json").read_text())["steps"])
    except (FileNotFoundError, ValueError, LookupError, TypeError):  # it is made again
        return 0


def claim_folder(folder: RunFolder, config: Config, material: Material, accept_changes: bool) -> RunStatus:
    """Claim a run's folder for this config and what it learns from, before any compute, and return the run's status.
    Raise UserError if an option that changes the result differs without acceptance, if the run read its rows in another
    order, or if its checkpoints are gone. Record no change yet (`write_start_record`). Every process must call it."""

    def claim() -> RunStatus:
        status = inspect_run(folder, config, material.fingerprint)
        if not status.has_steps:
            write_config_json(folder.config_json, config, material.fingerprint, [], material.row_order)
        return status

    # On one process: an NFS client that looks too early does not see the folder for a while.
    status = RunStatus(*on_first_process(partial(folder.writing, claim)))
    if status.has_steps and status.row_order != material.row_order:
        raise UserError(
            f"{folder} did not read its rows in this version's order: complete it with the version that began it, or "
            f"begin a run from its network: --init_from={folder} and another --name"
        )
    if status.changes and not accept_changes:
        raise UserError(
            f"{folder} holds a run with other settings:\n  " + "\n  ".join(status.changes) + "\n"
            "give the first start's settings to continue it, another --name to start a new run, "
            "or --accept_changes to continue it with these"
        )
    if status.has_steps:
        # After all options that differ are listed: another tokenizer follows from some of them.
        on_first_process(lambda: material.tokenizer.require_same_in(folder.tokenizer))
    on_first_process(lambda: folder.retried(require_checkpoints, folder, status.saved))
    return status


def require_checkpoints(folder: RunFolder, saved: int) -> None:
    """Raise UserError if a run was saved up to step `saved`, and its checkpoints are gone: a new start would erase its
    record."""
    if saved and not folder.finished_steps():
        raise UserError(
            f"{folder} was saved up to step {saved}, and {folder.checkpoints} holds no checkpoint now: is its disk "
            "mounted, were they moved, or deleted? Bring them there, or start a new run with another --name"
        )


def write_start_record(
    folder: RunFolder, config: Config, material: Material, changes: list[str], step: int, tokens: int, **facts: Any
) -> None:
    """Record that the run continues from `step`, at `tokens` tokens of the data, with the changes and these facts.
    Only the first process may call it, once the state is restored."""
    recorded, _ = read_config_json(folder.config_json)
    changes_so_far = recorded["changes"] + ([changes] if changes else [])
    write_config_json(folder.config_json, config, material.fingerprint, changes_so_far, material.row_order)
    if step < config.steps:
        (folder.local / "summary.json").unlink(missing_ok=True)  # from a shorter run
    size = config.batch.tokens_per_step
    folder.events.add("start", step, tokens=tokens, tokens_per_step=size, **facts)
