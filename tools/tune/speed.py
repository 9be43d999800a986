"""fit and time: find what fits a device's memory, and take steps of that until it is clear which is the fastest.

fit compiles rows of a micro-batch, recomputation, chunks of the loss and meshes, and runs nothing.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from configs.messages import LOGGER
from configs.schema import Config, UserError, with_options
from configs.validation import validate
from data.loader import to_devices
from hosts.machines import GIB, HEADROOM, VECTOR_MEMORY, exceeds_vector_memory
from run.fitting import program_bytes
from run.programs import batches_after
from run.progress import Start
from tools.plan.search import halvings
from tools.programs.compiled import compile_step
from tools.tune.statistics import mean, slowdowns
from tools.tune.trial import Context
from tools.tune.tune_json import Decision, Record
from training.build import build
from training.candidate import CHUNKS, REMAT
from training.mesh import batch_devices, islands, make_mesh
from training.state import stored_as

MAX_CANDIDATES = 6  # that are timed
MIN_ROUNDS, MAX_ROUNDS = 4, 16
TIE = 0.02  # the largest difference in time that does not matter
OF_STAKE = 0.25  # timing ends once it has cost this share of the most that its choice could still save


class Candidate(NamedTuple):
    """Options that change speed and memory, but no result."""

    rows: int
    """Rows of a micro-batch on one device."""
    remat: str
    loss_chunks: int
    fsdp: int = 1

    @property
    def name(self) -> str:
        return "-".join(map(str, self))

    @property
    def options(self) -> dict[str, Any]:
        """Return the values by the options' names."""
        return dict(zip(("batch.rows_per_device", "model.remat", "model.loss_chunks", "mesh.fsdp"), self))

    def __str__(self) -> str:
        return f"rows_per_device={self.rows} remat={self.remat} loss_chunks={self.loss_chunks} fsdp={self.fsdp}"


def meshes(config: Config, devices: Sequence[Any]) -> list[int]:
    """Return the sizes of `fsdp` for the config's `tensor`, the one that sends least first: powers of two that divide
    the devices and the network, inside a slice or node. Only the config's if it sets `mesh.data`."""
    mesh = make_mesh(config.mesh, devices)
    if config.mesh.data != -1:
        return [config.mesh.fsdp]
    inside = len(islands(list(mesh.devices.flat))[0])
    sizes = {config.mesh.fsdp, *(2**n for n in range(inside.bit_length()) if inside % (2**n * config.mesh.tensor) == 0)}
    return [size for size in sorted(sizes) if divides(with_options(config, {"mesh.fsdp": size}), devices)]


def divides(config: Config, devices: Sequence[Any] | None = None) -> bool:
    """Return whether a config's sizes divide on all devices here, or those given."""
    try:
        validate(config)
        build(config, devices)
    except UserError:
        return False
    return True


def rows_that_divide(config: Config, devices: Sequence[Any] | None = None) -> Config | None:
    """Return the config with rows of a micro-batch that divide its batch, on all devices here or those given; None if
    there are none."""
    for rows in (config.batch.rows >> n for n in range(config.batch.rows.bit_length())):
        if divides(of_rows := with_options(config, {"batch.rows_per_device": rows}), devices):
            return of_rows
    return None


def kinds(config: Config) -> list[list[tuple[str, int]]]:
    """Return (remat, loss_chunks) by levels of recomputation from the config's on. Its own chunks come first, so the
    unchanged config is among the timed candidates."""
    length, chunks = config.batch.sequence_length, config.model.loss_chunks
    other = 1 if chunks > 1 else CHUNKS
    tried = [chunks] if length % other else [chunks, other]
    return [[(remat, n) for n in tried] for remat in REMAT[REMAT.index(config.model.remat) :]]


def frontier(
    levels: Sequence[Sequence[tuple[str, int]]],
    sizes_of_fsdp: Sequence[int],
    rows: int,
    share: int,
    fits: Callable[[Candidate], bool],
) -> None:
    """Ask which candidates fit, until the largest that fits and the smallest that does not are neighbours. Rows double
    from `rows` up to a device's `share` of a step, or halve. Each kind starts at the rows of the one before. Once a
    level fits the complete share, skip the next ones, which recompute more. Do so for each size of `fsdp`, until one
    fits the complete share without more recomputation than the config's: the next ones would send more."""
    sizes = sorted({*halvings(share), *(n for n in halvings(rows) if share % n == 0)})
    for fsdp in sizes_of_fsdp:
        at, complete = sizes.index(max((n for n in sizes if n <= rows), default=sizes[0])), False
        for level in levels:
            for kind in level:
                sized = [Candidate(size, *kind, fsdp) for size in sizes]
                if fits(sized[at]):
                    if kind == levels[0][0] and at > 0:
                        fits(sized[at - 1])  # smaller ones may be faster, in caches
                    while at + 1 < len(sized) and fits(sized[at + 1]):
                        at += 1
                    complete |= sized[at].rows == share
                else:
                    at = next((i for i in reversed(range(at)) if fits(sized[i])), 0)
            if complete:
                break
        if complete and level == levels[0]:
            return


def fit(config: Config, record: Record, limit: int, devices: Sequence[Any]) -> dict[Candidate, Any]:
    """Compile candidates for these devices, until the frontier is known, and choose the most rows
    with the least recomputation. Return the programs that were compiled now. Raise UserError if none fits."""
    share = (
        config.batch.tokens_per_step // config.batch.sequence_length // batch_devices(make_mesh(config.mesh, devices))
    )
    programs: dict[Candidate, Any] = {}

    def fits(wanted: Candidate) -> bool:
        piece = record.piece(f"fit/{wanted.name}", lambda: _compile(wanted, config, devices, programs))
        size = piece["bytes"]
        verdict = size is not None and size <= HEADROOM * limit
        asks = f"{size / GIB:.3g} GiB" if size else f"more than the device has ({piece['problem']})"
        LOGGER.info(f"fit: {wanted}: {asks}; " + ("it fits" if verdict else "it does not fit"))
        return verdict

    frontier(kinds(config), meshes(config, devices), min(config.batch.rows, share), share, fits)
    fitting = that_fit(record, limit)
    if not fitting:
        least = min((p["bytes"] for p in record.pieces_of("fit").values() if p["bytes"]), default=0)
        raise UserError(
            f"no micro-batch of this run fits {limit / GIB:.3g} GiB a device (the least asks for {least / GIB:.3g}, "
            f"and {HEADROOM:.0%} may be taken): give it more devices, or a smaller network"
        )
    best = max(fitting, key=lambda c: (c.rows, -REMAT.index(c.remat), -c.fsdp, -c.loss_chunks))
    size = record.pieces_of("fit")[best.name]["bytes"]
    record.decide(
        Decision(
            "fit",
            f"{best} has the most rows that fit with the least recomputation: {size / GIB:.3g} of "
            f"{limit / GIB:.3g} GiB a device, of which {HEADROOM:.0%} may be taken; {len(fitting)} of "
            f"{len(record.pieces_of('fit'))} programs fit",
            "measured",
            best.options,
        )
    )
    return programs


def that_fit(record: Record, limit: int) -> list[Candidate]:
    """Return the recorded candidates that fit."""
    fitting = []
    for name, piece in record.pieces_of("fit").items():
        if piece["bytes"] and piece["bytes"] <= HEADROOM * limit:
            rows, remat, chunks, fsdp = name.split("-")
            fitting.append(Candidate(int(rows), remat, int(chunks), int(fsdp)))
    return fitting


def _compile(wanted: Candidate, config: Config, devices: Sequence[Any], programs: dict[Candidate, Any]) -> dict:
    try:
        programs[wanted] = compile_step(build(with_options(config, wanted.options), devices))
    except jax.errors.JaxRuntimeError as error:  # a TPU's compiler refuses what exceeds its memory
        if exceeds_vector_memory(str(error)):
            raise UserError(f"{VECTOR_MEMORY}\n{str(error).splitlines()[0]}") from error
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        return {"bytes": None, "problem": str(error).splitlines()[0][:200]}
    return {"bytes": program_bytes(programs[wanted])}


def chosen(fitting: list[Candidate]) -> list[Candidate]:
    """Return the few to time: those with the least recomputation and the most rows."""
    return sorted(fitting, key=lambda c: (REMAT.index(c.remat), -c.rows, c.fsdp, c.loss_chunks))[:MAX_CANDIDATES]


def time_steps(context: Context, candidates: list[Candidate], programs: dict[Candidate, Any]) -> None:
    """Time complete steps on the run's first batch, one of each candidate in a round, and drop those that are slower
    for certain. Stop when one is left, when those left are within 2%, after 16 rounds, or before the budget is
    exceeded. Also stop once the timed steps cost a quarter of what a choice could still save of the run. Choose, of
    those left, the one that asks for the least memory."""
    record, config, size = context.record, context.config, context.config.batch.tokens_per_step
    kept = {c: record.pieces.get(f"time/{c.name}", {}).get("seconds", []) for c in candidates}
    left, alike = _left(kept)
    state, steps = None, {}
    while len(left) > 1 and not alike and len(kept[left[0]]) < MAX_ROUNDS:
        if sum(map(len, kept.values())) >= OF_STAKE * at_stake({c: kept[c] for c in left}) * config.steps:
            LOGGER.info("time: more rounds would cost too much of what the choice can save")
            break
        first = [c for c in left if c not in steps]
        if (len(left) + len(first)) * size > record.left:
            LOGGER.info("time: the next round would exceed the budget")
            break
        if state is None:
            state = build(config).create_state()
        for c in first:
            steps[c] = _prepared(context, c, programs)
            state, _ = _seconds(*steps[c], state)
        taken = {}
        for c in left:
            state, taken[c] = _seconds(*steps[c], state)
        for c in left:
            kept[c].append(taken[c])
            tokens = record.pieces.get(f"time/{c.name}", {"tokens": 0})["tokens"] + (2 if c in first else 1) * size
            record.pieces[f"time/{c.name}"] = {"seconds": kept[c], "tokens": tokens}
        record.write()
        left, alike = _left(kept)
    _decide(context, {c: seconds for c, seconds in kept.items() if seconds}, left)


def _left(kept: dict[Candidate, list[float]]) -> tuple[list[Candidate], bool]:
    """Return the candidates that are not slower for certain, and whether they are equally fast."""
    most = max(len(seconds) for seconds in kept.values())
    running = {c: seconds for c, seconds in kept.items() if len(seconds) == most}
    if most < MIN_ROUNDS:
        return [*running], False
    behind = slowdowns(running)
    left = [c for c in running if behind[c].low <= 0]
    return left, all(behind[c].high < TIE for c in left)


def at_stake(kept: dict[Candidate, list[float]]) -> float:
    """Return the share of its time that the run could still lose or win by a choice among candidates: the upper bound
    of how much slower or faster than the fastest so far any may be. Infinite before the fourth round."""
    if len(next(iter(kept.values()))) < MIN_ROUNDS:
        return math.inf
    return max(max(slower.high, -slower.low) for slower in slowdowns(kept).values())


def _prepared(context: Context, candidate: Candidate, programs: dict[Candidate, Any]) -> tuple[Any, Any, Any]:
    """Return a candidate's program, the run's first batch in its shape, and its abstract state."""
    made = build(with_options(context.config, candidate.options))
    program = programs.get(candidate) or compile_step(made)
    first = batches_after(Start(made.abstract_state), made, context.text)[0]
    batch = to_devices(first, made.batch_shape, made.batch_sharding)
    return program, batch, made.abstract_state


def _seconds(program: Callable, batch: Any, abstract: Any, state: Any) -> tuple[Any, float]:
    """Return the state after a step, and the step's seconds, which do not include moving the state to its devices."""
    state = jax.block_until_ready(stored_as(state, abstract))
    start = time.perf_counter()
    state, _ = jax.block_until_ready(program(state, batch))
    return state, time.perf_counter() - start


def _decide(context: Context, kept: dict[Candidate, list[float]], left: list[Candidate]) -> None:
    """Choose the candidate that asks for the least memory, of those left."""
    record = context.record
    best = min(left, key=lambda c: record.pieces[f"fit/{c.name}"]["bytes"])
    if not kept:
        only = f"only {best} fits, so nothing was timed"
        says = only if len(left) == 1 else "no round was timed within the budget"
        record.decide(Decision("time", says, "not done", {}))
        return
    slower = sorted(slowdowns(kept).items(), key=lambda item: item[1].value)
    others = ", ".join(f"{c.name} {more.shown('+.1%')}" for c, more in slower if more.value or more.high)
    per_second = context.config.batch.tokens_per_step / mean(kept[best]).value
    tied = f"; {len(left)} are tied, and it asks for the least memory" if len(left) > 1 else ""
    says = (
        f"{best}: {per_second:,.0f} tokens/s{tied}. Time of the others over the fastest, with intervals of 95%: "
        f"{others}"
    )
    record.decide(Decision("time", says, "measured", best.options))
