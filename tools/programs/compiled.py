"""Compile the training step from shapes alone, and read compiled programs: instructions, loops, estimated cycles, and
what crosses which axis of the mesh, how often, with how many bytes."""

import re
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np

from training.build import Build

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute", "collective-broadcast")
MEGASCALE = {"ONE_TO_ONE": "collective-permute"}
"""Kinds of transfers between TPU slices that are named otherwise than in KINDS."""
WRITTEN = re.compile("psum|psum_invariant|reduce_scatter|all_gather|all_gather_invariant|all_to_all|pmax|ppermute")
"""JAX's operations that become collectives."""
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(.*)$")
CALLS = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")


class Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    operands: str
    attributes: str


class Collective(NamedTuple):
    """A collective instruction that crosses at least one axis of the mesh."""

    kind: str  # one of KINDS
    dtype: str  # f32, bf16, ...
    axes: tuple[str, ...]  # those along which devices of one of its groups differ; SLICES between TPU slices
    in_loop: bool  # in the scan over micro-batches or any other loop
    times: int  # executions a step
    bytes_each: int  # payload of one execution on one chip
    written: bool = True  # in the code; False if XLA's partitioner added it


SLICES = ("slices",)
Program = dict[str, list[Instruction]]


def compile_step(built: Build) -> Any:
    """Compile the training step for the build's mesh, whose devices need not be there."""
    with jax.sharding.use_abstract_mesh(built.mesh.abstract_mesh):  # its devices decide the kernels
        return built.train_step.lower(built.abstract_state, built.abstract_batch()).compile()


def estimated_cycles(hlo_text: str) -> int:
    """Return the sum of XLA:TPU's estimates over a step, loop bodies times their trip counts; 0 for other programs."""
    program, entry = read_program(hlo_text)
    total = 0
    for name, times, _, caller in visits(program, entry, entry):
        if times is None:
            raise ValueError(f"the trip count of the loop around {name} is not in the program")
        own = [i for i in program[name] if name == caller]  # a fusion's estimate has its inside
        text = " ".join(i.attributes for i in own if not i.opcode.endswith(("-done", "-update")))
        total += times * sum(map(int, re.findall(r'"estimated_cycles":"?(\d+)', text)))
    return total


def read_program(hlo_text: str) -> tuple[Program, str]:
    """Return the instructions of each computation, and the name of the entry computation."""
    program, entry, current = {}, "", []
    for line in hlo_text.splitlines():
        if match := COMPUTATION.match(line):
            current = program[match[2]] = []
            entry = match[2] if match[1] else entry
        elif match := INSTRUCTION.match(line):
            current.append(Instruction(*match.groups()))
    return program, entry


def visits(
    program: Program, name: str, caller: str, times: int | None = 1, in_loop: bool = False
) -> Iterator[tuple[str, int | None, bool, str]]:
    """Yield (computation, times a step, in a loop, the computation or the one around its fusion), recursively. The
    times are None in a loop without a trip count."""
    yield name, times, in_loop, caller
    for instruction in program[name]:
        fusion, loop = instruction.opcode == "fusion", instruction.opcode == "while"
        # The end of an asynchronous pair may name its computation again.
        called = [] if instruction.opcode.endswith(("-done", "-update")) else CALLS.findall(instruction.attributes)
        for callee in [callee for text in called for callee in names(text)]:
            trips = trip_count(program, instruction) if loop else 1
            runs = times * trips if times is not None and trips is not None else None
            yield from visits(program, callee, caller if fusion or name != caller else callee, runs, in_loop or loop)


def trip_count(program: Program, loop: Instruction) -> int | None:
    """Return a loop's trip count: XLA's note, or the condition's only constant (JAX counts from 0); else None."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
    limits = [i.operands for i in program[condition[1]] if i.opcode == "constant"] if condition else []
    return int(limits[0]) if len(limits) == 1 and limits[0].isdigit() else None


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def names(text: str) -> list[str]:
    return re.findall(r"[\w.\-]+", re.sub(r"/\*.*?\*/", "", text))


def type_bytes(text: str) -> int:
    """Return the bytes of an HLO type, tuples included; tokens have none."""
    bits = lambda dtype: 8 if dtype == "pred" else next(iter(numbers(dtype)), 0)
    return sum(bits(dtype) * prod(numbers(sizes)) for dtype, sizes in re.findall(r"(\w+)\[([\d,<=]*)\]", text)) // 8


def collectives(hlo_text: str, mesh_shape: dict[str, int]) -> list[Collective]:
    """Return the collectives of a program (`compiled.as_text()`, or `lowered.as_text("hlo")`).

    `mesh_shape` is `training.mesh.sizes_of(mesh)`; replica groups are positions in `mesh.devices.flat`. Asynchronous
    ones count once, and groups of one device do not count. What a chip sends to other TPU slices is a `send`, with the
    bytes of its operand, and the program does not say along which axes. Raise ValueError for a collective in a loop
    without a trip count.
    """
    program, entry = read_program(hlo_text)
    collectives, seen = [], set()
    for name, times, in_loop, caller in visits(program, entry, entry):
        types = {instruction.name: instruction.type for instruction in program[name]}
        for instruction in program[name]:
            kind, attributes = instruction.opcode.removesuffix("-start"), instruction.attributes
            between_slices = re.search(r'_xla_megascale_transfer_type="(\w+)"', attributes) if kind == "send" else None
            # XLA:TPU repeats a collective in each fusion that it overlaps with, as links of a chain.
            chain = re.search(r'chain_id="\d+"', attributes)
            if not (kind in KINDS or between_slices) or (chain and (caller, chain[0]) in seen):
                continue
            seen.add((caller, chain and chain[0]))
            operands = [types[operand] for operand in names(instruction.operands)]
            if between_slices:
                kind = MEGASCALE.get(between_slices[1], between_slices[1].lower().replace("_", "-"))
                axes, operands, members = SLICES, operands[:1], 1  # without the token that orders it
            else:
                groups = replica_groups(attributes, prod(mesh_shape.values()))
                axes, members = axes_crossed(groups, mesh_shape), len(groups[0])
            size = sum(map(type_bytes, operands)) * (members if kind == "all-gather" else 1)
            dtype = "+".join(sorted({operand.split("[")[0] for operand in operands}))
            if axes:
                if times is None:
                    raise ValueError(f"the trip count of the loop around {name} is not in the program")
                collectives.append(Collective(kind, dtype, axes, in_loop, times, size, is_written(attributes)))
    return collectives


def is_written(attributes: str) -> bool:
    """Return whether a collective is one of the code's own. XLA's partitioner marks what it adds, or names it after the
    operation that needs it."""
    if 'is_spmd_generated="true"' in attributes:
        return False
    named = re.search(r'op_name="(?:[^"]*/)?([^"/]*)"', attributes)
    return named is None or WRITTEN.fullmatch(named[1]) is not None


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """Return the groups of devices that communicate, from any of XLA's notations (xla/hlo/ir: replica_group,
    mesh_and_axis).

    `{{0,1},{2,3}}`, `{}` (all), `[4,2]<=[2,2,2]T(0,2,1)`, `mesh['data'=2,'fsdp'=4] {'fsdp':(1)2}`; also the pairs of
    source_target_pairs.
    """
    text = re.split(r"\b(?:replica_groups|source_target_pairs)=", attributes, maxsplit=1)[1]
    if listed := re.match(r"\{((?:\{[\d,]*\},?)*)\}", text):
        return [numbers(group) for group in re.findall(r"\{([\d,]*)\}", listed[1])] or [list(range(devices))]
    if text.startswith("["):
        sizes, order = text.split("<=", 1)
        return iota(order).reshape(numbers(sizes)).tolist()
    axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", text.split("]")[0])}
    permuted = re.match(r"[^{]*device_ids=\(((\[)?.*?\)?)\) \{", text)
    ids = np.arange(devices) if not permuted else iota(permuted[1]) if permuted[2] else np.array(numbers(permuted[1]))
    # A group's devices differ only in the coordinates of the named axes, or of the named parts of axes.
    place = np.indices(tuple(axes.values())).reshape(len(axes), -1)
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", re.findall(r"\{(.*?)\}", text)[0]):
        along, part = list(axes).index(name), int(size or axes[name])
        stride = axes[name] // (int(before or 1) * part)
        place[along] -= place[along] // stride % part * stride
    _, group = np.unique(place, axis=1, return_inverse=True)
    order = np.argsort(group.ravel(), kind="stable")
    return ids.ravel()[order].reshape(group.max() + 1, -1).tolist()


def iota(text: str) -> np.ndarray:
    """Return 0, 1, 2, ... in the shape that `[2,4]T(1,0)` names, transposed."""
    shape, order = re.findall(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?", text)[0]
    return np.arange(prod(numbers(shape))).reshape(numbers(shape)).transpose(numbers(order) or None)


def axes_crossed(groups: list[list[int]], mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which devices of one group differ."""
    places = [np.unravel_index(group, tuple(mesh_shape.values())) for group in groups]
    return tuple(name for i, name in enumerate(mesh_shape) if any(np.ptp(place[i]) for place in places))
