"""The metrics of a run: metrics.jsonl, TensorBoard and Weights & Biases.

A resumed run first drops the lines after its checkpoint, and writes later ones again. So each step is there exactly
once, whenever the run was killed.
"""

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from options.schema import Config, options
from run.folder import RunFolder
from run.record import finite, read_metrics
from system.files import append_whole, first_line, write_whole

# tensorboardX loads these if they are installed, which takes as long as all other imports of a run, and it does not
# need them. So they are hidden while it is imported.
_hidden = dict.fromkeys({"torch", "google.cloud.storage"} - sys.modules.keys())
sys.modules |= _hidden
from tensorboardX import summary as events  # noqa: E402
from tensorboardX.event_file_writer import EventsWriter  # noqa: E402
from tensorboardX.proto import event_pb2  # noqa: E402

for _name in _hidden:
    del sys.modules[_name]


WANDB_SECONDS = 30  # that a start, and the end of a run, wait for Weights & Biases
RESULTS = ("loss", "val_loss", "val_bpb")  # TensorBoard shows it with each run's options


def drop_metrics_after(folder: RunFolder, step: int) -> list[dict]:
    """Drop the lines of metrics.jsonl after `step`, on the first process, and return the others; none elsewhere. Raise
    OSError if the disk does not answer."""
    if jax.process_index() > 0:
        return []
    # Before the first checkpoint there is nothing to continue, and step 0 is evaluated again.
    lines = [line for line in folder.metrics() if line["step"] <= step] if step else []
    write_whole(folder.local / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return lines


def open_metrics(folder: RunFolder, lines: list[dict], config: Config) -> "MetricsWriter":
    """Begin TensorBoard's file again with the lines that metrics.jsonl has, and return the writer of later ones. An
    error of TensorBoard or of Weights & Biases is reported, and not raised."""
    if jax.process_index() > 0:
        return MetricsWriter(folder)
    wandb = Wandb(config, folder) if config.log.wandb else None
    writer = MetricsWriter(folder, wandb, options(config))
    writer.show(lines)
    return writer


class MetricsWriter:
    """Appends to a run's metrics.jsonl, and writes the same for TensorBoard.

    Only the first process writes. If the disk is full, lines wait in memory until there is room (`problem` is the
    reason), and training continues.
    """

    def __init__(
        self,
        folder: RunFolder,
        wandb: "Wandb | None" = None,
        hparams: Mapping[str, object] = MappingProxyType({}),
    ):
        """Append to the file as it is. `wandb` sends new lines. `hparams`: the run's options for TensorBoard."""
        self.hparams, self.wandb = hparams, wandb
        self.writes = jax.process_index() == 0
        self.problem = ""
        self.path = folder.local / "metrics.jsonl"
        self.waiting: list[dict] = []
        """Lines that the disk had no room for."""
        self.tensorboard: TensorBoard | None = None

    def write(self, line: dict) -> None:
        """Write one line, with the time: a logged step, an evaluation with its samples, or a change of the config.
        Numbers that are not finite become null, as JSON requires."""
        if not self.writes:
            return
        self.waiting.append(finite({**line, "time": time.time()}))
        try:
            append_whole(self.path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in self.waiting))
        except OSError as error:
            self.problem = f"{self.path} cannot be written: {error.strerror or error}; its lines wait in memory"
            return
        lines, self.waiting, self.problem = self.waiting, [], ""
        self.show(lines)
        if self.wandb:
            for line in lines:
                self.wandb.show(line)

    def show(self, lines: list[dict]) -> None:
        """Write lines for TensorBoard; all of them again at the start, and after its file could not be written."""
        try:
            if self.tensorboard is None:
                lines = read_metrics(self.path)
                self.tensorboard = begin_tensorboard(self.path.parent / "tensorboard", self.hparams)
            for line in lines:
                self.tensorboard.show(line)
        except OSError as error:
            self.tensorboard = None
            self.problem = f"TensorBoard's file cannot be written: {error.strerror or error}"

    def close(self) -> None:
        """Close the files."""
        if not self.writes:
            return
        if self.wandb:
            self.wandb.close()
        if self.tensorboard is not None:
            try:
                self.tensorboard.close()
            except OSError as error:  # it must not change the run's exit code
                print(f"TensorBoard's file cannot be written: {error.strerror or error}", file=sys.stderr)


class TensorBoard:
    """An event file, written at once. tensorboardX's own writer has a thread that dies when the disk is full; training
    would then wait for its queue for ever."""

    def __init__(self, folder: Path):
        self.writer = EventsWriter(str(folder / "events"))
        self.flushed = 0.0

    def show(self, line: dict) -> None:
        """Write numbers as scalars (nested ones as `key/subkey`) and lists as texts."""
        step, when = line["step"], line["time"]
        for key, value in line.items():
            if isinstance(value, list):
                for i, text in enumerate(value):
                    fence = "`" * (1 + max(2, *map(len, re.findall("`+", str(text))), 0))
                    self.add(events.text(f"{key}/{i}", f"{fence}\n{text}\n{fence}"), step, when)
            for name, number in _numbers(key, value):
                if name not in ("step", "time"):
                    self.add(events.scalar(name, number), step, when)
        if time.monotonic() > self.flushed + 1:
            self.writer.flush()
            self.flushed = time.monotonic()

    def add(self, summary: Any, step: int, when: float) -> None:
        event = event_pb2.Event(summary=summary, step=step, wall_time=when)  # pyright: ignore[reportAttributeAccessIssue]
        self.writer.write_event(event)

    def close(self) -> None:
        """Flush to disk."""
        self.writer.close()


def begin_tensorboard(folder: Path, hparams: Mapping[str, object]) -> TensorBoard:
    """Delete what a folder has for TensorBoard, and return a new event file in it, which begins with a run's
    options."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)  # NFS keeps files that a viewer on this machine has open
    board = TensorBoard(folder)
    flat = {name: v if isinstance(v, bool | int | float) else str(v) for name, v in hparams.items()}
    experiment, session, _ = events.hparams(flat, dict.fromkeys(RESULTS, 0.0))  # the third marks its end
    for summary in (experiment, session) if hparams else ():
        board.add(summary, 0, time.time())
    return board


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Return the numbers in nested dicts, each with its keys as a path."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(f"{name}/{key}", part)
    elif isinstance(value, int | float):
        yield name, value


class Wandb:
    """Sends the numbers of metrics.jsonl to Weights & Biases, whose own process uploads them. An error is reported
    once, and the run continues without it."""

    def __init__(self, config: Config, folder: RunFolder):
        self.run: Any = None
        with self._reported_errors():
            import wandb  # pyright: ignore[reportMissingImports]

            entity, _, project = config.log.wandb.rpartition("/")
            # One run there for all starts of this one, on any machine.
            first = next((event["time"] for event in folder.events.read()), time.time())
            # Without finish_timeout, finish() waits for the network without end.
            limits = dict.fromkeys(("login_timeout", "init_timeout", "finish_timeout"), WANDB_SECONDS)
            settings = wandb.Settings(console="off", silent=True, finish_timeout_raises=True, **limits)
            self.run = wandb.init(
                project=project,
                entity=entity or None,
                name=config.name,
                id=f"{int(1000 * first):x}",
                resume="allow",
                dir=folder.local,
                config=options(config),
                settings=settings,
            )
            self.run.define_metric("*", step_metric="step")  # steps repeated after a kill may come again

    @contextmanager
    def _reported_errors(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            self.run = None
            print(f"--log.wandb: {first_line(error)}; the run continues without it", file=sys.stderr)

    def show(self, line: dict) -> None:
        """Send the numbers of a line; texts stay in the run's folder."""
        with self._reported_errors():
            if self.run:
                self.run.log({name: value for name, value in line.items() if not isinstance(value, list)})

    def close(self) -> None:
        """Send what is not sent yet, for at most WANDB_SECONDS seconds."""
        with self._reported_errors():
            if self.run:
                self.run.finish()
