"""`batch.rows_per_device=auto`: choose the rows of a micro-batch that fit the devices' memory.

One row is compiled, then the rows that a line expects to fit, then the rows that the line through both expects. A
compiled program says what it needs. events.jsonl keeps the choice for later starts. If the memory runs out in a step
all the same, half the rows are chosen, and the run starts again.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from math import log2
from typing import Any

import jax

from configs.files import in_bucket
from configs.messages import LOGGER
from configs.schema import Config, UserError, options, with_options
from hosts.distributed import max_over_processes, on_first_process
from hosts.machines import (
    GIB,
    HEADROOM,
    VECTOR_MEMORY,
    Topology,
    device_limit,
    exceeds_vector_memory,
    machine_of,
    machines,
    name_of,
)
from hosts.runtime import StartAgain
from run.clock import Times
from run.programs import TrainSteps, compile_train_steps, describe
from run.record import Events, upload
from training.build import SMALLER, Build, build, line, program_bytes, row_counts, stored_bytes
from training.mesh import device_groups

COMPILATIONS = 3
DECIDE = (
    *("model.", "batch.", "mesh.", "eval.", "diagnostics.", "data.mask_documents"),
    "optimizer.matrices.kind",
)
"""Beginnings of the options that a program's memory follows from."""
REFUSED = 1.2
"""Times the limit that a program is taken to need if the compiler's refusal has no number."""


class Fitting:
    """Choose what fits the memory of the devices here, from the config that was asked for."""

    def __init__(self, asked: Config, gib: float):
        """`gib`: of a device, in place of what it reports; 0: what it reports. Every process must call it."""
        self.asked, self.auto = asked, asked.batch.rows_per_device == "auto"
        if not self.auto:
            if gib:
                raise UserError("--memory: the rows are given; --batch.rows_per_device=auto chooses what fits it")
            return
        devices, here = jax.devices(), jax.local_devices()
        topology = topology_of(devices)
        self.limit = HEADROOM * -max_over_processes(-(int(gib * GIB) or device_limit(here[0], len(here))))
        """The bytes that may be taken of any device."""
        sizes = {name: value for name, value in options(asked).items() if name.startswith(DECIDE)}
        # In steps of a fifth: what a CPU has available changes from start to start.
        text = json.dumps([devices[0].device_kind, topology, int(4 * log2(self.limit)), sizes])
        self.key = sha256(text.encode()).hexdigest()[:16]
        """The devices, their memory and the sizes that a choice is for."""
        self.kept: int = on_first_process(self._read)
        """The rows that an earlier start chose; 0 if there is none."""

    def first(self) -> Config:
        """Return the config with an earlier start's choice, or with one row."""
        return with_rows(self.asked, self.kept or 1) if self.auto else self.asked

    def compile(self, built: Build, step: int, times: Times) -> tuple[Build, TrainSteps]:
        """Compile the steps, at most COMPILATIONS times, and return the build with the most rows that fit, and them.
        Raise UserError, with the memory that would do, if none fits. Every process must call it."""
        LOGGER.info(describe(built))
        if not self.auto:
            return built, compile_train_steps(built, times)
        rows, best, tried = built.config.batch.rows, None, {}
        for _ in range(COMPILATIONS):
            if rows != built.config.batch.rows:
                built = build(with_rows(built.config, rows))
                LOGGER.info(describe(built))
            steps, tried[rows] = self._compiled(built, times)
            fits = steps is not None and tried[rows] <= self.limit
            needs = f"a device needs {tried[rows] / GIB:.3g} of {self.limit / GIB:.3g} GiB"
            LOGGER.info(f"--batch.rows_per_device={rows}: {needs}; {'it fits' if fits else 'it does not fit'}")
            if steps and fits:
                best = built, steps
            if fits and rows == self.kept:
                break
            rows = 1 if rows == self.kept > 1 else self._next(built, tried)
            if not rows:
                break
        if best is None:
            more = 1.001 * tried[1] / HEADROOM / GIB  # not less, once it is rounded
            smaller = " ".join(f"--{name}={value}" for name, value in SMALLER.items())
            raise UserError(
                f"not one row fits the device's memory: it needs {tried[1] / GIB:.3g} GiB, and {self.limit / GIB:.3g} "
                f"GiB may be taken. {smaller} takes less, and --mesh.fsdp=N divides the state among N devices. It "
                f"would fit {more:.4g} GiB of memory a device"
            )
        built, steps = best
        if (rows := built.config.batch.rows) != self.kept:
            on_first_process(lambda: self._record(step, rows))
        return built, steps

    def _next(self, built: Build, tried: dict[int, float]) -> int:
        """Return the rows to compile after `tried` rows, by the line through their bytes; 0 if no better ones are
        expected."""
        fitting = max((n for n, size in tried.items() if size <= self.limit), default=0)
        refused = min((n for n, size in tried.items() if size > self.limit), default=sys.maxsize)
        points = tried if len(tried) > 1 else {0: sum(stored_bytes(built).values()), **tried}
        within = (n for n in row_counts(built) if fitting < n < refused and line(points, n) <= self.limit)
        return next(within, 0)

    @contextmanager
    def fewer_rows_if_out_of_memory(self, built: Build) -> Iterator[None]:
        """If the devices run out of memory inside, choose half the rows for the next start, and raise StartAgain. With
        rows that are given, or with one row, add a note to the error: the run ends with code 1."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            config = built.config
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            if not self.auto or config.batch.rows == 1:
                error.add_note(too_large())
                raise
            rows = next(n for n in row_counts(built) if n <= config.batch.rows // 2)
            # Alone: the others may not have run out. In a bucket, only the first process writes events.jsonl.
            if jax.process_index() == 0 or not in_bucket(config.run_dir):
                Events(config.run_dir).add("out_of_memory", 0, rows_per_device=rows)
                self._record(0, rows)
                upload(config.run_dir)
            raise StartAgain(f"out of memory: --batch.rows_per_device={rows} from here on") from error

    def _compiled(self, built: Build, times: Times) -> tuple[TrainSteps | None, float]:
        """Compile the steps. Return them, None if the compiler refused, and the bytes of a device that they and the
        held-out rows need. An evaluation and sampling need less than a step."""
        steps = None
        try:
            steps = compile_train_steps(built, times)
            step = max(map(program_bytes, steps))
        except jax.errors.JaxRuntimeError as error:  # a TPU's compiler refuses what exceeds its memory
            if "RESOURCE_EXHAUSTED" not in str(error) or exceeds_vector_memory(str(error)):
                raise
            used = re.search(r"Used ([\d.]+)G of", str(error))
            step = float(used[1]) * GIB if used else REFUSED * self.limit
        return steps, max_over_processes(int(step)) + stored_bytes(built)["held-out rows"]

    def _read(self) -> int:
        """Return the run's newest choice for such devices and sizes; 0 if there is none."""
        fitted = [event for event in Events(self.asked.run_dir).read() if event["event"] == "fitted"]
        # A run of an earlier version, which is refused later, has none.
        return next((event.get("rows_per_device", 0) for event in reversed(fitted) if event["key"] == self.key), 0)

    def _record(self, step: int, rows: int) -> None:
        Events(self.asked.run_dir).add("fitted", step, key=self.key, rows_per_device=rows)


def with_rows(config: Config, rows: int) -> Config:
    """Return the config with these rows per device."""
    return with_options(config, {"batch.rows_per_device": rows})


def topology_of(devices: Sequence[Any]) -> Topology:
    """Return the topology of devices that are here. Its kind is the platform's name if no machine is described."""
    machine, groups = machine_of(devices[0].device_kind), device_groups(devices)
    shape = [len(groups[0])]
    if machine and not machine.gpu:
        shape = [len({*along}) for along in zip(*(device.coords for device in groups[0]))][: machine.directions // 2]
    return Topology(len(groups), machine.kind if machine else devices[0].platform, tuple(shape))


@contextmanager
def refuse_what_does_not_fit() -> Iterator[None]:
    """Turn a compiler's lack of memory inside into a UserError with the command that plans what would fit."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        first_line = str(error).splitlines()[0]
        if exceeds_vector_memory(str(error)):
            raise UserError(f"{VECTOR_MEMORY}\n{first_line}") from error
        if "RESOURCE_EXHAUSTED" in str(error):
            raise UserError(f"{too_large()}\n{first_line}") from error
        raise


def too_large() -> str:
    """Return a message that a step does not fit the devices, with the command that plans what would fit."""
    kind = jax.devices()[0].device_kind
    too_much = f"the step needs more memory than a {kind} has"
    if (topology := topology_of(jax.devices())).kind not in machines():
        return f"{too_much}; hosts/machines.toml describes no such device, so what would fit cannot be planned"
    given = [word for word in sys.argv[1:] if not word.startswith(("--accept", "--memory"))]
    plan = shlex.join(["python", "-m", "tools.plan", *given, f"--topology={name_of(topology)}"])
    return f"{too_much}. What would fit: {plan}"
