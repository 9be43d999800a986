"""One run, from top to bottom: python train.py --config=configs/small.py. The same command again continues it."""

import dataclasses
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
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
from configs.schema import Config
from data.dataset import open_text
from data.loader import train_batches
from evaluation.evaluator import Evaluator
from hosts.cluster import Cluster
from hosts.preflight import preflight
from hosts.runtime import (
    Stop,
    cache_dir,
    check_hosts_agree,
    describe_processes,
    on_first_process,
    run_command,
    start_jax,
)
from hosts.watchdog import limited
from interchange.init_from import require_same_network, require_same_vocabulary, why_no_training
from model.flops import parameter_counts
from run.checkpoint import whole_steps
from run.describe import describe, describe_attention, describe_start
from run.events import Events
from run.finish import finish
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
from run.goodput import Times
from run.hooks.evaluate import Evaluate
from run.hooks.history import History
from run.hooks.hook import Hook
from run.hooks.idle import Idle
from run.hooks.judge import Judge
from run.hooks.log import Log
from run.hooks.profile import Profile
from run.hooks.save import Save
from run.hooks.watch import Watch
from run.notify import tell_of_failure
from run.out_of_memory import explain_out_of_memory
from run.progress import GaveUp, Jumped, Progress, due_after
from run.record import Record
from run.resume import open_checkpoints, resume
from run.rollback import roll_back
from run.stages import Program, batches_from, compile_stages, step_after
from training.build import build_stages
from training.mesh import cost_of_slow_links, make_mesh


@dataclass(frozen=True)
class Arguments:
    """Options of this command, not of the run."""

    accept_changes: bool = False
    """Continue a run although options that make its result differ from its first start's. What changed is recorded in
    config.json and metrics.jsonl."""


def take_steps(
    start: Callable[[], tuple[Progress, Iterator[Any]]],
    programs: list[Program],
    idle: Idle,
    hooks: Sequence[Hook],
    stop: Stop,
    go_back: Callable[[Progress, Jumped], Any],
) -> tuple[Progress, str]:
    """Take steps until the last, or until somebody asks the run to stop. Return where it is then, and, if a hook gave
    up, why. `start` returns where the run is and the batches from there on; `go_back` puts a rollback on record."""
    run, batches = start()
    with ExitStack() as opened, stop.heeded():
        begin_all(hooks, run, opened)
        try:
            while not run.is_last:
                try:
                    for hook in hooks:
                        hook.before_step(run)
                    batch = idle.next_of(batches, run)
                    train_step = step_after(programs, run.step, run.config.diagnostics.every_steps)
                    run.state, metrics = train_step(run.state, batch)
                    run.step += 1
                    run.stopping = stop.after(run.step)
                    due = due_after(run.step, run.config, last=run.is_last, soon=run.save_soon)
                    for hook in hooks:
                        hook.after_step(run, metrics, due)
                except Jumped as jump:
                    opened.close()
                    with stop.unheeded():
                        go_back(run, jump)
                        if run.stopping:
                            break
                        run.drop_state()
                        run, batches = start()
                    begin_all(hooks, run, opened)
            for hook in hooks:
                hook.finish(run)
        except GaveUp as error:
            return run, str(error)
    return run, ""


def begin_all(hooks: Sequence[Hook], run: Progress, opened: ExitStack) -> None:
    """Let the hooks begin. `opened` closes those that did."""
    for hook in hooks:
        hook.begin(run)
        opened.callback(hook.close)
    gc.freeze()  # so that no collection in the loop looks through all that was set up: 0.3 s


def train(config: Config, cluster: Cluster, accept_changes: bool, lock: RunLock, record: Record, stop: Stop) -> Exit:
    """Train, or continue to train, until `config.steps`."""
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
    programs: list[Program] = []
    with explain_out_of_memory(mistake=True):
        compile_stages(programs, builds, checkpoints.newest, times, say)
    if slow := cost_of_slow_links(built.mesh, config.model, built.batch_shape):
        say(slow)

    watch, idle = Watch(config, times), Idle(times)
    log = Log(built, watch, lambda position: text.epochs(position // length), record, say)
    save = Save(config, checkpoints, text.fingerprint, watch, say)
    judge = Judge(config, log, save, text.seen, say)
    evaluate = Evaluate(config, evaluator, evaluator.tasks, checkpoints, log, say)
    changes = list(past.changes)
    hooks = [watch, idle, Profile(config, say), log, History(log, changes), judge, save, evaluate]

    def start() -> tuple[Progress, Iterator[Any]]:
        """From the newest checkpoint that can be read, or from step 0."""
        restoring = "restore" if checkpoints.newest else "start"
        with times.during(restoring), limited(config.hang, "restoring"):
            begins = resume(built, checkpoints, on_first_process(Events(config.run_dir).read), say)
        compile_stages(
            programs, builds, begins.step, times, say
        )  # nothing, unless the newest checkpoint could not be read
        facts = times.note() | made_with(built.mesh) | {"parameters": sum(parameter_counts(config.model).values())}
        place = changes, begins.step, begins.position
        on_first_process(partial(accept, config, text.fingerprint, *place, **facts))
        if jax.process_index() == 0:
            text.tokenizer.save(Path(config.run_dir) / "tokenizer")
        batches = batches_from(begins, builds, text)
        return Progress(config, begins, batches), train_batches(batches, built.batch_sharding, config.data.workers)

    with explain_out_of_memory(), times.during("steps"):
        run, gave_up = take_steps(start, programs, idle, hooks, stop, partial(roll_back, save, times, say))
    if gave_up:
        gave_up += f"; {save.described()}"
    with times.during("saving"), limited(config.hang, "the end of saving"):
        checkpoints.close()
    code = finish(run, gave_up, stop, times, say)
    on_first_process(lambda: patiently(config.checkpoint.folder, record.copy))
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
