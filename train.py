"""One run, from top to bottom: python train.py --config=configs/small.py. The same command again continues it."""

if __name__ == "__main__":
    from configs.interrupt import end_at_interrupt

    end_at_interrupt()

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from configs.command_line import parse
from configs.exit_codes import Exit
from configs.ramp import Ramp
from configs.retry import patiently
from configs.schema import Config, UserError
from data.dataset import open_text
from data.loader import train_batches
from evaluation.evaluator import Evaluator
from interchange.init_from import read_params, require_same_network, require_same_vocabulary, why_no_training
from model.flops import parameter_counts
from model.kernels import attention_kernel, described
from model.parallel import compute_capability
from model.shapes import window_of
from planning.measured import does_not_fit
from program.machines import VECTOR_MEMORY, exceeds_vector_memory
from run.checkpoint import Checkpoints, whole_steps
from run.cluster import Cluster
from run.events import Events, rollbacks_to
from run.folder import (
    STARTS,
    Past,
    RunLock,
    accept,
    begin,
    checkpoint_folder,
    made_with,
    open_run,
    require_checkpoints,
)
from run.goodput import Times, goodput, summed_up
from run.lines import read_metrics, scores
from run.loop import Finished, GaveUp, Jumped, Loop, Start, Stopped
from run.metrics import plot_loss, summarize, write_summary
from run.notify import tell, tell_of_failure
from run.preflight import preflight
from run.record import Record
from run.runtime import Stop, cache_dir, check_hosts_agree, describe_processes, on_first_process, run_command, start_jax
from run.stages import Programs, batches_from
from run.watchdog import limited
from training.build import Build, build_stages
from training.mesh import cost_of_slow_links, islands, make_mesh
from training.state import params_sha256


@dataclass(frozen=True)
class Arguments:
    """Options of this command, not of the run."""

    accept_changes: bool = False
    """Continue a run although options that make its result differ from its first start's. What changed is recorded in
    config.json and metrics.jsonl."""


def train(config: Config, cluster: Cluster, accept_changes: bool, lock: RunLock, record: Record, stop: Stop) -> Exit:
    """Trains, or goes on training, until `config.steps`."""
    times = Times()
    say = tqdm.write if jax.process_index() == 0 else lambda text: None  # which leaves the progress bar whole
    say(describe_processes(cluster, make_mesh(config.mesh)))
    check_hosts_agree("their config", json.dumps(dataclasses.asdict(config)))

    # What is trained, and on what.
    builds = build_stages(config)
    built = builds[-1]  # for all that does not depend on the size of a step
    config = built.config
    micro_batches, rows, length = built.batch_shape
    starts_from = config.init_from and not on_first_process(lambda: whole_steps(checkpoint_folder(config)))
    if starts_from:  # before text is prepared, which can take hours
        require_same_network(config)
    no_training = why_no_training(config) if starts_from else ""
    text = open_text(config.data, config.model.vocab_size, length, micro_batches * rows, cache_dir(), no_training)
    check_hosts_agree("their text", text.fingerprint)
    say(text.outlook(Ramp.of(config.batch).tokens(config.steps) // length, length, config.data.max_epochs))
    say(text.validation(config.eval.tokens, length))
    if text.tokenizer.vocab_size < config.model.vocab_size:
        known = f"{text.tokenizer.vocab_size:,} of --model.vocab_size={config.model.vocab_size:,} tokens"
        say(f"the text's tokenizer has {known}: the others are never seen")
    evaluator = Evaluator(built, text)
    if config.eval.tasks:
        check_hosts_agree("their bundle", evaluator.benchmarks.facts["bundle"])

    # The run's folder, which no other process may write to meanwhile, and what has been saved of the run.
    if starts_from:
        require_same_vocabulary(config, text.tokenizer)
        say(describe_start(config))
    # On one process: an NFS client that looks before the folder is there does not see it for a while.
    on_first_process(lambda: text.tokenizer.require_same_in(Path(config.run_dir) / "tokenizer"))
    past = Past(*on_first_process(lambda: open_run(config, text.fingerprint, accept_changes, lock)))
    # Before the preflight, which makes the folder of checkpoints if it is not there.
    on_first_process(lambda: require_checkpoints(config, past))
    preflight(config, built.mesh, text.fingerprint, text.tokenizer.sha256)  # before anything that needs the devices
    with limited(config.hang, "opening the checkpoints"):
        checkpoints = open_checkpoints(config, record)
    if past.finished == checkpoints.newest == config.steps:
        longer = f"--steps={2 * config.steps} --accept_changes"
        say(f"{config.run_dir} is complete: {config.steps} steps; a longer run: {longer}")
        on_first_process(lambda: patiently(config.checkpoint.folder, record.copy))
        return Exit.COMPLETE

    begun = on_first_process(partial(begin, config, checkpoints.newest))
    # So that a machine without this one's disk counts the same starts.
    on_first_process(lambda: patiently(config.checkpoint.folder, record.copy))
    if not begun:
        say(
            f"{STARTS} starts in a row brought no checkpoint newer than that of step {checkpoints.newest}: the run is "
            "given up; once its cause is mended, the same command continues it"
        )
        return Exit.FAILED
    say(describe(builds))
    say(describe_attention(built))
    programs = Programs(builds, times, say)
    with explain_out_of_memory(config, mistake=True):
        programs.compile(checkpoints.newest)
    if slow := cost_of_slow_links(built.mesh, config.model, built.batch_shape):
        say(slow)
    outcome = None
    while outcome is None:
        restoring = "restore" if checkpoints.newest else "start"
        with times.during(restoring), limited(config.hang, "restoring"), explain_out_of_memory(config):
            start = resume(built, checkpoints, past, say)
        programs.compile(start.step)  # nothing, unless the newest checkpoint could not be read
        facts = times.note() | made_with(built.mesh) | {"parameters": sum(parameter_counts(config.model).values())}
        on_first_process(partial(accept, config, text.fingerprint, past.changes, start.step, start.position, **facts))
        if jax.process_index() == 0:
            text.tokenizer.save(Path(config.run_dir) / "tokenizer")
        batches = batches_from(start, builds, text)
        loop = Loop(
            built,
            start,
            programs.train_step,
            evaluator,
            lambda i, batches=batches: text.seen(batches.row_numbers(i)),
            checkpoints,
            text.fingerprint,
            stop,
            say,
            times,
            measuring_step=programs.measuring_step if config.diagnostics.every_steps else None,
            measure_tasks=evaluator.tasks,
            epochs=lambda position: text.epochs(position // length),
        )
        write_what_happened(loop, past)
        with explain_out_of_memory(config):
            ended = loop.run(train_batches(batches, built.batch_sharding, config.data.workers))
        if isinstance(ended, Jumped) and jax.process_index() == 0:
            Events(config.run_dir).add("running", loop.step, **times.note())  # these steps will be done again
        outcome = roll_back(config, ended, checkpoints, loop, say) if isinstance(ended, Jumped) else ended
        if outcome is None:
            loop.drop_state()  # the devices may not hold two
        past = past._replace(changes=[], events=on_first_process(Events(config.run_dir).read))
    with times.during("saving"), limited(config.hang, "the end of saving"):
        checkpoints.close()
    code = finish(config, outcome, loop, stop, say)
    on_first_process(lambda: patiently(config.checkpoint.folder, record.copy))
    return code


@contextmanager
def explain_out_of_memory(config: Config, mistake: bool = False) -> Iterator[None]:
    """Where the devices' memory does not hold what is done inside, says what it is, and what would fit: a UserError
    before anything was computed (`mistake`), later a note on the error, which ends the run with code 1."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if exceeds_vector_memory(str(error)):
            raise UserError(f"{VECTOR_MEMORY}\n{str(error).splitlines()[0]}") from error
        if "RESOURCE_EXHAUSTED" in str(error):
            devices = jax.devices()
            why = does_not_fit(config, devices[0].device_kind, len(devices), len(islands(devices)))
            if mistake:
                raise UserError(f"{why}\n{str(error).splitlines()[0]}") from error
            error.add_note(why)
        raise


def open_checkpoints(config: Config, record: Record) -> Checkpoints:
    """The run's checkpoints. UserError where they are of more steps than the run is to have."""
    run_dir = Path(config.run_dir)
    on_saved = lambda step: Events(run_dir).add("saved", step)
    checkpoints = Checkpoints(config.checkpoint.folder or run_dir, config.checkpoint, record, on_saved, scores(run_dir))
    if not checkpoints.steps and config.resume == "must":
        raise UserError(f"--resume=must, but {run_dir} holds no checkpoint")
    if checkpoints.newest > config.steps:
        raise UserError(f"--steps={config.steps}, but {run_dir} has come to step {checkpoints.newest} already")
    return checkpoints


def resume(built: Build, checkpoints: Checkpoints, past: Past, say: Callable[[str], Any]) -> Start:
    """The state and the data's position, from the newest checkpoint that can be read, or before step 0."""
    config = built.config
    found = checkpoints.restore_newest(built.abstract_state, say)
    if found is None:
        state = built.create_state()
        if config.init_from:
            state = state._replace(params=read_params(config, built.abstract_state.params))
        return Start(state)
    state, facts = found
    step = facts["step"]
    if "position" not in facts:  # saved before positions were counted in tokens
        tokens_per_step = facts["config"]["batch"]["tokens_per_step"]
        lines = on_first_process(partial(read_metrics, config.run_dir))
        rollbacks = [line["rollback"] for line in lines if "rollback" in line and line["step"] <= step]
        left_out = sum(rollback["skipped_batches"] for rollback in rollbacks)
        facts |= {"tokens": step * tokens_per_step, "position": (step + left_out) * tokens_per_step}
    position = max([facts["position"], *(event["position"] for event in rollbacks_to(past.events, step))])
    say(f"continuing after step {step} of {config.steps}")
    return Start(state, step, facts["tokens"], position, facts["seconds"], tuple(facts["losses"]))


def roll_back(
    config: Config, jumped: Jumped, checkpoints: Checkpoints, loop: Loop, say: Callable[[str], Any]
) -> Stopped | GaveUp | None:
    """Puts on record that the run goes on from its newest checkpoint, without the batches up to the jump's. None where
    it is to do so at once."""
    newest, spike = checkpoints.newest, jumped.spike
    events = on_first_process(Events(config.run_dir).read)
    if len(rollbacks_to(events, newest)) == config.stability.max_rollbacks:
        return GaveUp(spike["step"], f"{config.stability.max_rollbacks} rollbacks to step {newest} did not help")
    on_first_process(lambda: Events(config.run_dir).add("rollback", newest, position=jumped.position, **spike["spike"]))
    loop.writer.close()
    back = f"back to step {newest}, and on without the batches up to that of step {spike['step']}"
    say(back)
    tell(config, "rollback", back, newest)
    return Stopped(newest) if jumped.stopping else None


def write_what_happened(loop: Loop, past: Past) -> None:
    """To metrics.jsonl: options that changed, and rollbacks, each once, whenever the run was killed in between."""
    step, writer = loop.step, loop.writer
    if past.changes:
        writer.write({"step": step, "changes": past.changes})
    written = sum("rollback" in line and line["step"] == step for line in read_metrics(loop.config.run_dir))
    for event in rollbacks_to(past.events, step)[written:]:
        facts = {name: value for name, value in event.items() if name not in ("event", "step", "time")}
        writer.write({"step": step, "rollback": facts})


def describe(builds: list[Build]) -> str:
    """The run in a line, and one more for each stage of a ramp."""
    built, ramp = builds[-1], Ramp.of(builds[-1].config.batch)
    config, sizes = built.config, ["{} micro-batch(es) x {} rows x {} tokens".format(*of.batch_shape) for of in builds]
    run = (
        f"{config.name}: {sum(parameter_counts(config.model).values()):,} parameters, {built.dtype.name}, on "
        f"{built.mesh.size} {built.mesh.devices.flat[0].device_kind} device(s); {config.steps:,} steps, "
        f"{ramp.tokens(config.steps):,} tokens; a step: "
    )
    if not config.batch.ramp:
        return run + sizes[0]
    begins = lambda stage: f"from step {stage.step + 1:,} on, after {stage.tokens:,} tokens"
    last = lambda stage: "" if stage.step < config.steps else "; the run ends before"
    stages = (f"\n  {begins(stage)}: {size}{last(stage)}" for stage, size in zip(ramp.stages, sizes))
    return f"{run}a ramp of {len(sizes)} stages{''.join(stages)}"


def describe_start(config: Config) -> str:
    """Return where a run with `init_from` starts and, at full rates without a warmup, what to try on new text."""
    said, optimizer = f"starting from the network in {config.init_from}", config.optimizer
    if optimizer.rate_factor < 1 or optimizer.warmup_steps:
        return said
    gentle = f"--optimizer.rate_factor=0.1 --optimizer.warmup_steps={-(-config.steps // 20)}"
    return f"{said}, at the full rates: it forgets much of its old text; to keep it, train on with {gentle}"


def describe_attention(built: Build) -> str:
    """Return the kernel that computes attention and, if some blocks have windows, which ones, in a line."""
    config, length, head_dim = built.config, built.batch_shape[2], built.config.model.head_dim
    device, documents = built.mesh.devices.flat[0], config.data.mask_documents
    kernel = attention_kernel(device.platform, compute_capability(), built.dtype.name, length, head_dim, documents)
    windows = "".join("S" if window_of(config.model, layer) else "L" for layer in range(config.model.depth))
    said = f"; windows of the blocks: {windows}" * ("S" in windows)
    return f"attention: {described(kernel, length, head_dim)}{said}"


def finish(
    config: Config, outcome: Finished | Stopped | GaveUp, loop: Loop, stop: Stop, say: Callable[[str], Any]
) -> Exit:
    """Says how the run ended; of a complete one writes the summary, the picture and the samples."""
    run_dir = Path(config.run_dir)
    if isinstance(outcome, GaveUp):
        code = Exit.FAILED
        say(f"stopped at step {outcome.step}: {outcome.reason}")
    elif isinstance(outcome, Stopped):
        code = stop.agreed_code()
        say(f"stopped after step {outcome.step} of {config.steps}, saved in {run_dir}; the same command continues it")
    else:
        code = Exit.COMPLETE
        digest = params_sha256(outcome.state.params, config.model)  # gathered from all processes
    if jax.process_index() > 0:
        return code
    with suppress(OSError):  # a full disk may be why it stopped, which has been said
        Events(run_dir).add("stop", loop.step, code=code, **loop.times.note())
    spent = goodput(Events(run_dir).read())
    if not isinstance(outcome, Finished):
        loop.writer.close()
        say(summed_up(spent))
        failed = outcome.reason if isinstance(outcome, GaveUp) else ""
        tell(config, "failure" if failed else "end", failed or f"stopped, exit code {int(code)}", loop.step)
        return code

    skipped = int(outcome.state.skipped_steps)
    summary, samples = summarize(
        run_dir, config.steps, outcome.tokens, outcome.seconds, skipped_steps=skipped, params_sha256=digest
    )
    summary["goodput"] = spent
    loop.writer.close()
    plot_loss(run_dir)
    write_summary(run_dir, summary)
    for sample in samples:
        print(f"---\n{sample}")
    print(
        f"---\n{config.name}: {config.steps} steps, {outcome.tokens:,} tokens in {outcome.seconds:.0f} s of training\n"
        f"training loss {summary['loss'] or math.nan:.4f}, validation loss {summary['val_loss'] or math.nan:.4f}, "
        f"{summary['val_bpb'] or math.nan:.4f} bits per byte\n"
        f"{summed_up(spent)}\n"
        f"in {run_dir}: loss.png, summary.json, metrics.jsonl, tensorboard/, checkpoints/, tokenizer/\n"
        f"sample:       python sample.py --run_dir={run_dir} --prompt='...'\n"
        f"train longer: the same command with --steps={2 * config.steps} --accept_changes"
    )
    tell(config, "end", f"complete, validation loss {summary['val_loss'] or math.nan:.4f}", config.steps)
    return code


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    record = Record(config.run_dir, config.checkpoint.folder)
    with RunLock(config.run_dir) as lock, Stop() as stop:
        cluster = start_jax()
        with tell_of_failure(config, record):
            return train(config, cluster, arguments.accept_changes, lock, record, stop)


if __name__ == "__main__":
    run_command(main)
