"""Count what a step sends, in closed form: the collectives of training/step.py and model/parallel.py.

Bytes are a device's payload, as bench.collectives reads them: the result of an all-gather, the operand of all else.
"""

from collections import defaultdict
from typing import NamedTuple

from training.candidate import Candidate

START, HOP = 10e-6, 1e-6
"""Seconds that a collective takes to start, and that a hop to the next device takes. Assumed."""


class Traffic(NamedTuple):
    """All collectives of one kind over one axis."""

    kind: str
    """`all-gather`, `reduce-scatter`, `all-reduce`"""
    axis: str
    in_scan: bool
    """In the scan over micro-batches."""
    times: int
    """Collectives a step."""
    bytes: float
    """A device's payload, a step."""
    link: str
    """`inside` of a slice or node, or `between` them."""
    fast: float
    """Seconds with all of a device's links at once, and in steps between slices or nodes."""
    slow: float
    """Seconds in one ring of two directions, each device sending everything between slices or nodes."""

    @property
    def overlaps(self) -> bool:
        """Return whether other work can run at the same time: during gathers and scatters over `fsdp` in the scan. The
        residual stream waits for the collectives over `tensor`, and a step for those after the scan."""
        return self.axis == "fsdp" and self.in_scan


def communication(candidate: Candidate) -> list[Traffic]:
    """Return what crosses each axis of the mesh in a step."""
    sizes, width = candidate.sizes, candidate.bytes_of_type
    micro_batches, model = candidate.step[0], candidate.config.model
    sums: dict[tuple[str, str, bool], tuple[int, float]] = defaultdict(lambda: (0, 0.0))

    def add(kind: str, axis: str, in_scan: bool, times: int, size: float) -> None:
        before = sums[kind, axis, in_scan]
        sums[kind, axis, in_scan] = before[0] + times, before[1] + times * size

    for p, count in candidate.kinds:
        whole = p.size / (sizes["tensor"] if "tensor" in p.axes else 1)
        replica = whole / (sizes["fsdp"] if "fsdp" in p.axes else 1)
        padded = candidate.share(p.shape, p.axes) * sizes["data"]
        add("all-gather", "data", False, count, (4 if len(p.shape) == 1 else width) * padded)
        add("reduce-scatter", "data", False, count, 4 * padded)
        if "fsdp" in p.axes:
            # XLA keeps gathered parameters for the backward pass, unless it recomputes (docs/mesh.md).
            times = 2 if model.remat != "none" and p.product and p.group != "lm_head" else 1
            add("all-gather", "fsdp", True, times * micro_batches * count, width * whole)
            add("reduce-scatter", "fsdp", True, micro_batches * count, 4 * whole)
        else:
            add("all-reduce", "fsdp", False, count, 4 * replica)
    if sizes["tensor"] > 1:
        # Forward: the embedding, and two sums a block. Backward: two a block, and the head's. The loss: two numbers a
        # token. Recomputation repeats attention's sum, which the MLP's input needs.
        again = 0 if model.remat == "none" else model.depth
        of_width = micro_batches * (4 * model.depth + 2 + again)
        add("all-reduce", "tensor", True, of_width, width * candidate.tokens * model.width)
        add("all-reduce", "tensor", True, micro_batches * 2, 4 * candidate.tokens)
    return [_timed(candidate, *key, *value) for key, value in sums.items() if sizes[key[1]] > 1]


def _timed(candidate: Candidate, kind: str, axis: str, in_scan: bool, times: int, size: float) -> Traffic:
    machine, whole, across = candidate.machine, candidate.sizes[axis], candidate.across[axis]
    # XLA:TPU makes all-reduces of the reduce-scatters over `data` (docs/mesh.md): twice the bytes of a ring.
    reduces = kind == "all-reduce" or (kind == "reduce-scatter" and axis == "data" and not machine.gpu)
    by_sums = candidate.scatters_by_sums if kind == "reduce-scatter" else candidate.gathers_by_sums
    reduces |= axis == "fsdp" and by_sums
    rounds = 2 if reduces else 1
    within = whole // across
    sent = rounds * size * (within - 1) / within
    fast = sent / machine.links + times * START
    slow = sent / machine.links * max(1, machine.directions / 2) + times * (START + HOP * whole / 2)
    if across > 1:
        between = rounds * size * (across - 1) / across / machine.network
        fast, slow = fast + between / within, slow + between
    return Traffic(kind, axis, in_scan, times, size, "between" if across > 1 else "inside", fast, slow)
