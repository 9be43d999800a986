"""Read the collectives of a compiled program: what crosses which axis of the mesh, how often, with how many bytes."""

import re
from collections import defaultdict
from math import prod
from typing import NamedTuple

import numpy as np

from tools.programs.hlo import names, numbers, read_program, type_bytes, visits

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute", "collective-broadcast")


class Collective(NamedTuple):
    """A collective instruction that crosses at least one axis of the mesh."""

    kind: str  # one of KINDS
    dtype: str  # f32, bf16, ...
    axes: tuple[str, ...]  # those along which devices of one of its groups differ
    in_loop: bool  # in the scan over micro-batches or any other loop
    times: int  # executions a step
    bytes_each: int  # payload of one execution on one chip
    label: str  # the end of its name in JAX, or XLA's name if it has none


def collectives(hlo_text: str, mesh_shape: dict[str, int]) -> list[Collective]:
    """Return the collectives of a program (`compiled.as_text()`, or `lowered.as_text("hlo")`).

    `mesh_shape` is `training.mesh.sizes_of(mesh)`; replica groups are positions in `mesh.devices.flat`. Asynchronous
    ones count once, and groups of one device do not count. Raise ValueError for a loop whose trip count is not in the
    program.
    """
    program, entry = read_program(hlo_text)
    collectives, seen = [], set()
    for name, times, in_loop, caller in visits(program, entry, entry):
        types = {instruction.name: instruction.type for instruction in program[name]}
        for instruction in program[name]:
            kind, attributes = instruction.opcode.removesuffix("-start"), instruction.attributes
            # XLA:TPU repeats a collective in each fusion that it overlaps with, as links of a chain.
            chain = re.search(r'chain_id="\d+"', attributes)
            if kind not in KINDS or (chain and (caller, chain[0]) in seen):
                continue
            seen.add((caller, chain and chain[0]))
            groups = device_groups(attributes, prod(mesh_shape.values()))
            operands = [types[operand] for operand in names(instruction.operands)]
            size = sum(map(type_bytes, operands)) * (len(groups[0]) if kind == "all-gather" else 1)
            dtype = "+".join(sorted({operand.split("[")[0] for operand in operands}))
            label = re.search(r'op_name="(?:[^"]*/)?([^"/]+/[^"/]+)"', attributes)
            label = label[1] if label else instruction.name.rstrip(".0123456789")
            if axes := axes_crossed(groups, mesh_shape):
                collectives.append(Collective(kind, dtype, axes, in_loop, times, size, label))
    return collectives


def device_groups(attributes: str, devices: int) -> list[list[int]]:
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
    groups = defaultdict(list)
    for device, others in zip(ids.ravel().tolist(), place.T.tolist()):
        groups[tuple(others)].append(device)
    return list(groups.values())


def iota(text: str) -> np.ndarray:
    """Return 0, 1, 2, ... in the shape that `[2,4]T(1,0)` names, transposed."""
    shape, order = re.findall(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?", text)[0]
    return np.arange(prod(numbers(shape))).reshape(numbers(shape)).transpose(numbers(order) or None)


def axes_crossed(groups: list[list[int]], mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which devices of one group differ."""
    places = [np.unravel_index(group, tuple(mesh_shape.values())) for group in groups]
    return tuple(name for i, name in enumerate(mesh_shape) if any(np.ptp(place[i]) for place in places))
