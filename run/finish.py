"""The end of a run: its last message, and the files of a complete run."""

import math
from contextlib import suppress
from pathlib import Path

import jax

from configs.exit_codes import Exit
from configs.messages import LOGGER
from hosts.stop import Stop
from run.events import Events
from run.goodput import Times, goodput, summed_up
from run.lines import of_average
from run.metrics import plot_loss, summarize, write_summary
from run.notify import tell
from run.progress import Progress
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
    write_summary(run_dir, summary)
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
