"""The end of a run's start: a message, the event, the files of a complete run, and the user's command at events.

--log.on_event starts the command. Training never waits for it, and its failure does not stop training.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any, Literal

import jax

from hosts.clock import Timeline
from hosts.stop import Stop
from options.schema import Config
from run.folder import RunFolder
from run.record import saved_up_to, seconds_by_activity
from system.errors import Exit, TrainingAborted, UserError
from system.exits import ending_of
from system.files import first_line, write_picture, write_whole
from system.messages import LOGGER
from training.state import TrainState, params_sha256

COMMAND_SECONDS = 10  # seconds to wait for the command: a container or job kills it when the run ends


def already_complete(config: Config, changes: list[str]) -> Exit:
    """Report that the run has all its steps. Raise UserError if other options were asked for: they would do nothing."""
    longer = f"--steps={2 * config.steps} --accept_changes"
    if changes:
        raise UserError(
            f"{config.run_dir} is complete, and no step is left that would have these settings:\n  "
            + "\n  ".join(changes)
            + f"\ntrain longer with them ({longer}), or give another --name to start a new run"
        )
    LOGGER.info(f"{config.run_dir} is complete: {config.steps} steps; a longer run: {longer}")
    return Exit.COMPLETE


def stopped(config: Config, folder: RunFolder, step: int, stop: Stop, timeline: Timeline) -> Exit:
    """Report that the run stopped after `step`, as it was asked to, and return its exit code."""
    code = stop.agreed_code()
    LOGGER.info(
        f"stopped after step {step} of {config.steps}, saved in {config.run_dir}; the same command continues it"
    )
    if jax.process_index() == 0:
        _, spent = record_stop(folder, step, code, timeline)
        LOGGER.info(spent)
        folder.upload()
        tell(config, folder, "end", f"stopped, exit code {int(code)}", step)
    return code


def tell(
    config: Config,
    folder: RunFolder,
    event: Literal["spike", "failure", "end"],
    message: str,
    step: int | None = None,
) -> None:
    """Start the command on the first process, with the event in its environment (`log.on_event`). Its output goes to
    the run's on_event.log. Only the end of a process waits for it, for some seconds. A failure is printed and changes
    nothing."""
    if jax.process_index() > 0 or not config.log.on_event:
        return
    run_dir = config.run_dir if "://" in config.run_dir else os.path.abspath(config.run_dir)
    facts = {"EVENT": event, "MESSAGE": message, "STEP": "" if step is None else str(step)}
    facts |= {"RUN": config.name, "RUN_DIR": run_dir}
    environment = os.environ | {f"TOKENSUM_{key}": value.replace("\0", "") for key, value in facts.items()}
    try:
        with (folder.local / "on_event.log").open("ab") as output:
            started = subprocess.Popen(
                config.log.on_event,
                shell=True,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C that ends the run must not reach it
            )
    except (OSError, ValueError) as error:
        print(f"--log.on_event was not started: {error}", file=sys.stderr)
        return
    threading.Thread(target=started.wait, daemon=True).start()  # otherwise it would stay as a zombie
    with suppress(subprocess.TimeoutExpired):
        started.wait(COMMAND_SECONDS if event != "spike" else 0)


@contextmanager
def notify_of_failure(config: Config, folder: RunFolder) -> Iterator[None]:
    """Notify of an exception inside, unless somebody asked for the end. Keep its traceback in the run's folder, except
    for a user's mistake and for an aborted training."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, UserError | TrainingAborted):
            with suppress(Exception):  # the disk or the store may have failed
                name = f"traceback-{jax.process_index()}.txt"
                (folder.path / name).write_text(traceback.format_exc())
        tell(config, folder, "failure", f"{type(error).__name__}: {first_line(error)}")
        if jax.process_index() == 0 and not isinstance(error, UserError):
            with suppress(Exception):
                folder.upload()
        raise


@contextmanager
def failure_recorded(folder: RunFolder, timeline: Timeline) -> Iterator[None]:
    """Record the end of a start by an exception inside: the newest saved step, the error, and its `certain_code`. A
    mistake and a kill record nothing."""
    try:
        yield
    except Exception as error:
        if jax.process_index() == 0 and not isinstance(error, UserError):
            with suppress(Exception):  # the disk may be full or gone
                events = folder.events
                if past := events.read():  # else it was not yet known that the folder is the run's
                    facts = {"code": certain_code(error), "error": f"{type(error).__name__}: {first_line(error)}"}
                    events.add("stop", saved_up_to(past), **facts, seconds=so_far(timeline))
        raise


def certain_code(error: Exception) -> int | None:
    """Return the exit code of a start that ends with this error; None if it depends on the other processes."""
    together, alone = ending_of(error).code, ending_of(error, alone=True).code
    return together if together == alone or jax.process_count() == 1 else None


def record_stop(folder: RunFolder, step: int, code: Exit, timeline: Timeline) -> tuple[dict[str, float], str]:
    """Record that this start ended after `step`. Return the run's seconds by activity, and a line with them."""
    with suppress(OSError):  # the disk may be full
        folder.events.add("stop", step, code=code, seconds=so_far(timeline))
    seconds = seconds_by_activity(folder.events.read())
    return seconds, "seconds: " + ", ".join(f"{activity} {taken:,.1f}" for activity, taken in seconds.items())


def so_far(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of each activity of this process until now, for an event."""
    return {activity: round(seconds, 3) for activity, seconds in timeline.by_activity().items()}


FIGURES = {"loss": "training loss", "val_loss": "validation loss", "val_bpb": "bits per byte"}
FIGURES |= {"reward": "reward", "greedy_accuracy": "greedy accuracy", "pass_at_1": "pass@1"}


def complete(
    config: Config, folder: RunFolder, state: TrainState, tokens: int, seconds: float, timeline: Timeline
) -> Exit:
    """Write the summary and the picture of a complete run, with `tokens` tokens in `seconds` seconds of training, and
    print its samples and figures. Every process must call it."""
    digest = params_sha256(state.params, config.model)  # gathered from all processes
    if jax.process_index() > 0:
        return Exit.COMPLETE
    seconds_of, spent = record_stop(folder, config.steps, Exit.COMPLETE, timeline)
    facts = {"skipped_steps": int(state.skipped_steps), "params_sha256": digest}
    summary, samples = summarize(folder, config.steps, tokens, seconds, **facts)
    summary["seconds_by_activity"] = seconds_of
    plot_loss(folder)
    # The last file: it marks the run as complete.
    write_whole(folder.local / "summary.json", json.dumps(summary, indent=2) + "\n")
    folder.upload()
    for sample in samples:
        print(f"---\n{sample}")
    reached = ", ".join(
        f"{FIGURES[name]} {value:.4f}" for name, value in summary.items() if name in FIGURES and value is not None
    )
    print(
        f"---\n{config.name}: {config.steps} steps, {tokens:,} tokens in {seconds:.0f} s of training\n"
        f"{reached}\n{spent}\n"
        f"in {config.run_dir}: loss.png, summary.json, metrics.jsonl, tensorboard/, checkpoints/, tokenizer/\n"
        f"{next_commands(config)}"
    )
    tell(config, folder, "end", f"complete: {reached}", config.steps)
    return Exit.COMPLETE


def next_commands(config: Config) -> str:
    """Return what to do with a complete run, in the order in which people do it."""
    run, tuned = quote(config.run_dir), quote(f"{config.name}-chat")
    lines = [
        f"look:         python -m tools.report {run}",
        f"              tensorboard --logdir={run}/tensorboard",
        f"sample:       python sample.py --run_dir={run} --prompt='...'",
        f"chat:         python train.py --config=configs/chat.py --init_from={run} --name={tuned}",
        f"              python chat.py --run_dir=runs/{tuned}",
        "own text:     python train.py --config=configs/small.py --name=mine --data.source=FOLDER",
    ]
    if config.data.packing == "whole":  # conversations
        lines[2:] = [
            f"chat:         python chat.py --run_dir={run}",
            f"web page:     python chat.py --run_dir={run} --serve",
        ]
    activate = Path(sys.prefix) / "bin" / "activate"
    if activate.exists() and shutil.which("python") != sys.executable:
        lines.insert(0, f"first:        source {quote(os.path.relpath(activate))}")
    return "\n".join([*lines, f"train longer: the same command with --steps={2 * config.steps} --accept_changes"])


def summarize(folder: RunFolder, steps: int, tokens: int, seconds: float, **more: int | str) -> tuple[dict, list]:
    """Return a run's summary, with the newest losses of metrics.jsonl, and the newest samples."""
    lines = folder.metrics()

    def newest(name: str) -> Any:
        return next((line[name] for line in reversed(lines) if line.get(name) is not None), None)

    losses = {name: newest(name) for name in ("loss", "val_loss", "val_bpb", "val_bpb_stderr")}
    of_reinforcement = {name: newest(name) for name in ("reward", "greedy_accuracy", "pass_at_1")}
    losses |= {name: value for name, value in of_reinforcement.items() if value is not None}
    rate = tokens / seconds if seconds else None
    summary = {"steps": steps, "tokens": tokens, "seconds": seconds, "tokens_per_second": rate, **losses, **more}
    return summary, newest("samples") or []


def plot_loss(folder: RunFolder) -> Path:
    """Draw training and validation loss against tokens. Return the picture's path."""
    from matplotlib.figure import Figure  # a second to import, and needed once, at the end
    from matplotlib.ticker import EngFormatter

    lines = folder.metrics()

    def course(name: str) -> list[tuple[int, Any]]:
        return [(line["tokens"], line[name]) for line in lines if line.get(name) is not None]

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    if train := course("loss"):
        axes.plot(*zip(*train), color="tab:blue", linewidth=1, alpha=0.7, label="training")
    if val := course("val_loss"):
        label = f"validation ({val[-1][1]:.3f} at the end)"
        axes.plot(*zip(*val), color="tab:orange", marker="o", label=label)
    axes.set(xlabel="tokens", ylabel="loss (nats a token)", title=folder.path.name)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    if train or val:
        axes.legend()
    path = folder.local / "loss.png"
    write_picture(path, figure)
    return path
