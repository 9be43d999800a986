"""The hook that saves the run."""

import dataclasses
import time
from pathlib import Path

from tenacity import Retrying, retry_if_result, wait_random_exponential

from configs.retry import LONGEST
from configs.schema import Config
from hosts.distributed import max_over_processes, on_first_process
from model.gpt import parameter_shapes
from run.checkpoint import all_finite
from run.folder import run_id
from run.hooks.watch import Watch
from run.progress import Due, GaveUp, Hook, Progress
from run.saver import Saver
from training.step import Metrics

MOST_FAILED = 10  # consecutive failed saves that end the run


class Save(Hook):
    """Saves due checkpoints asynchronously. Raises GaveUp after MOST_FAILED consecutive failures."""

    def __init__(self, config: Config, checkpoints: Saver, dataset: str, watch: Watch):
        """Take `dataset`: the fingerprint that checkpoints contain."""
        self.config, self.checkpoints, self.dataset, self.watch = config, checkpoints, dataset, watch
        self.record = Path(config.run_dir) / "config.json"

    def begin(self, run: Progress) -> None:
        self.saved = time.monotonic()
        known = lambda: run_id(self.config.run_dir) if self.record.exists() else None
        self.run_id = on_first_process(known)

    def after_step(self, run: Progress, metrics: Metrics, due: Due) -> None:
        if due.save:
            self._save(run)
        elif due.log:
            failed = self.checkpoints.failing(wait=False)
            run.save_soon = (failed > 0 and not self.checkpoints.pending) or self._is_old()
        if not run.is_last:  # `finish` waits for the last step's save
            self._give_up_after(MOST_FAILED)

    def _give_up_after(self, most: int) -> None:
        failures = self.checkpoints.failures
        if len(failures) >= most and not failures[-1].passing:
            raise GaveUp(f"{len(failures)} save(s) in a row failed: {failures[-1].message}")

    def newest(self) -> int:
        """Return the newest checkpoint's step when nothing is being saved; 0 if there is none."""
        with self.watch.away("saving", "saves"):
            self.checkpoints.failing()
        return self.checkpoints.newest

    def described(self) -> str:
        """Return a sentence about the newest checkpoint."""
        newest = self.newest()
        return f"the newest checkpoint is of step {newest}" if newest else "no checkpoint was saved"

    def finish(self, run: Progress) -> None:
        """Wait for the last step's checkpoint. If it fails, try again after a pause."""
        failed = 0
        if not (self.checkpoints.pending or self.checkpoints.failures or run.step in self.checkpoints.steps):
            self._save(run)  # the memory ran out as it began
        again = lambda failed: failed > 0 and (failed < MOST_FAILED or self.checkpoints.failures[-1].passing)
        pause = wait_random_exponential(multiplier=0.5, max=LONGEST)
        for attempt in Retrying(retry=retry_if_result(again), wait=pause):
            if failed:
                self._save(run)
            with self.watch.away("saving", "saves"):
                failed = self.checkpoints.failing(wait=True)
            attempt.retry_state.set_result(failed)
        self._give_up_after(1)

    def _save(self, run: Progress) -> None:
        if self.run_id is not None and not on_first_process(self.record.exists):
            raise GaveUp(f"{self.record} was deleted while the run wrote to its folder")
        if not all_finite(run.state.params):
            raise GaveUp("the parameters are not finite, so they are not saved; a lower learning rate may help")
        kept = {"tokens": run.tokens_after(run.step), "seconds": run.clock.seconds, "losses": list(run.losses)}
        shapes = parameter_shapes(self.config.model)
        origin = {"run_id": self.run_id or "", "dataset": self.dataset, "shapes": shapes}
        origin |= {"config": dataclasses.asdict(self.config)}
        with self.watch.away("saving", "saves"):
            self.checkpoints.save(run.step, run.state, {**kept, **origin})
        self.saved, run.save_soon = time.monotonic(), False

    def _is_old(self) -> bool:
        """Return whether `checkpoint.every_minutes` have passed, by any process's clock."""
        minutes = self.config.checkpoint.every_minutes
        return bool(minutes) and max_over_processes(time.monotonic() - self.saved > 60 * minutes) > 0
