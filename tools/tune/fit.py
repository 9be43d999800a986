"""fit: find which rows a device, recomputation, chunks of the loss and mesh fit its memory. It compiles, and runs
nothing."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from configs.messages import LOGGER
from configs.schema import Config, UserError, with_options
from configs.validation import validate
from hosts.machines import GIB, HEADROOM, VECTOR_MEMORY, exceeds_vector_memory
from run.fitting import program_bytes
from tools.programs.compile import compile_step
from tools.tune.tune_json import Decision, Record
from training.build import build
from training.candidate import CHUNKS, REMAT
from training.mesh import batch_devices, islands, make_mesh


class Candidate(NamedTuple):
    """Options that change speed and memory, but no result."""

    rows: int
    """Rows of a micro-batch on one device."""
    remat: str
    loss_chunks: int
    fsdp: int = 1

    @property
    def name(self) -> str:
        return f"{self.rows}-{self.remat}-{self.loss_chunks}-{self.fsdp}"

    def options(self) -> dict[str, Any]:
        """Return the values by the options' names."""
        return {
            "batch.rows_per_device": self.rows,
            "model.remat": self.remat,
            "model.loss_chunks": self.loss_chunks,
            "mesh.fsdp": self.fsdp,
        }

    def applied_to(self, config: Config) -> Config:
        """Return the config with these options."""
        return with_options(config, self.options())


def named(name: str) -> Candidate:
    """Return the candidate of this name."""
    rows, remat, chunks, fsdp = name.split("-")
    return Candidate(int(rows), remat, int(chunks), int(fsdp))


def meshes(config: Config, devices: Sequence[Any] | None = None) -> list[int]:
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
    for fsdp in sizes_of_fsdp:
        if _frontier(levels, rows, share, lambda candidate: fits(candidate._replace(fsdp=fsdp))):  # noqa: B023
            return


def _frontier(
    levels: Sequence[Sequence[tuple[str, int]]], rows: int, share: int, fits: Callable[[Candidate], bool]
) -> bool:
    """Return whether the first level fits the complete share."""
    sizes = sorted({*halvings(share), *(n for n in halvings(rows) if share % n == 0)})
    at = sizes.index(max((n for n in sizes if n <= rows), default=sizes[0]))
    for level in levels:
        whole = False
        for remat, chunks in level:
            sized = [Candidate(size, remat, chunks) for size in sizes]
            if fits(sized[at]):
                if (remat, chunks) == levels[0][0] and at > 0:
                    fits(sized[at - 1])  # smaller ones may be faster, in caches
                while at + 1 < len(sized) and fits(sized[at + 1]):
                    at += 1
                whole |= sized[at].rows == share
            else:
                at = next((i for i in reversed(range(at)) if fits(sized[i])), 0)
        if whole:
            return level == levels[0]
    return False


def halvings(n: int) -> list[int]:
    """Return n, n / 2, ... up to the first odd number."""
    return [n] + (halvings(n // 2) if n % 2 == 0 else [])


def fit(config: Config, record: Record, limit: int, devices: Sequence[Any] | None = None) -> dict[str, Any]:
    """Compile candidates for all devices here or those given, until the frontier is known, and choose the most rows
    with the least recomputation. Return the programs that were compiled now. Raise UserError if none fits."""
    mesh = make_mesh(config.mesh, devices)
    replicas = batch_devices(mesh)
    share = config.batch.tokens_per_step // config.batch.sequence_length // replicas
    programs: dict[str, Any] = {}

    def fits(wanted: Candidate) -> bool:
        piece = record.piece(f"fit/{wanted.name}", lambda: _compile(wanted, config, devices, programs))
        size = piece["bytes"]
        verdict = size is not None and size <= HEADROOM * limit
        asks = f"{size / GIB:.3g} GiB" if size else f"more than the device has ({piece['problem']})"
        LOGGER.info(f"fit: {describe(wanted)}: {asks}; " + ("it fits" if verdict else "it does not fit"))
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
            f"{describe(best)} has the most rows that fit with the least recomputation: {size / GIB:.3g} of "
            f"{limit / GIB:.3g} GiB a device, of which {HEADROOM:.0%} may be taken; {len(fitting)} of "
            f"{len(record.pieces_of('fit'))} programs fit",
            "measured",
            best.options(),
        )
    )
    return programs


def that_fit(record: Record, limit: int) -> list[Candidate]:
    """Return the recorded candidates that fit."""
    sizes = {name: piece["bytes"] for name, piece in record.pieces_of("fit").items()}
    return [named(name) for name, size in sizes.items() if size and size <= HEADROOM * limit]


def describe(candidate: Candidate) -> str:
    """Return the candidate as options."""
    rows, remat, chunks, fsdp = candidate
    return f"rows_per_device={rows} remat={remat} loss_chunks={chunks} fsdp={fsdp}"


def _compile(wanted: Candidate, config: Config, devices: Sequence[Any] | None, programs: dict[str, Any]) -> dict:
    try:
        programs[wanted.name] = compile_step(build(wanted.applied_to(config), devices))
    except jax.errors.JaxRuntimeError as error:  # a TPU's compiler refuses what exceeds its memory
        if exceeds_vector_memory(str(error)):
            raise UserError(f"{VECTOR_MEMORY}\n{str(error).splitlines()[0]}") from error
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        return {"bytes": None, "problem": str(error).splitlines()[0][:200]}
    return {"bytes": program_bytes(programs[wanted.name])}
