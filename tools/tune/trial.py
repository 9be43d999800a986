"""Train a short run, in the loop of train.py: it saves checkpoints, resumes, and evaluates on held-out text."""

import math
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.messages import LOGGER
from configs.schema import MEASURED, Config, UserError, with_options
from data.dataset import Text
from data.loader import StepBatches, held_out_batches, local_rows, train_batches
from hosts.stop import Stop
from interchange.growth import initial_state
from run.checkpoint import Checkpoints
from run.folder import Past, RunLock, accept, open_run, require_checkpoints
from run.goodput import Times
from run.hooks.judge import Judge
from run.hooks.log import Log
from run.hooks.save import Save
from run.hooks.watch import Idle, Watch
from run.lines import Events
from run.progress import Progress, Start
from run.saver import Saver
from run.stages import Program, batches_from, compile_stages
from tools.tune.tune_json import Record
from train import take_steps
from training.build import Build, build
from training.mesh import batch_shape, make_mesh
from training.state import stored_as

HELD_OUT = 32  # the most batches of held-out text, whose losses are compared pair by pair
LOGGED = 4  # lines that a trial leaves in metrics.jsonl


class Until(Stop):
    """Asks a loop to stop after a step, or when the command is interrupted."""

    def __init__(self, asked: Stop, last: int):
        super().__init__()
        self.asked, self.last = asked, last
        self.heeded, self.unheeded = asked.heeded, asked.unheeded

    def after(self, step: int) -> bool:
        return self.asked.after(step) or step >= self.last


def again(run: Progress, reason: Exception) -> None:
    """Raise what a trial cannot continue after."""
    raise reason


class Origin(NamedTuple):
    """The checkpoint of another trial that a trial starts from."""

    folder: Path
    """The other trial's folder."""
    saved: int
    """The checkpoint's step."""
    step: int
    """The checkpoint's step in the trial's own steps, which may have another size."""


class Context:
    """The context that all stages share."""

    def __init__(self, config: Config, folder: Path, record: Record, text: Text, stop: Stop):
        self.config, self.folder, self.record, self.text, self.stop = config, folder, record, text, stop

    def batches(self, built: Build) -> StepBatches:
        """Return the run's batches from its first row on, in a build's shape."""
        rows = local_rows(built.batch_shape, built.batch_sharding)
        text, seed = self.text, self.config.seed
        return StepBatches(text.train, text.mixture, seed, built.batch_shape, rows, text.document_bos, 0)

    @cached_property
    def held_out(self) -> tuple[Any, list[Any], Any]:
        """Return the evaluation's program, held-out batches of a micro-batch's rows, and its abstract parameters."""
        built = build(self.config)
        shape, token_bytes = (1, *built.batch_shape[1:]), self.text.tokenizer.token_bytes
        tokens, text = held_out_tokens(self.config), self.text
        batches, _ = held_out_batches(
            text.val, text.weights, tokens, token_bytes, shape, built.batch_sharding, text.document_bos
        )
        return built.eval_step, batches, built.abstract_state.params

    def evaluated(self, params: dict) -> list[float]:
        """Return the mean loss of each held-out batch."""
        eval_step, batches, abstract = self.held_out
        params = stored_as(params, abstract)  # a trial's mesh may be another
        sums = [eval_step(params, batch) for batch in batches]
        return [float(loss.sum()) / max(int(tokens.sum()), 1) for loss, tokens in sums]

    def train(self, name: str, config: Config, until: int, origin: Origin | None = None) -> dict | None:
        """Train in the folder `name` up to step `until` of `config.steps`: a run like train.py's, which tools.report
        shows and which resumes. Return its parameters, or None if it gave up because too many steps were skipped. Raise
        SystemExit if the command was asked to stop."""
        run_dir = self.folder / name
        built = build(trial_config(config, run_dir, until - (origin.step if origin else 0)))
        with RunLock(run_dir) as lock:
            past = Past(*open_run(built.config, self.text.fingerprint, False, lock))
            require_checkpoints(built.config, past)
            return self._train(name, built, until, origin)

    def _train(self, name: str, built: Build, until: int, origin: Origin | None) -> dict | None:
        config, run_dir = built.config, built.config.run_dir
        saved = lambda step: Events(run_dir).add("saved", step)
        checkpoints = Saver(run_dir, config.checkpoint, on_saved=saved)
        begins = self._start(built, checkpoints, origin)
        if begins.step >= until:
            checkpoints.close()
            return begins.state.params
        LOGGER.info(f"{name}: steps {begins.step + 1} to {until}")
        times = Times()
        programs: list[Program] = []
        compile_stages(programs, [built], begins.step, times)
        accept(config, self.text.fingerprint, [], begins.step, begins.position)
        batches = batches_from(begins, [built], self.text)
        progress = Progress(config, begins, batches)
        start = lambda begins: (progress, train_batches(batches, built.batch_sharding, config.data.workers))
        watch, idle = Watch(config, times), Idle(times)
        log = Log(built, watch, lambda position: {}, None)
        save = Save(config, checkpoints, self.text.fingerprint, watch)
        hooks = [watch, idle, log, Judge(config, log, save, self.text.seen), save]
        run, gave_up = take_steps(start, programs, idle, hooks, Until(self.stop, until), again)
        checkpoints.close()
        if gave_up:
            LOGGER.info(f"{name}: {gave_up}")
            return None
        if run.step < until:
            LOGGER.info(f"stopped in {name} after step {run.step}; the same command continues from there")
            raise SystemExit(self.stop.agreed_code())
        return run.state.params

    def _start(self, built: Build, checkpoints: Saver, origin: Origin | None) -> Start:
        restored = checkpoints.restore_newest(built.abstract_state)
        if restored is not None:
            state, facts = restored
            return Start(state, facts["step"], facts["tokens"], facts["position"], facts["seconds"])
        if origin is None:
            return Start(initial_state(built, self.text.tokenizer))
        theirs = Checkpoints(origin.folder)
        if origin.saved not in theirs.steps:
            raise UserError(f"{origin.folder} no longer has the checkpoint of step {origin.saved}; give another --out")
        state, facts = theirs.restore(origin.saved, built.abstract_state)
        state = state._replace(step=np.int32(origin.step))
        return Start(stored_as(state, built.abstract_state), origin.step, facts["tokens"], facts["position"])

    def losses(self, name: str, config: Config, until: int, origin: Origin | None = None) -> dict:
        """Train and evaluate. Return a piece with the losses of the held-out batches, infinite if the run gave up."""
        params = self.train(name, config, until, origin)
        batches = len(self.held_out[1])
        losses = self.evaluated(params) if params is not None else [math.inf] * batches
        steps = until - (origin.step if origin else 0)
        return {"losses": losses, "tokens": steps * config.batch.tokens_per_step + evaluation_cost(self.config)}

    def forget(self, name: str) -> None:
        """Delete the checkpoints of a trial whose piece is recorded."""
        shutil.rmtree(self.folder / name / "checkpoints", ignore_errors=True)


def held_out_tokens(config: Config) -> int:
    """Return the tokens of held-out text that trials are compared on."""
    _, rows, length = batch_shape(config.batch, make_mesh(config.mesh))
    return min(config.eval.tokens, HELD_OUT * rows * length)


def evaluation_cost(config: Config) -> int:
    """Return the cost of an evaluation in tokens of training: a forward pass is a third of a step."""
    return held_out_tokens(config) // 3


def trial_config(config: Config, run_dir: Path, steps: int) -> Config:
    """Return a trial's config: one checkpoint and no evaluation in between. Notifications and rollback are off: a
    rollback would change its data."""
    return with_options(
        config,
        MEASURED | {"run_dir": str(run_dir), "log.every_steps": max(1, steps // LOGGED)},
    )
