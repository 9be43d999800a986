"""What a run writes down: metrics.jsonl, TensorBoard, loss.png."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorboardX import SummaryWriter


class Clock:
    """Seconds of training, over all of a run's starts: compilation, evaluation and sampling are not in it."""

    def __init__(self, seconds: float, step: int):
        self.before = seconds
        self.last = (seconds, step)

    def start(self) -> None:
        """Starts counting."""
        self.origin = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self.before + time.perf_counter() - self.origin

    def rate(self, step: int) -> float:
        """Steps a second since this was last asked."""
        (seconds, before), self.last = self.last, (self.seconds, step)
        return (step - before) / (self.last[0] - seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens inside."""
        start = time.perf_counter()
        yield
        self.origin += time.perf_counter() - start


class MetricsWriter:
    """Appends to a run's metrics.jsonl and TensorBoard files. A continued run first drops what was written after the
    checkpoint that it continues from, so that each step stands there once."""

    def __init__(self, run_dir: str | Path, start_step: int):
        self.path = Path(run_dir) / "metrics.jsonl"
        if self.path.exists():
            kept = [json.dumps(line) + "\n" for line in read_metrics(run_dir) if line["step"] <= start_step]
            partial = self.path.with_suffix(".partial")
            partial.write_text("".join(kept))
            partial.rename(self.path)
        self.file = self.path.open("a")
        self.tensorboard = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=start_step + 1)

    def write(self, line: dict) -> None:
        """One line; its numbers also as TensorBoard scalars, those of a nested dict as `key/subkey`."""
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        for key, value in line.items():
            numbers = {f"{key}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
            for name, number in numbers.items():
                if isinstance(number, (int, float)) and name != "step":
                    self.tensorboard.add_scalar(name, number, line["step"])
        self.tensorboard.flush()

    def write_samples(self, samples: list[str], step: int) -> None:
        """Sampled texts, to TensorBoard."""
        for i, sample in enumerate(samples):
            self.tensorboard.add_text(f"samples/{i}", f"```\n{sample}\n```", step)

    def close(self, hparams: dict, results: dict) -> None:
        """Ends the run: its options as hparams, with their results."""
        flat = {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in hparams.items()}
        self.tensorboard.add_hparams(flat, results, name="hparams")
        self.tensorboard.close()
        self.file.close()


def read_metrics(run_dir: str | Path) -> list[dict]:
    """The lines of metrics.jsonl, without the one that a kill may have left half written."""
    lines = []
    for text in (Path(run_dir) / "metrics.jsonl").read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


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
