"""What a run writes down: metrics.jsonl, TensorBoard, loss.png."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from tensorboardX import SummaryWriter


class Clock:
    """Seconds of training, over all of a run's starts: compilation, evaluation and sampling are not in it."""

    def __init__(self, seconds: float, step: int):
        self.before = seconds
        self.last = (seconds, step)
        self.waited = 0.0

    def start(self) -> None:
        """Starts counting."""
        self.origin = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self.before + time.perf_counter() - self.origin

    def rates(self, step: int) -> tuple[float, float]:
        """Since this was last asked: steps a second, and the share of the time that the loop waited for data."""
        (seconds, before), self.last = self.last, (self.seconds, step)
        passed, waited, self.waited = self.last[0] - seconds, self.waited, 0.0
        return (step - before) / passed, waited / passed

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts what happens inside as waiting for data."""
        start = time.perf_counter()
        yield
        self.waited += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens inside."""
        start = time.perf_counter()
        yield
        self.origin += time.perf_counter() - start


class MetricsWriter:
    """Appends to a run's metrics.jsonl, and shows the same in TensorBoard.

    A continued run first drops the lines after the checkpoint that it continues from, and shows the rest anew, so that
    each step stands in both once, whatever moment the run was killed at. Of several processes only the first writes.
    """

    def __init__(self, run_dir: str | Path, start_step: int):
        self.writes = jax.process_index() == 0
        if not self.writes:
            return
        folder, path = Path(run_dir) / "tensorboard", Path(run_dir) / "metrics.jsonl"
        # Before the first checkpoint there is nothing to continue, and step 0 is evaluated again.
        kept = [line for line in read_metrics(run_dir) if line["step"] <= start_step] if start_step else []
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        partial.rename(path)
        self.file = path.open("a")
        shutil.rmtree(folder, ignore_errors=True)
        # Seconds until an event is on disk.
        self.tensorboard = SummaryWriter(str(folder), flush_secs=1)
        for line in kept:
            self._show(line)

    def write(self, line: dict) -> None:
        """One line, with the time: of a logged step, an evaluation with its samples, or a change of the config."""
        if not self.writes:
            return
        line = {**line, "time": time.time()}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        self._show(line)

    def _show(self, line: dict) -> None:
        """Numbers as scalars, those of a nested dict as `key/subkey`; lists as texts."""
        step, when = line["step"], line["time"]
        for key, value in line.items():
            if isinstance(value, list):
                for i, text in enumerate(value):
                    self.tensorboard.add_text(f"{key}/{i}", f"```\n{text}\n```", step, walltime=when)
            numbers = {f"{key}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
            for name, number in numbers.items():
                if isinstance(number, int | float) and name not in ("step", "time"):
                    self.tensorboard.add_scalar(name, number, step, walltime=when)

    def close(self, hparams: dict, results: dict) -> None:
        """Ends the run: its options as hparams, with their results."""
        flat = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in hparams.items()}
        self.tensorboard.add_hparams(flat, results, name="hparams")
        self.tensorboard.close()
        self.file.close()


def read_metrics(run_dir: str | Path) -> list[dict]:
    """The lines of metrics.jsonl, none where there is none, without the one that a kill may have left half written."""
    path = Path(run_dir) / "metrics.jsonl"
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def summarize(run_dir: str | Path, steps: int, tokens: int, seconds: float, **more: int | str) -> tuple[dict, list]:
    """What a run's summary says, with the newest losses that metrics.jsonl has; and the newest samples."""
    lines = read_metrics(run_dir)
    logged = [line for line in lines if "loss" in line][-1]
    measured = [line for line in lines if "val_loss" in line][-1]
    losses = {"loss": logged["loss"], "val_loss": measured["val_loss"], "val_bpb": measured["val_bpb"]}
    rate = tokens / seconds
    summary = {"steps": steps, "tokens": tokens, "seconds": seconds, "tokens_per_second": rate, **losses, **more}
    return summary, measured["samples"]


def write_summary(run_dir: str | Path, summary: dict) -> None:
    """Writes summary.json, which says that the run is complete: the last file, and never half of it."""
    partial = Path(run_dir) / "summary.partial"
    partial.write_text(json.dumps(summary, indent=2) + "\n")
    partial.rename(Path(run_dir) / "summary.json")


def plot_loss(run_dir: str | Path) -> Path:
    """Draws training and validation loss against tokens, and returns the picture's path."""
    from matplotlib.figure import Figure  # a second to import, and needed once, at the end

    lines = read_metrics(run_dir)
    train = [(line["tokens"], line["loss"]) for line in lines if "loss" in line]
    val = [(line["tokens"], line["val_loss"]) for line in lines if "val_loss" in line]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*train), color="tab:blue", linewidth=1, alpha=0.7, label="training")
    axes.plot(*zip(*val), color="tab:orange", marker="o", label=f"validation ({val[-1][1]:.3f} at the end)")
    axes.set(xlabel="tokens", ylabel="loss (nats a token)", title=Path(run_dir).name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(run_dir) / "loss.png"
    figure.savefig(path, dpi=150)
    return path
