"""The end of a run: its last message, and the files of a complete run."""

import json
import math
from contextlib import suppress
from pathlib import Path

import jax

from configs.exit_codes import Exit
from configs.files import write_picture, write_whole
from configs.messages import LOGGER
from hosts.stop import Stop
from run.goodput import Times, goodput, summed_up
from run.notify import tell
from run.progress import Progress
from run.record import Events, of_average, read_metrics
from training.state import params_sha256


def finish(run: Progress, gave_up: str, stop: Stop, times: Times) -> Exit:
    """Print how the run ended, and return its exit code. Write the summary, the picture and the samples of a complete
    run. `gave_up`: why another step makes no sense, or empty."""
    config, run_dir, code = run.config, Path(run.config.run_dir), Exit.COMPLETE
    if gave_up:
        code = Exit.FAILED
        LOGGER.error(f"stopped at step {run.step}: {gave_up}")
    elif run.stopping:
        code = stop.agreed_code()
        LOGGER.info(
            f"stopped after step {run.step} of {config.steps}, saved in {run_dir}; the same command continues it"
        )
    else:
        digests = {"params_sha256": params_sha256(run.state.params, config.model)}  # gathered from all processes
        if run.state.average:
            digests["average_sha256"] = params_sha256(run.state.average, config.model)
    if jax.process_index() > 0:
        return code
    with suppress(OSError):  # a full disk may be why it stopped, as reported
        Events(run_dir).add("stop", run.step, code=code, **times.note())
    spent = goodput(Events(run_dir).read())
    if code != Exit.COMPLETE:
        LOGGER.info(summed_up(spent))
        tell(config, "failure" if gave_up else "end", gave_up or f"stopped, exit code {int(code)}", run.step)
        return code

    skipped, tokens, seconds = int(run.state.skipped_steps), run.tokens_after(run.step), run.clock.seconds
    summary, samples = summarize(run_dir, config.steps, tokens, seconds, skipped_steps=skipped, **digests)
    summary["goodput"] = spent
    plot_loss(run_dir)
    # The last file: it marks the run as complete.
    write_whole(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    for sample in samples:
        print(f"---\n{sample}")
    print(
        f"---\n{config.name}: {config.steps} steps, {tokens:,} tokens in {seconds:.0f} s of training\n"
        f"training loss {summary['loss'] or math.nan:.4f}, validation loss {summary['val_loss'] or math.nan:.4f}, "
        f"{summary['val_bpb'] or math.nan:.4f} bits per byte{of_average(summary)}\n"
        f"{summed_up(spent)}\n"
        f"in {run_dir}: loss.png, summary.json, metrics.jsonl, tensorboard/, checkpoints/, tokenizer/\n"
        f"sample:       python sample.py --run_dir={run_dir} --prompt='...'\n"
        f"train longer: the same command with --steps={2 * config.steps} --accept_changes"
    )
    tell(config, "end", f"complete, validation loss {summary['val_loss'] or math.nan:.4f}", config.steps)
    return code


def summarize(run_dir: str | Path, steps: int, tokens: int, seconds: float, **more: int | str) -> tuple[dict, list]:
    """Return a run's summary, with the newest losses (and CORE) of metrics.jsonl, and the newest samples."""
    lines = read_metrics(run_dir)
    newest = lambda name: next((line[name] for line in reversed(lines) if line.get(name) is not None), None)
    losses = {name: newest(name) for name in ("loss", "val_loss", "val_bpb", "val_bpb_stderr")}
    evaluation = next((line for line in reversed(lines) if "val_loss" in line), {})
    losses |= {name: value for name, value in evaluation.items() if name.startswith("average_")}
    losses |= {"core": core} if (core := newest("core")) is not None else {}
    rate = tokens / seconds if seconds else None
    summary = {"steps": steps, "tokens": tokens, "seconds": seconds, "tokens_per_second": rate, **losses, **more}
    return summary, newest("samples") or []


def plot_loss(run_dir: str | Path) -> Path:
    """Draw training and validation loss against tokens. Return the picture's path."""
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
    if average := course("average_val_loss"):
        axes.plot(*zip(*average), color="tab:green", marker="x", label=f"with the average ({average[-1][1]:.3f})")
    axes.set(xlabel="tokens", ylabel="loss (nats a token)", title=Path(run_dir).name)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    if train or val:
        axes.legend()
    path = Path(run_dir) / "loss.png"
    write_picture(path, figure)
    return path
