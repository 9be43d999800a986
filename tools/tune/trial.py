"""Train a short run, in the loop of train.py: it saves checkpoints, resumes, and evaluates on held-out text."""

import math
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.messages import LOGGER
from configs.schema import MEASURED, Config, UserError, with_options
from data.dataset import Text
from data.loader import held_out_batches, train_batches
from hosts.stop import Stop
from run import hooks
from run.checkpoint import Checkpoints
from run.folder import RunLock, accept, open_run, require_checkpoints
from run.goodput import Times
from run.programs import batches_after, compile_train_steps
from run.progress import Progress, Start
from run.record import Record as RunRecord
from run.session import open_checkpoints, resume
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


@dataclass
class Context:
    """The context that all stages share."""

    config: Config
    folder: Path
    record: Record
    text: Text
    stop: Stop

    @cached_property
    def held_out(self) -> tuple[Any, list[Any], Any]:
        """Return the evaluation's program, held-out batches of a micro-batch's rows, and its abstract parameters."""
        built, text = build(self.config), self.text
        batches, _ = held_out_batches(
            *(text.val, text.weights, held_out_tokens(self.config), text.tokenizer.token_bytes),
            *((1, *built.batch_shape[1:]), built.batch_sharding, text.document_bos),
        )
        return built.eval_step, batches, built.abstract_state.params

    def losses(self, name: str, config: Config, origin: Origin | None = None) -> list[float]:
        """Return the mean loss of each held-out batch after training `config.steps` steps, infinite if the run gave up.
        Record them as a piece, and delete the checkpoints."""
        begins = origin.step if origin else 0

        def work() -> dict:
            params = self.train(name, config, config.steps, origin)
            losses = [math.inf] * len(self.held_out[1]) if params is None else self.evaluated(params)
            tokens = (config.steps - begins) * config.batch.tokens_per_step + evaluation_cost(self.config)
            return {"losses": losses, "tokens": tokens}

        losses = [float(loss) for loss in self.record.piece(name, work)["losses"]]
        shutil.rmtree(self.folder / name / "checkpoints", ignore_errors=True)
        LOGGER.info(f"{name}: held-out loss {sum(losses) / len(losses):.4f}")
        return losses

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
        lines = max(1, (until - (origin.step if origin else 0)) // LOGGED)
        # One checkpoint, and no evaluation in between. Notifications are off.
        built = build(with_options(config, MEASURED | {"run_dir": str(self.folder / name), "log.every_steps": lines}))
        config, times, text = built.config, Times(), self.text
        with RunLock(config.run_dir) as lock:
            require_checkpoints(config, open_run(config, text.fingerprint, False, lock))
            checkpoints = open_checkpoints(config, RunRecord(config.run_dir))
            if origin and not checkpoints.newest:
                begins = self._branched(built, origin)
            else:
                begins = resume(built, checkpoints, times)
            if begins.step >= until:
                checkpoints.close()
                return begins.state.params
            LOGGER.info(f"{name}: steps {begins.step + 1} to {until}")
            programs = compile_train_steps(built, times)
            accept(config, text.fingerprint, [], begins.step, begins.tokens)
            batches = batches_after(begins, built, text)
            progress = Progress(config, begins, batches)
            loaded = train_batches(batches, built.batch_sharding, config.data.workers)
            start = lambda begins: (progress, programs, loaded)
            watch, idle = hooks.Watch(config, times), hooks.Idle(times)
            log = hooks.Log(built, watch, lambda position: {}, None)
            save = hooks.Save(config, checkpoints, text.fingerprint, watch)
            hook_list = [watch, idle, log, hooks.Judge(config, log, text.seen), save]
            run, gave_up = take_steps(start, idle, hook_list, Until(self.stop, until), again)
            checkpoints.close()
        if gave_up:
            LOGGER.info(f"{name}: {gave_up}")
            return None
        if run.step < until:
            LOGGER.info(f"stopped in {name} after step {run.step}; the same command continues from there")
            raise SystemExit(self.stop.agreed_code())
        return run.state.params

    def _branched(self, built: Build, origin: Origin) -> Start:
        """Return the state and the data's position of another trial's checkpoint."""
        theirs = Checkpoints(origin.folder)
        if origin.saved not in theirs.steps:
            raise UserError(f"{origin.folder} no longer has the checkpoint of step {origin.saved}; give another --out")
        state, facts = theirs.restore(origin.saved, built.abstract_state)
        state = state._replace(step=np.int32(origin.step))
        return Start(stored_as(state, built.abstract_state), origin.step, facts["tokens"])


def held_out_tokens(config: Config) -> int:
    """Return the tokens of held-out text that trials are compared on."""
    _, rows, length = batch_shape(config.batch, make_mesh(config.mesh))
    return min(config.eval.tokens, HELD_OUT * rows * length)


def evaluation_cost(config: Config) -> int:
    """Return the cost of an evaluation in tokens of training: a forward pass is a third of a step."""
    return held_out_tokens(config) // 3
