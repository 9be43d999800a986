"""`batch.rows_per_device=auto`: choose the rows of a micro-batch that fit the devices' memory.

One row is compiled, then the rows that a line expects to fit, then the rows that the line through both expects. A
compiled program says what it needs. If one row does not fit, `SMALLER` options are taken, then `mesh.fsdp` grows.
events.jsonl keeps the choice for later starts. If the memory runs out in a step all the same, half the rows are chosen,
and the run starts again.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from math import log2
from typing import Any

import jax

from configs.messages import LOGGER
from configs.schema import Config, UserError, options, with_options
from configs.validation import validate
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
from training.build import Build, build
from training.memory import SMALLER, line, program_bytes, row_counts, stored_bytes
from training.mesh import device_groups

COMPILATIONS = 3
CHOSEN = ("batch.rows_per_device", "model.loss_chunks", "model.remat", "mesh.fsdp")
DECIDE = (
    *("model.", "batch.", "mesh.", "eval.", "diagnostics.", "data.mask_documents"),
    "optimizer.matrices.kind",
)
"""Beginnings of the options that a program's memory follows from."""
REFUSED = 1.2
"""Times the limit that a program is taken to need if the compiler's refusal has no number."""

Choice = dict[str, Any]
ROWS: Choice = {"batch.rows_per_device": 1}


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
        self.levels = levels_of(asked, topology.inside)
        sizes = {name: value for name, value in options(asked).items() if name.startswith(DECIDE)}
        # In steps of a fifth: what a CPU has available changes from start to start.
        text = json.dumps([devices[0].device_kind, topology, int(4 * log2(self.limit)), sizes])
        self.key = sha256(text.encode()).hexdigest()[:16]
        """The devices, their memory and the sizes that a choice is for."""
        self.kept: Choice = on_first_process(self._read)
        """The choice of an earlier start, if there is one."""

    def first(self) -> Config:
        """Return the config with an earlier start's choice, or with one row."""
        return with_options(self.asked, self.kept or self.levels[0]) if self.auto else self.asked

    def compile(self, built: Build, step: int, times: Times) -> tuple[Build, TrainSteps]:
        """Compile the steps, at most COMPILATIONS times, and return the build with the most rows that fit, and them.
        Raise UserError, with the memory that would do, if none fits. Every process must call it."""
        LOGGER.info(describe(built))
        if not self.auto:
            return built, compile_train_steps(built, times)
        kept, now, best, tried = self.kept, self.kept or chosen(built), None, []
        for _ in range(COMPILATIONS):
            if now != chosen(built):
                built = build(with_options(built.config, now))
                LOGGER.info(describe(built))
            steps, needs = self._compiled(built, times)
            tried.append((now, needs))
            fits = steps is not None and needs <= self.limit
            verdict = "it fits" if fits else "it does not fit"
            LOGGER.info(f"{words(now)}: a device needs {needs / GIB:.3g} of {self.limit / GIB:.3g} GiB; {verdict}")
            if steps and fits:
                best = built, steps
            if fits and now == kept:
                break
            after = self.levels[0] if now == kept and now != self.levels[0] else self._next(built, tried)
            if after is None:
                break
            now = after
        if best is None:
            more = 1.001 * needs / HEADROOM / GIB  # not less, once it is rounded
            raise UserError(
                f"not one row fits the device's memory: {words(now)} needs {needs / GIB:.3g} GiB, and "
                f"{self.limit / GIB:.3g} GiB may be taken. It would fit {more:.4g} GiB of memory a device; or make "
                "model.depth or model.width smaller"
            )
        built, steps = best
        before = options(self.asked)
        for name, value in chosen(built).items():
            if name != "batch.rows_per_device" and value != before[name]:
                LOGGER.info(f"--{name}={value}: one row does not fit without it")
        choice = chosen(built)
        if choice != kept:
            on_first_process(lambda: Events(self.asked.run_dir).add("fitted", step, key=self.key, options=choice))
        return built, steps

    def _next(self, built: Build, tried: Sequence[tuple[Choice, float]]) -> Choice | None:
        """Return what to compile after `tried`, of which `built` is the last: more or fewer rows by the line through
        them, the next level if one row does not fit, or None if nothing better is expected."""
        now, needs = tried[-1]
        rows = now["batch.rows_per_device"]
        if rows == 1 and needs > self.limit:
            later = self.levels[self.levels.index(now) + 1 :] if now in self.levels else self.levels
            return later[0] if later else None
        points = {other["batch.rows_per_device"]: size for other, size in tried if {**other, **ROWS} == {**now, **ROWS}}
        fitting = max((n for n, size in points.items() if size <= self.limit), default=0)
        refused = min((n for n, size in points.items() if size > self.limit), default=sys.maxsize)
        if len(points) == 1:
            points[0] = sum(stored_bytes(built).values())
        within = (n for n in row_counts(built) if fitting < n < refused and line(points, n) <= self.limit)
        more = next(within, 0)
        return {**now, "batch.rows_per_device": more} if more else None

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
            choice = {**chosen(built), "batch.rows_per_device": rows}
            if jax.process_index() == 0:  # alone: the others may not have run out
                Events(config.run_dir).add("out_of_memory", 0, rows_per_device=rows)
                Events(config.run_dir).add("fitted", 0, key=self.key, options=choice)
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

    def _read(self) -> Choice:
        """Return the run's newest choice for such devices and sizes."""
        fitted = [event for event in Events(self.asked.run_dir).read() if event["event"] == "fitted"]
        return next((event["options"] for event in reversed(fitted) if event["key"] == self.key), {})


def levels_of(asked: Config, inside: int) -> list[Choice]:
    """Return one row of the network as asked for, then with SMALLER, then with the largest `fsdp` in an island of
    `inside` devices, as far as they divide the network."""
    levels = [with_options(asked, ROWS)]
    changes: list[Choice] = [SMALLER]
    if asked.mesh.data == -1:
        changes.append({"mesh.fsdp": inside // asked.mesh.tensor})
    for change in changes:
        with suppress(UserError):
            validate(level := with_options(levels[-1], change))
            levels.append(level)
    choices = [{name: options(level)[name] for name in CHOSEN} for level in levels]
    return [choice for i, choice in enumerate(choices) if choice not in choices[:i]]


def topology_of(devices: Sequence[Any]) -> Topology:
    """Return the topology of devices that are here. Its kind is the platform's name if no machine is described."""
    machine, groups = machine_of(devices[0].device_kind), device_groups(devices)
    shape = [len(groups[0])]
    if machine and not machine.gpu:
        shape = [len({*along}) for along in zip(*(device.coords for device in groups[0]))][: machine.directions // 2]
    return Topology(len(groups), machine.kind if machine else devices[0].platform, tuple(shape))


def chosen(built: Build) -> Choice:
    """Return the values of the options that are chosen."""
    return {name: options(built.config)[name] for name in CHOSEN}


def words(choice: Choice) -> str:
    """Return a choice as options."""
    return " ".join(f"--{name}={value}" for name, value in choice.items())


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
