"""What a run writes down: metrics.jsonl, TensorBoard, summary.json, loss.png."""

import io
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from configs.files import append_whole, write_whole
from run.lines import read_metrics
from run.weights_and_biases import Wandb

# tensorboardX loads these where they are installed, which takes as long as all else that a run imports, and works as
# well without: while it is imported, they are not to be found.
_hidden = dict.fromkeys({"torch", "google.cloud.storage"} - sys.modules.keys())
sys.modules |= _hidden
from tensorboardX import summary as events  # noqa: E402
from tensorboardX.event_file_writer import EventsWriter  # noqa: E402
from tensorboardX.proto import event_pb2  # noqa: E402

for _name in _hidden:
    del sys.modules[_name]


RESULTS = ("loss", "val_loss", "val_bpb", "core")  # what TensorBoard shows with the options of each run


class Rates(NamedTuple):
    """What a clock measured since it was last asked."""

    tokens_per_second: float
    data_wait: float
    """Share of the time in which the devices had nothing to do because the next batch was not there."""
    own_seconds: float
    """Seconds in which this process did not wait for its devices, and so, in their sums, for the others."""


class Clock:
    """Seconds of training, over all of a run's starts: compilation, evaluation and sampling are not in it."""

    def __init__(self, seconds: float, tokens: int):
        self.before = seconds
        self.last = (seconds, tokens)
        self.idle = self.on_devices = 0.0
        """Seconds since this was last asked: of `data_wait`, and of waiting for the devices."""

    def start(self) -> None:
        """Start to count."""
        self.origin = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self.before + time.perf_counter() - self.origin

    def rates(self, tokens: int) -> Rates:
        """Since this was last asked."""
        (seconds, before), self.last = self.last, (self.seconds, tokens)
        passed, idle, on_devices = self.last[0] - seconds, self.idle, self.on_devices
        self.idle = self.on_devices = 0.0
        return Rates((tokens - before) / passed, idle / passed, passed - on_devices)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what happens inside as waiting for the devices."""
        start = time.perf_counter()
        yield
        self.on_devices += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens inside."""
        start = time.perf_counter()
        yield
        self.origin += time.perf_counter() - start


class MetricsWriter:
    """Appends to a run's metrics.jsonl, and shows the same in TensorBoard.

    A continued run first drops the lines after the checkpoint that it continues from, and writes the rest again, so
    that each step is in both once, whatever moment the run was killed at. Of several processes only the first writes.
    Where the disk is full, lines wait in memory until there is room (`problem` says why), and training continues.
    """

    def __init__(
        self,
        run_dir: str | Path,
        start_step: int,
        wandb: Callable[[], Wandb] | None = None,
        hparams: Mapping[str, object] = MappingProxyType({}),
    ):
        """`wandb`: makes what is sent the new lines, where there is to be one. `hparams`: the run's options, which
        TensorBoard shows from the start."""
        self.hparams = hparams
        self.writes = jax.process_index() == 0
        self.problem = ""
        if not self.writes:
            return
        self.path, self.waiting = Path(run_dir) / "metrics.jsonl", ""
        # Before the first checkpoint there is nothing to continue, and step 0 is evaluated again.
        kept = [line for line in read_metrics(run_dir) if line["step"] <= start_step] if start_step else []
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self.tensorboard: TensorBoard | None = None
        self.wandb = wandb() if wandb else None
        self._show(kept)

    def write(self, line: dict) -> None:
        """One line, with the time: of a logged step, an evaluation with its samples, or a change of the config. Numbers
        that are not finite become null: JSON has none."""
        if not self.writes:
            return
        line = _finite({**line, "time": time.time()})
        self.waiting += json.dumps(line, allow_nan=False) + "\n"
        try:
            append_whole(self.path, self.waiting)
            self.waiting, self.problem = "", ""
        except OSError as error:
            self.problem = f"{self.path} cannot be written: {error.strerror or error}; its lines wait in memory"
            return
        self._show([line])
        if self.wandb:
            self.wandb.show(line)

    def _show(self, lines: list[dict]) -> None:
        """Show them in TensorBoard; all lines again at the start, and after its file could not be written."""
        try:
            if self.tensorboard is None:
                lines = read_metrics(self.path.parent)
                self.tensorboard = TensorBoard(self.path.parent / "tensorboard", self.hparams)
            for line in lines:
                self.tensorboard.show(line)
        except OSError as error:
            self.tensorboard = None
            self.problem = f"TensorBoard's file cannot be written: {error.strerror or error}"

    def close(self) -> None:
        """End what the run writes."""
        if not self.writes:
            return
        if self.wandb:
            self.wandb.close()
        if self.tensorboard is not None:
            try:
                self.tensorboard.close()
            except OSError as error:  # which must not change how the run ends
                print(f"TensorBoard's file cannot be written: {error.strerror or error}", file=sys.stderr)


class TensorBoard:
    """An event file, written at once: tensorboardX's own writer has a thread that dies of a full disk, and then a
    queue that nobody empties, on which training would wait for ever."""

    def __init__(self, folder: Path, hparams: Mapping[str, object]):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.writer = EventsWriter(str(folder / "events"))
        self.flushed = 0.0
        flat = {name: v if isinstance(v, bool | int | float) else str(v) for name, v in hparams.items()}
        experiment, session, _ = events.hparams(flat, dict.fromkeys(RESULTS, 0.0))  # the third says that it has ended
        for summary in (experiment, session) if hparams else ():
            self.add(summary, 0, time.time())

    def show(self, line: dict) -> None:
        """Numbers as scalars, those of nested dicts as `key/subkey`; lists as texts."""
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
        """Write what is not on disk yet."""
        self.writer.close()


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Return the numbers in nested dicts, each with its keys as a path."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(f"{name}/{key}", part)
    elif isinstance(value, int | float):
        yield name, value


def _finite(value: Any) -> Any:
    """Return the same, with None in place of each number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summarize(run_dir: str | Path, steps: int, tokens: int, seconds: float, **more: int | str) -> tuple[dict, list]:
    """Return what a run's summary says, with the newest losses (and CORE) that metrics.jsonl has; and the newest
    samples."""
    lines = read_metrics(run_dir)
    newest = lambda name: next((line[name] for line in reversed(lines) if line.get(name) is not None), None)
    losses = {name: newest(name) for name in ("loss", "val_loss", "val_bpb", "val_bpb_stderr")}
    losses |= {"core": core} if (core := newest("core")) is not None else {}
    rate = tokens / seconds if seconds else None
    summary = {"steps": steps, "tokens": tokens, "seconds": seconds, "tokens_per_second": rate, **losses, **more}
    return summary, newest("samples") or []


def write_summary(run_dir: str | Path, summary: dict) -> None:
    """Write summary.json, which says that the run is complete: the last file, and never half of it."""
    write_whole(Path(run_dir) / "summary.json", json.dumps(summary, indent=2) + "\n")


def plot_loss(run_dir: str | Path) -> Path:
    """Draws training and validation loss against tokens, and returns the picture's path."""
    from matplotlib.figure import Figure  # a second to import, and needed once, at the end
    from matplotlib.ticker import EngFormatter

    lines = read_metrics(run_dir)
    course = lambda name: [(line["tokens"], line[name]) for line in lines if line.get(name) is not None]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    if train := course("loss"):
        axes.plot(*zip(*train), color="tab:blue", linewidth=1, alpha=0.7, label="training")
    if val := course("val_loss"):
        label = f"validation ({val[-1][1]:.3f} at the end)"
        axes.plot(*zip(*val), color="tab:orange", marker="o", label=label)
    axes.set(xlabel="tokens", ylabel="loss (nats a token)", title=Path(run_dir).name)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    if train or val:
        axes.legend()
    path, picture = Path(run_dir) / "loss.png", io.BytesIO()
    figure.savefig(picture, dpi=150)
    write_whole(path, picture.getbuffer())
    return path
