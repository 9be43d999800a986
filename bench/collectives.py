"""What the compiled training step sends between chips, read from XLA's program: one table, and nothing is run.

python -m bench.collectives --config=configs/d12.py --topology=v5e:4x4 --mesh.data=-1

With --topology the step is compiled ahead of time for that TPU slice or those GPUs, which need not be there (but what
drives them must be installed: EXTRA=tpu or cuda), else for the devices here. Exit code 1 where anything crosses the
mesh axis `data` inside the scan over micro-batches: gradients should cross it once a step.

Bytes are a chip's payload, not what a ring sends for it: the result of an all-gather, the operand of everything else
(of a reduce-scatter, the whole tensor before it is scattered). The TPU compiler may make all-reduces of reduce-scatters
and, with zeros around each share, of all-gathers: the type and the bytes tell which. Cycles are the TPU compiler's
estimate of its own scheduled work: not of collectives, attention kernels or asynchronous copies. For other programs,
the bytes that their instructions read and write in memory stand there.
"""

import os
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from bench import throughput
from bench.hlo import estimated_cycles, names, numbers, read_program, traffic, type_bytes, visits
from configs.command_line import parse
from configs.schema import Config, UserError
from model.flops import parameter_counts
from training.mesh import batch_shape, batch_sharding, make_mesh
from training.optimizer import make_optimizer
from training.runtime import run_command
from training.state import abstract_state, compute_dtype, split_model
from training.step import make_train_step

# What XLA:GPU asks of the GPU that it compiles for: a GpuTargetConfigProto, as text.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
"""
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute", "collective-broadcast")


@dataclass(frozen=True)
class Arguments:
    """For which machine, and the sizes that differ from the config's."""

    topology: str = ""
    """A TPU slice, as `v5e:4x4`, `v5p:4x4x4`, `v6e:4x4`, or GPUs of a machine, as `h200:8`. Empty: the devices here."""
    rows: int = 4
    """Rows of a micro-batch on one device."""
    micro_batches: int = 4
    """Micro-batches of a step; of a single one the compiler would leave no loop to look into."""


class Collective(NamedTuple):
    """A collective instruction that crosses at least one axis of the mesh."""

    kind: str  # one of KINDS
    dtype: str  # f32, bf16, ...
    axes: tuple[str, ...]  # along which devices of one of its groups differ
    in_loop: bool  # in the scan over micro-batches, or in any other loop
    times: int  # a step
    bytes_each: int  # payload of one execution on one chip
    label: str  # the end of the name that JAX gave it, or XLA's where it has none


def collectives(hlo_text: str, mesh_shape: dict[str, int]) -> list[Collective]:
    """Those of a program (`compiled.as_text()`, or `lowered.as_text("hlo")`).

    `mesh_shape` is `dict(mesh.shape)`; replica groups hold positions in `mesh.devices.flat`. What is asynchronous
    counts once, and groups of one device not at all. ValueError for a loop whose trip count cannot be told.
    """
    program, entry = read_program(hlo_text)
    found, seen = [], set()
    for name, times, in_loop, caller in visits(program, entry, entry):
        types = {instruction.name: instruction.type for instruction in program[name]}
        for instruction in program[name]:
            kind, attributes = instruction.opcode.removesuffix("-start"), instruction.attributes
            # XLA:TPU writes one collective into each of the fusions that it overlaps with, as links of a chain.
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
                found.append(Collective(kind, dtype, axes, in_loop, times, size, label))
    return found


def device_groups(attributes: str, devices: int) -> list[list[int]]:
    """Which devices talk with each other, from any of XLA's notations (xla/hlo/ir: replica_group, mesh_and_axis).

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
    # A group's devices agree in all coordinates but those of the named axes, or of the named parts of axes.
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
    """`[2,4]T(1,0)`: 0, 1, 2, ... in that shape, transposed."""
    shape, order = re.findall(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?", text)[0]
    return np.arange(prod(numbers(shape))).reshape(numbers(shape)).transpose(numbers(order) or None)


def axes_crossed(groups: list[list[int]], mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which devices of one group differ."""
    places = [np.unravel_index(group, tuple(mesh_shape.values())) for group in groups]
    return tuple(name for i, name in enumerate(mesh_shape) if any(np.ptp(place[i]) for place in places))


def compile_step(config: Config, mesh: Mesh) -> Any:
    """The training step for that mesh, from shapes alone."""
    dtype = compute_dtype(config.model, mesh.devices.flat[0].platform)
    shapes = split_model(config.model, dtype)[1]
    optimizer, rates = make_optimizer(config.optimizer, shapes, config.model.width, config.steps, mesh)
    train_step = make_train_step(config.model, dtype, mesh, optimizer, rates, config.optimizer.clip_norm)
    shape, sharding = batch_shape(config.batch, mesh), batch_sharding(mesh)
    types = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in types.items()}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # whose devices choose the kernels
        return train_step.lower(abstract_state(config.model, optimizer, mesh), batch).compile()


def devices_of(topology: str) -> Any:
    """The chips of a TPU slice, or the GPUs of a machine, that need not be there; or the devices here."""
    if not topology:
        return jax.devices()
    # Before JAX first looks for devices: else it, and libtpu, would wait for a TPU.
    jax.config.update("jax_platforms", "cpu")
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    name, _, count = topology.partition(":")
    try:
        if name == "h200":
            options = {"topology": f"1x1x{count}", "target_config": H200}  # slices x machines x GPUs of one
            return topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:
        raise UserError(f"--topology={topology}: {error}") from error


def report(found: list[Collective]) -> None:
    """Prints the table: like collectives in one row."""
    rows = defaultdict(lambda: np.zeros(2, int))
    for c in found:
        place = "loop" if c.in_loop else "once"
        rows[c.kind, c.dtype, "+".join(c.axes), place, c.label] += (c.times, c.times * c.bytes_each)
    print(f"{'collective':20}{'type':6}{'axes':18}{'where':7}{'times':>6}{'bytes a step':>16}  label")
    for (kind, dtype, axes, place, label), (times, size) in rows.items():
        print(f"{kind:20}{dtype:6}{axes:18}{place:7}{times:6}{size:16,}  {label}")


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    mesh = make_mesh(config.mesh, devices_of(arguments.topology))
    sizes = throughput.Arguments(rows=arguments.rows, micro_batches=arguments.micro_batches)
    config = throughput.sized(config, sizes, mesh.size // mesh.shape["tensor"])
    start = time.perf_counter()
    compiled = compile_step(config, mesh)
    seconds = time.perf_counter() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    found = collectives(text, dict(mesh.shape))
    report(found)
    sums = [c for c in found if c.kind in ("all-reduce", "reduce-scatter") and c.dtype == "f32" and "data" in c.axes]
    reduced = sum(c.times * c.bytes_each for c in sums)
    gradients = 4 * sum(parameter_counts(config.model).values()) // (mesh.shape["fsdp"] * mesh.shape["tensor"])
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    parts = {"arguments": memory.argument_size_in_bytes, "outputs": outputs, "temporaries": memory.temp_size_in_bytes}
    print(f"\n{mesh.size} x {mesh.devices.flat[0].device_kind}, {dict(mesh.shape)}; compiled in {seconds:.0f} s")
    print(f"float32 reduced over data: {reduced:,} bytes; gradients: {gradients:,}")
    print("memory of a chip:", ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in parts.items()))
    cycles = estimated_cycles(text)
    print(f"estimated cycles: {cycles:,}" if cycles else f"read and written in memory: {traffic(text):,} bytes")
    wrong = [c for c in found if c.in_loop and "data" in c.axes]
    for c in wrong:
        print(f"FAIL: {c.kind} over data in the loop: {c.times} times a step, {c.bytes_each:,} bytes each, {c.label}")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_command(main)
