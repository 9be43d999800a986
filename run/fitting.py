"""Compile the programs of a run's step, with the rows that fit the devices' memory for `batch.rows_per_device=auto`.

First, the most rows are compiled that surely fit by a rough estimate: all of them, if the network is small for the
memory. A compiled program says what it needs. Then come the rows that a line through these bytes expects to fit.
events.jsonl keeps the choice for later starts. If the memory runs out in a step all the same, half the rows are chosen,
and the run starts again.
"""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any, NamedTuple

import jax

from hosts.clock import Timeline
from hosts.distributed import max_over_processes, on_first_process
from hosts.machines import (
    GIB,
    HEADROOM,
    VECTOR_MEMORY,
    device_limit,
    exceeds_vector_memory,
    is_lack_of_memory,
)
from options.schema import Config, options, with_options
from run.describe import describe
from run.folder import RunFolder
from system.errors import StartAgain, UserError
from system.messages import LOGGER
from training.build import (
    SMALLER,
    Build,
    build,
    expected_row_bytes,
    interpolate,
    program_bytes,
    row_counts,
    stored_bytes,
)
from training.step import TrainStep

COMPILATIONS = 3
MARGIN = 1.5  # of what rows are expected to take, for the first compilation
ROWS = "batch.rows_per_device"
DECIDE = ("model.", "batch.", "mesh.", "eval.", "diagnostics.", "data.mask_documents", "optimizer.matrices.kind")
"""Beginnings of the options that a program's memory follows from."""


class TrainSteps(NamedTuple):
    """The compiled `train_step` of training/step.py, with and without diagnostics."""

    train_step: TrainStep
    measuring_step: TrainStep
    """The same step with diagnostics."""


def compile_train_steps(built: Build, timeline: Timeline) -> TrainSteps:
    """Compile the programs that the run needs. A compiled program refuses other shapes, so no step can recompile. Every
    process must call it, together with the others."""
    every = built.config.diagnostics.every_steps
    LOGGER.info("compiling")
    with timeline.during("compile"):
        compiled: Any = [
            step.lower(built.abstract_state, built.abstract_batch()).compile() if needed else None
            for step, needed in ((built.train_step, every != 1), (built.measuring_step, every))
        ]
    return TrainSteps(compiled[0] or compiled[1], compiled[1] or compiled[0])


@contextmanager
def refuse_what_does_not_fit() -> Iterator[None]:
    """Turn a compiler's lack of memory inside into a UserError with the command that plans what would fit."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        first_line = str(error).splitlines()[0]
        if exceeds_vector_memory(str(error)):
            raise UserError(f"{VECTOR_MEMORY}\n{first_line}") from error
        if is_lack_of_memory(str(error)):
            raise UserError(f"{too_large()}\n{first_line}") from error
        raise


class Fitting:
    """Choose what fits the memory of the devices here, from the config that was asked for."""

    def __init__(self, asked: Config, folder: RunFolder):
        """Take the run's folder, whose events have the choices of earlier starts. Every process must call it."""
        self.asked, self.folder, self.auto = asked, folder, asked.batch.rows_per_device == "auto"
        if not self.auto:
            return
        devices, here = jax.devices(), jax.local_devices()
        self.limit = HEADROOM * -max_over_processes(-device_limit(here[0], len(here)))
        """The bytes that may be taken of any device."""
        sizes = {name: value for name, value in options(asked).items() if name.startswith(DECIDE)}
        text = json.dumps([devices[0].device_kind, len(devices), sizes])
        self.key = sha256(text.encode()).hexdigest()[:16]
        """The devices and sizes that a choice is for."""
        on_first_process(self._record_notes)
        self.earlier_rows: int = on_first_process(self._read)
        """The rows that an earlier start chose; 0 if there is none."""

    def first_config(self) -> Config:
        """Return the config with an earlier start's choice, or with one row."""
        return with_options(self.asked, {ROWS: self.earlier_rows or 1}) if self.auto else self.asked

    @refuse_what_does_not_fit()
    def compile(self, built: Build, step: int, timeline: Timeline) -> tuple[Build, TrainSteps]:
        """Compile the steps, at most COMPILATIONS times, and return the build with the most rows that fit, and them.
        Raise UserError if none fits. Every process must call it."""
        if not self.auto:
            LOGGER.info(describe(built))
            return built, compile_train_steps(built, timeline)
        best: tuple[Build, TrainSteps] | None = None
        rows, tried = self.earlier_rows or self._first_rows(built), {}
        while rows and len(tried) < COMPILATIONS:
            if rows != built.config.batch.rows:
                built = build(with_options(built.config, {ROWS: rows}))
            LOGGER.info(describe(built))
            steps, tried[rows] = self._compiled(built, timeline)
            fits = tried[rows] <= self.limit
            if steps and fits:
                best = built, steps
            needs = f"a device needs {tried[rows] / GIB:.3g} of {self.limit / GIB:.3g} GiB" if steps else "refused"
            LOGGER.info(f"--{ROWS}={rows}: {needs}; {'it fits' if fits else 'it does not fit'}")
            if rows != self.earlier_rows:
                rows = self._next(built, tried)
            elif fits:  # as an earlier start chose
                break
            else:  # with less memory than then
                rows = self._next(built, tried) if rows == 1 else 1
            if not best and 1 not in tried and (not rows or len(tried) == COMPILATIONS - 1):
                rows = 1  # before it is said that nothing fits
        if best is None:
            smaller = " ".join(f"--{name}={value}" for name, value in SMALLER.items())
            raise UserError(
                f"not one row fits the device's memory, of which {self.limit / GIB:.3g} GiB may be taken. {smaller} "
                "takes less, and --mesh.fsdp=N divides the state among N devices"
            )
        if (rows := best[0].config.batch.rows) != self.earlier_rows:
            on_first_process(lambda: self._record(step, rows))
        return best

    def _first_rows(self, built: Build) -> int:
        """Return the most rows that an estimate from shapes says fit; one if none does."""
        stored, of_row = stored_bytes(built), MARGIN * expected_row_bytes(built)
        # A step has two more copies of the parameters: in the compute type, and as updates.
        without_rows = sum(stored.values()) + 2 * stored["parameters"]
        return next((n for n in row_counts(built) if without_rows + n * of_row <= self.limit), 1)

    def _next(self, built: Build, tried: dict[int, float]) -> int:
        """Return the rows to compile after `tried` rows, by the line through their bytes; 0 if no better ones are
        expected."""
        fitting = max((n for n, size in tried.items() if size <= self.limit), default=0)
        refused = min((n for n, size in tried.items() if size > self.limit), default=sys.maxsize)
        points = tried if len(tried) > 1 else {0: sum(stored_bytes(built).values()), **tried}
        within = (n for n in row_counts(built) if fitting < n < refused and interpolate(points, n) <= self.limit)
        return next(within, 0)

    def _compiled(self, built: Build, timeline: Timeline) -> tuple[TrainSteps | None, float]:
        """Compile the steps. Return them, and the bytes of a device that they and the held-out rows need; None and more
        than the limit if a TPU's compiler refuses. An evaluation and sampling need less than a step."""
        try:
            steps = compile_train_steps(built, timeline)
        except jax.errors.JaxRuntimeError as error:
            if not is_lack_of_memory(str(error)) or exceeds_vector_memory(str(error)):
                raise
            steps = None
        step = max(map(program_bytes, steps)) if steps else 1.2 * self.limit
        return steps, max_over_processes(int(step)) + stored_bytes(built)["held-out rows"]

    @contextmanager
    def fewer_rows_if_out_of_memory(self, built: Build) -> Iterator[None]:
        """If the devices run out of memory inside, choose half the rows for the next start, and raise StartAgain. With
        rows that are given, or with one row, add a note to the error: the run ends with code 1.

        Only the first process writes events. Another one, which may have run out alone, leaves a note in the run's
        folder, which the next start records."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            config = built.config
            if not is_lack_of_memory(str(error)):
                raise
            if not self.auto or config.batch.rows == 1:
                error.add_note(too_large())
                raise
            rows = next(n for n in row_counts(built) if n <= config.batch.rows // 2)
            if jax.process_index() == 0:
                self._record_lack_of_memory(self.key, rows)
                self.folder.upload()
            else:
                note = self.folder.path / f"out_of_memory-{jax.process_index()}.json"
                note.write_text(json.dumps([self.key, rows]))
            raise StartAgain(f"out of memory: --{ROWS}={rows} from here on") from error

    def _read(self) -> int:
        """Return the run's newest choice for such devices and sizes; 0 if there is none."""
        fitted = [event for event in self.folder.events.read() if event["event"] == "fitted"]
        # A run of an earlier version, which is refused later, has none.
        return next((event.get("rows_per_device", 0) for event in reversed(fitted) if event["key"] == self.key), 0)

    def _record(self, step: int, rows: int) -> None:
        self.folder.events.add("fitted", step, key=self.key, rows_per_device=rows)

    def _record_lack_of_memory(self, key: str, rows: int) -> None:
        events = self.folder.events
        events.add("out_of_memory", 0, rows_per_device=rows)
        events.add("fitted", 0, key=key, rows_per_device=rows)

    def _record_notes(self) -> None:
        """Record what other processes noted when they ran out of memory in the last start, and delete their notes."""
        for note in sorted(self.folder.local.glob("out_of_memory-*.json")):
            with suppress(ValueError):  # the process was killed while it wrote
                self._record_lack_of_memory(*json.loads(note.read_text()))
            note.unlink()


def too_large() -> str:
    """Return a message that a step does not fit the devices, with the command that plans what would fit."""
    words = shlex.join(word for word in sys.argv[1:] if not word.startswith("--accept"))
    return (
        f"the step needs more memory than a {jax.devices()[0].device_kind} has. What would fit: "
        f"python -m tools.plan {words} --topology=DEVICE:{jax.device_count()} (hosts/machines.toml names the devices)"
    )
