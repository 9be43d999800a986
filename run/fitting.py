"""`batch.rows_per_device=auto`: choose the rows of a micro-batch, and what else the devices' memory asks for.

A closed form (training/memory.py) expects what fits, and the compiled program says what it needs. If not one row fits,
the loss is computed in chunks, then blocks are recomputed, then `mesh.fsdp` grows: the one that costs least time first.
events.jsonl keeps the choice, and the cache keeps it for the next run of these sizes on such devices.

`explain_out_of_memory` names the command that plans what would fit, for any choice of rows.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from math import log2
from pathlib import Path
from typing import Any

import jax

from configs.files import cache_dir, write_whole
from configs.messages import LOGGER
from configs.schema import Config, UserError, options, with_options
from configs.validation import validate
from hosts.machines import GIB, HEADROOM, VECTOR_MEMORY, device_limit, exceeds_vector_memory, machines, name_of
from hosts.runtime import highest, on_first_process
from run.programs import TrainSteps, compile_train_steps, describe
from run.progress import Progress
from run.record import Events
from run.times import Times
from training.build import Build, build
from training.candidate import CHUNKS, REMAT, Candidate, candidate_of, topology_of
from training.memory import device_bytes, evaluation_memory, memory, most, most_rows, scale_of

COMPILATIONS = 3
CHOSEN = ("batch.rows_per_device", "model.loss_chunks", "model.remat", "mesh.fsdp")
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
        self.asked, self.auto, self.is_halved = asked, asked.batch.rows_per_device == "auto", False
        if not self.auto:
            if gib:
                raise UserError("--memory: the rows are given; --batch.rows_per_device=auto chooses what fits it")
            return
        devices, here = jax.devices(), jax.local_devices()
        self.base = candidate_of(asked, devices)
        self.limit = HEADROOM * -highest(-(int(gib * GIB) or device_limit(here[0], len(here))))
        """The bytes that may be taken of any device."""
        sizes = {name: value for name, value in options(asked).items() if name.startswith(DECIDE)}
        # In steps of a fifth: what a CPU has available changes from start to start.
        text = json.dumps([devices[0].device_kind, self.base.topology, int(4 * log2(self.limit)), sizes])
        self.key = sha256(text.encode()).hexdigest()[:16]
        """The devices, their memory and the sizes that a choice is for."""
        self.kept: dict[str, Any] = on_first_process(self._read)
        """The choice of an earlier start, if there is one."""

    def first(self) -> Config:
        """Return the config with an earlier start's choice, or with what the closed form expects to fit."""
        return with_options(self.asked, self.kept or chosen(self._expected(1.0))) if self.auto else self.asked

    def compile(self, built: Build, step: int, times: Times) -> tuple[Build, TrainSteps]:
        """Compile the steps, at most COMPILATIONS times, until a program fits. Return its build, and them. UserError,
        with the smallest change that would fit, if none does. Every process must call it."""
        LOGGER.info(describe(built))
        if not self.auto:
            return built, compile_train_steps(built, times)
        self.kept = on_first_process(self._read)  # again: the record may have come from the checkpoints' folder
        now, best, tried = self.base.having(self.kept or chosen(built)), None, []
        if chosen(now) != chosen(built):
            built = build(with_options(built.config, chosen(now)))
        while True:
            tried.append(now)
            steps, needs = self._compiled(now, built, times)
            fits, scale = needs <= self.limit, scale_of(now, needs)
            verdict = "it fits" if fits else "it does not fit"
            LOGGER.info(f"{words(now)}: a device needs {needs / GIB:.3g} of {self.limit / GIB:.3g} GiB; {verdict}")
            best = (now, built, steps, scale) if fits and steps else best
            if len(tried) == COMPILATIONS or (best and (self.kept or len(tried) > 1)):
                break
            now = self._expected(scale) if best or len(tried) < COMPILATIONS - 1 else self.levels[-1]
            if now in tried:
                break
            built = build(with_options(built.config, chosen(now)))
            LOGGER.info(describe(built))
        if best is None:
            raise UserError(self._too_small(tried[-1], needs))
        now, built, steps, scale = best
        before = options(self.asked)
        for name, value in chosen(now).items():
            if name != "batch.rows_per_device" and value != before[name]:
                saved = device_bytes(now.having({name: before[name]}), scale) - device_bytes(now, scale)
                LOGGER.info(f"--{name}={value}: one row should not fit without it; it saves {saved / GIB:.3g} GiB")
        self._keep(chosen(now), step)
        on_first_process(lambda: self._share(chosen(now)))
        return built, steps

    def halved(self, built: Build, run: Progress, reason: Exception) -> Build:
        """Return a build with half the rows, if the memory ran out in a step, and put that on record. Raise `reason` if
        it is another error, a second time, and on several processes, of which the others would wait."""
        ends = not self.auto or self.is_halved or run.stopping or jax.process_count() > 1
        config = built.config
        if ends or config.batch.rows == 1 or "RESOURCE_EXHAUSTED" not in str(reason):
            raise reason
        self.is_halved = True
        rows = next(n for n in self.base.row_counts if n <= config.batch.rows // 2)
        Events(config.run_dir).add("out_of_memory", run.step, rows_per_device=rows)
        LOGGER.warning(f"out of memory after step {run.step}: --batch.rows_per_device={rows} from here on")
        built = build(with_options(config, {"batch.rows_per_device": rows}))
        self._keep(chosen(built), run.step)
        return built

    def _read(self) -> dict[str, Any]:
        """Return the newest choice for such devices and sizes: the run's own, or else another run's."""
        fitted = [event for event in Events(self.asked.run_dir).read() if event["event"] == "fitted"]
        found = [event["options"] for event in fitted if event["key"] == self.key]
        with suppress(OSError, ValueError):  # none, or damaged
            found = found or [json.loads((known() / self.key).read_text())]
        return found[-1] if found and found[-1].keys() == {*CHOSEN} else {}

    def _keep(self, choice: dict[str, Any], step: int) -> None:
        """Keep a choice for later starts of this run. Every process must call it."""
        on_first_process(lambda: Events(self.asked.run_dir).add("fitted", step, key=self.key, options=choice))

    def _share(self, choice: dict[str, Any]) -> None:
        """Keep a choice for other runs, if the cache can be written. Only the first process may call it."""
        with suppress(OSError):
            known().mkdir(parents=True, exist_ok=True)
            write_whole(known() / self.key, json.dumps(choice))

    @cached_property
    def levels(self) -> list[Candidate]:
        """Return one row of the network as asked for, and then with ever less memory and more time."""
        model, mesh, inside = self.asked.model, self.asked.mesh, self.base.topology.inside
        less: list[dict[str, Any]] = [{"model.loss_chunks": CHUNKS}] if model.loss_chunks < CHUNKS else []
        less += [{"model.remat": remat} for remat in REMAT[REMAT.index(model.remat) + 1 :]]
        if mesh.data == -1:
            larger = (mesh.fsdp << n for n in range(1, inside.bit_length()))
            less += [{"mesh.fsdp": fsdp} for fsdp in larger if inside % (fsdp * mesh.tensor) == 0]
        levels = [self.base.having({"batch.rows_per_device": 1})]
        for change in less:
            with suppress(UserError):  # it does not divide the network
                validate((level := levels[-1].having(change)).config)
                levels.append(level)
        return levels

    def _expected(self, scale: float) -> Candidate:
        """Return the fastest that should fit, by the closed form with `scale`; the last level if none."""
        for level in self.levels:
            if rows := most_rows(level, self.limit, scale):
                return level.having({"batch.rows_per_device": rows})
        return self.levels[-1]

    def _compiled(self, candidate: Candidate, built: Build, times: Times) -> tuple[TrainSteps | None, float]:
        """Compile a candidate's steps. Return them, None if the compiler refused, and the bytes of a device that they,
        an evaluation and sampling need."""
        steps = None
        try:
            steps = compile_train_steps(built, times)
            step = max(map(program_bytes, steps))
        except jax.errors.JaxRuntimeError as error:  # a TPU's compiler refuses what exceeds its memory
            if "RESOURCE_EXHAUSTED" not in str(error) or exceeds_vector_memory(str(error)):
                raise
            used = re.search(r"Used ([\d.]+)G of", str(error))
            step = float(used[1]) * GIB if used else REFUSED * self.limit
        return steps, most(highest(int(step)), evaluation_memory(candidate, memory(candidate)))

    def _too_small(self, least: Candidate, needs: float) -> str:
        """Return that the `least` candidate, which `needs` these bytes, does not fit, and the smallest changes."""
        scale, depth = scale_of(least, needs), self.asked.model.depth
        fits = lambda depth: device_bytes(least.having({"model.depth": depth}), scale) <= self.limit
        less = [f"--model.depth={n}" for n in range(depth - 1, 0, -1) if fits(n)][:1]
        more = f"{1.001 * needs / HEADROOM / GIB:.4g} GiB of memory a device"  # not less, once it is rounded
        return (
            f"not one row fits the device's memory: {words(least)} needs {needs / GIB:.3g} GiB, and "
            f"{self.limit / GIB:.3g} GiB may be taken. The smallest change that would fit: {' or '.join([*less, more])}"
        )


def chosen(of: Candidate | Build) -> dict[str, Any]:
    """Return the values of the options that are chosen."""
    return {name: options(of.config)[name] for name in CHOSEN}


def words(candidate: Candidate) -> str:
    """Return what is chosen of a candidate as options."""
    return " ".join(f"--{name}={value}" for name, value in chosen(candidate).items())


def known() -> Path:
    """Return the folder of this machine's choices; another JAX makes its own."""
    return cache_dir() / "fitted" / version("jaxlib")


def program_bytes(compiled: Any) -> int:
    """Return the bytes on a device that a compiled program asks for, by its own analysis: arguments, results,
    temporaries."""
    analysis: Any = compiled.memory_analysis()
    # Donated arguments and the outputs that replace them count once.
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + outputs + analysis.temp_size_in_bytes


@contextmanager
def explain_out_of_memory(mistake: bool = False) -> Iterator[None]:
    """If the devices run out of memory inside, name the command that plans what would fit. With `mistake`, before any
    compute, raise a UserError; later, add a note to the error, which ends the run with code 1."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if exceeds_vector_memory(str(error)):
            raise UserError(f"{VECTOR_MEMORY}\n{str(error).splitlines()[0]}") from error
        if "RESOURCE_EXHAUSTED" in str(error):
            if mistake:
                raise UserError(f"{_too_large()}\n{str(error).splitlines()[0]}") from error
            error.add_note(_too_large())
        raise


def _too_large() -> str:
    """Return a message that a step does not fit the devices, with the command that plans what would fit."""
    kind = jax.devices()[0].device_kind
    too_much = f"the step needs more memory than a {kind} has"
    if (topology := topology_of(jax.devices())).kind not in machines():
        return f"{too_much}; hosts/machines.toml describes no such device, so what would fit cannot be planned"
    words = [word for word in sys.argv[1:] if not word.startswith(("--accept", "--memory"))]
    plan = shlex.join(["python", "-m", "tools.plan", *words, f"--topology={name_of(topology)}"])
    return f"{too_much}. Its memory by part, and the nearest change that would fit: {plan}"
