"""A session of a run, from one start to its end: what train.py does before the first step (the text, the folder, the
checkpoints, hosts that agree, the first state), and after the last (a message, and the files of a complete run)."""

import json
import math
import subprocess
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from math import ceil
from pathlib import Path
from shlex import quote
from typing import Any

import jax
from jax.sharding import Mesh

from configs.command_line import Exit
from configs.files import cache_dir, write_picture, write_whole
from configs.messages import LOGGER
from configs.retry import patiently
from configs.schema import Config, UserError, free_to_change, options
from configs.validation import validate
from data.dataset import Text, open_text
from evaluation.evaluator import Evaluator
from hosts.distributed import check_hosts_agree, on_first_process
from hosts.preflight import ROOT, code_digest, preflight
from hosts.runtime import describe_processes, versions
from hosts.stop import Stop, limited
from interchange.init_from import (
    initial_state,
    require_moments,
    require_same_network,
    require_same_vocabulary,
    why_no_training,
)
from model.gpt import parameter_counts
from run.checkpoint import whole_steps
from run.folder import Past, RunLock, accept, checkpoint_folder, open_run, require_checkpoints, run_id
from run.notify import tell
from run.progress import Progress, Start
from run.record import Events, Record, read_metrics, scores, starts_in_vain
from run.saver import Saver
from run.times import Times, seconds_by_activity
from training.build import Build, build
from training.mesh import make_mesh, sizes_of
from training.state import params_sha256

STARTS = 10  # consecutive processes without a newer checkpoint, after which the run is given up


def check_processes(config: Config) -> None:
    """Log the run's processes and devices. Raise UserError if the processes have different configs."""
    LOGGER.info(describe_processes(make_mesh(config.mesh)))
    check_hosts_agree("their config", json.dumps(asdict(config)))


def open_training(config: Config) -> tuple[Build, Text, Evaluator]:
    """Return the run's build, with the steps of `epochs` for `steps=0`, the text that it trains on, and
    what evaluates on its held-out part. UserError if the text, or the network in `init_from`, does not fit the run."""
    built = build(config)
    config, (micro_batches, rows, length) = built.config, built.batch_shape
    where = config.checkpoint.folder or config.run_dir
    begun = lambda: patiently(where, lambda: whole_steps(checkpoint_folder(config)))
    starts_from = config.init_from and not on_first_process(begun)
    if starts_from:  # before text is prepared, which can take hours
        require_same_network(config)
        if config.init_optimizer:
            require_moments(config)
    no_training = why_no_training(config) if starts_from else ""
    text = open_text(config.data, config.model.vocab_size, length, micro_batches * rows, cache_dir(), no_training)
    check_hosts_agree("their text", text.fingerprint)
    rows_per_step = micro_batches * rows
    rows = config.steps * rows_per_step
    if not config.steps:
        rows = ceil(config.epochs * sum(map(len, text.train)))  # the last step may go beyond them
        config = replace(config, steps=ceil(rows / rows_per_step))
        validate(config)
        built = build(config)
    LOGGER.info(text.outlook(rows, length, config.data.max_epochs))
    if text.too_long:
        LOGGER.info(text.too_long)
    LOGGER.info(text.validation(config.eval.tokens, length))
    if text.tokenizer.vocab_size < config.model.vocab_size:
        known = f"{text.tokenizer.vocab_size:,} of --model.vocab_size={config.model.vocab_size:,} tokens"
        LOGGER.info(f"the text's tokenizer has {known}: the others are never seen")
    evaluator = Evaluator(built, text)
    if config.eval.tasks:
        check_hosts_agree("their bundle", evaluator.benchmarks.facts["bundle"])
    if starts_from:
        require_same_vocabulary(config, text.tokenizer)
        LOGGER.info(describe_start(config))
    return built, text, evaluator


def open_folder(
    built: Build, text: Text, accept_changes: bool, resume_step: int | None, lock: RunLock, record: Record
) -> tuple[Past, Saver]:
    """Claim the run's folder and check the hosts. Return what is known of the run, and its checkpoints, back at
    `resume_step`. UserError if the folder holds another run, or if the hosts cannot train together."""
    config = built.config
    # On one process: an NFS client that looks too early does not see the folder for a while.
    on_first_process(lambda: text.tokenizer.require_same_in(Path(config.run_dir) / "tokenizer"))
    past = Past(*on_first_process(lambda: open_run(config, text.fingerprint, accept_changes, lock)))
    on_first_process(lambda: patiently(config.run_dir, lambda: require_checkpoints(config, past)))
    preflight(config, built.mesh, text.fingerprint, text.tokenizer.sha256)  # before anything that needs the devices
    with limited(config.hang, "opening the checkpoints"):
        return past, open_checkpoints(config, record, resume_step)


def open_checkpoints(config: Config, record: Record, resume_step: int | None = None) -> Saver:
    """Return the run's checkpoints, back at `resume_step`. Raise UserError if they have more steps than the run should
    have."""
    run_dir = Path(config.run_dir)
    on_saved = lambda step: Events(run_dir).add("saved", step)
    checkpoints = Saver(config.checkpoint.folder or run_dir, config.checkpoint, record, on_saved, scores(run_dir))
    if not checkpoints.steps and config.resume == "must":
        raise UserError(f"--resume=must, but {run_dir} holds no checkpoint")
    if resume_step is not None:
        go_back_to(resume_step, config, checkpoints)
    if checkpoints.newest > config.steps:
        raise UserError(f"--steps={config.steps}, but {run_dir} has come to step {checkpoints.newest} already")
    return checkpoints


def go_back_to(step: int, config: Config, checkpoints: Saver) -> None:
    """Set aside the checkpoints newer than `step`'s, and record it. Do nothing if the same command did so before: with
    the same options the run would take the same course. Raise UserError if there is no such checkpoint."""
    events = Events(config.run_dir)
    deciding = {name: value for name, value in options(config).items() if not free_to_change(name)}
    asked = {"step": step, "options_sha256": sha256(json.dumps(deciding).encode()).hexdigest()}
    went_back = on_first_process(lambda: [event for event in events.read() if event["event"] == "went_back"])
    if went_back and {name: went_back[-1][name] for name in asked} == asked:
        LOGGER.info(f"--resume_step={step}: the run went back there in an earlier start, and continues")
        return
    if step not in checkpoints.steps:
        there = ", ".join(map(str, checkpoints.steps)) or "none"
        raise UserError(f"--resume_step={step}: {config.run_dir} has no such checkpoint; it has {there}")
    checkpoints.set_aside_after(step)
    on_first_process(lambda: events.add("went_back", **asked))


def why_nothing_to_do(config: Config, past: Past, checkpoints: Saver) -> str:
    """Return a message if the run is complete; empty otherwise."""
    if not past.finished == checkpoints.newest == config.steps:
        return ""
    longer = f"--steps={2 * config.steps} --accept_changes"
    return f"{config.run_dir} is complete: {config.steps} steps; a longer run: {longer}"


def begin(config: Config, step: int) -> bool:
    """Record that a process begins after `step`. Return False if `STARTS` consecutive starts brought no newer
    checkpoint; the next start then counts from 0. Only the first process may call it."""
    events = Events(config.run_dir)
    if starts_in_vain(events.read(), step) >= STARTS:
        events.add("stop", step, code=Exit.FAILED)
        return False
    events.add("begun", step)
    return True


def why_given_up(config: Config, newest: int, record: Record) -> str:
    """Record that a process begins after the checkpoint of step `newest`. Return a message if `STARTS` began there in
    vain; empty otherwise."""
    begun = on_first_process(partial(begin, config, newest))
    copy_record(config, record)  # so that a machine without this one's disk counts the same starts
    if begun:
        return ""
    return (
        f"{STARTS} starts in a row brought no checkpoint newer than step {newest}'s: the run is given up; once "
        "its cause is corrected, the same command continues it"
    )


def resume(built: Build, checkpoints: Saver, times: Times) -> Start:
    """Return the state and the data's position: of the newest checkpoint that can be read, or before step 0."""
    config = built.config
    with times.during("restore" if checkpoints.newest else "start"), limited(config.hang, "restoring"):
        restored = checkpoints.restore_newest(built.abstract_state, on_first_process(partial(run_id, config.run_dir)))
        if restored is None:
            return Start(jax.block_until_ready(initial_state(built)))  # making it is not training
    state, facts = restored
    step = facts["step"]
    LOGGER.info(f"continuing after step {step} of {config.steps}")
    return Start(state, step, facts["tokens"], facts["seconds"], tuple(facts["losses"]))


def made_with(mesh: Mesh) -> dict[str, Any]:
    """Return the facts of a start for its event: the code's hash, versions, devices, mesh."""
    devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}, {jax.process_count()} process(es)"
    facts = {"code_hash": code_digest(), "versions": versions(), "devices": devices, "mesh": sizes_of(mesh)}
    git = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]
    with suppress(OSError, subprocess.SubprocessError):  # a copy without git
        status = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout
        facts["dirty"] = bool(status)
    return facts


def record_start(built: Build, text: Text, changes: list[str], start: Start, times: Times) -> None:
    """Record that the run continues from `start`, the changed options, and its tokenizer."""
    config = built.config
    with times.during("start"):
        facts = made_with(built.mesh) | {"parameters": sum(parameter_counts(config.model).values())}
        on_first_process(partial(accept, config, text.fingerprint, changes, start.step, start.tokens, **facts))
        if jax.process_index() == 0:
            text.tokenizer.save(Path(config.run_dir) / "tokenizer")


def copy_record(config: Config, record: Record) -> None:
    """Copy the run's record to where its checkpoints are, if that is not the run's folder. Every process must call it,
    for as long as its disk or store needs."""
    on_first_process(lambda: patiently(config.checkpoint.folder, record.copy))


def describe_start(config: Config) -> str:
    """Return a line on the start of a run with `init_from`. At full rates without a warmup, it advises on new text."""
    line, optimizer = f"starting from the network in {config.init_from}", config.optimizer
    if optimizer.rate_factor < 1 or optimizer.schedule.warmup_steps:
        return line
    gentle = f"--optimizer.rate_factor=0.1 --optimizer.schedule.warmup_steps={-(-config.steps // 20)}"
    return f"{line}, at full rates: it forgets much of its old text; to keep it, train with {gentle}"


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
        digest = params_sha256(run.state.params, config.model)  # gathered from all processes
    if jax.process_index() > 0:
        return code
    with suppress(OSError):  # a full disk may be why it stopped, as reported
        Events(run_dir).add("stop", run.step, code=code, seconds=times.so_far())
    seconds_of = seconds_by_activity(Events(run_dir).read())
    spent = "seconds: " + ", ".join(f"{activity} {seconds:,.1f}" for activity, seconds in seconds_of.items())
    if code != Exit.COMPLETE:
        LOGGER.info(spent)
        tell(config, "failure" if gave_up else "end", gave_up or f"stopped, exit code {int(code)}", run.step)
        return code

    skipped, tokens, seconds = int(run.state.skipped_steps), run.tokens_after(run.step), run.clock.seconds
    summary, samples = summarize(run_dir, config.steps, tokens, seconds, skipped_steps=skipped, params_sha256=digest)
    summary["seconds_by_activity"] = seconds_of
    plot_loss(run_dir)
    # The last file: it marks the run as complete.
    write_whole(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    for sample in samples:
        print(f"---\n{sample}")
    print(
        f"---\n{config.name}: {config.steps} steps, {tokens:,} tokens in {seconds:.0f} s of training\n"
        f"training loss {summary['loss'] or math.nan:.4f}, validation loss {summary['val_loss'] or math.nan:.4f}, "
        f"{summary['val_bpb'] or math.nan:.4f} bits per byte\n"
        f"{spent}\n"
        f"in {run_dir}: loss.png, summary.json, metrics.jsonl, tensorboard/, checkpoints/, tokenizer/\n"
        f"sample:       python sample.py --run_dir={quote(config.run_dir)} --prompt='...'\n"
        f"train longer: the same command with --steps={2 * config.steps} --accept_changes"
    )
    tell(config, "end", f"complete, validation loss {summary['val_loss'] or math.nan:.4f}", config.steps)
    return code


def summarize(run_dir: str | Path, steps: int, tokens: int, seconds: float, **more: int | str) -> tuple[dict, list]:
    """Return a run's summary, with the newest losses (and CORE) of metrics.jsonl, and the newest samples."""
    lines = read_metrics(run_dir)
    newest = lambda name: next((line[name] for line in reversed(lines) if line.get(name) is not None), None)
    losses = {name: newest(name) for name in ("loss", "val_loss", "val_bpb", "val_bpb_stderr")}
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
    axes.set(xlabel="tokens", ylabel="loss (nats a token)", title=Path(run_dir).name)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    if train or val:
        axes.legend()
    path = Path(run_dir) / "loss.png"
    write_picture(path, figure)
    return path
