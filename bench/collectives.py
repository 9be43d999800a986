"""Print what the compiled training step sends between chips, from XLA's program. Nothing runs.

python -m bench.collectives --config=configs/plain.py --model.depth=12 --topology=v5e:4x4 --mesh.data=-1

With --topology the step is compiled ahead of time for that TPU slice or those GPUs. The devices need not be present,
but their driver library must be installed (EXTRA=tpu or cuda). Without it, the step is compiled for the devices here.
The exit code is 1 if anything crosses the mesh axis `data` inside the scan over micro-batches, since gradients should
cross it once a step, or if XLA's partitioner added a collective that the code does not name.

Bytes are a chip's payload, not the traffic of a ring: the result of an all-gather, the operand of any other collective
(for a reduce-scatter, the tensor before it is scattered). The TPU compiler may turn reduce-scatters into all-reduces,
and all-gathers into all-reduces of shares padded with zeros; type and bytes identify them. `slices` are transfers
between TPU slices: one for each collective over `data` that also crosses them. Cycles are the TPU
compiler's estimate of its own scheduled work, without collectives, attention kernels and asynchronous copies.
"""

import time
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from bench.throughput import Sizes, sized
from hosts.runtime import run_command
from model.gpt import parameter_counts
from options.command_line import parse
from options.schema import Positive
from tools.programs.compiled import Collective, collectives, compile_step, estimated_cycles
from tools.programs.topologies import devices_of
from training.build import build
from training.mesh import sizes_of


@dataclass(frozen=True)
class Arguments(Sizes):
    """The machine, and the sizes that differ from the config's."""

    topology: str = ""
    """A TPU slice, as `v5e:4x4`, `v5p:4x4x4`, `v6e:4x4`; GPUs of a machine, as `h200:8`; or several of them, as
    `2x v5e:4x4`, `64x h200:8`. Empty: the devices here."""
    rows: Positive[int] | None = 4
    """Rows of a micro-batch on one device."""
    micro_batches: Positive[int] | None = 4
    """Micro-batches of a step. With a single one the compiler would leave no loop to look into."""


def report(crossed: list[Collective]) -> None:
    """Print the table: like collectives in one row."""
    rows = defaultdict(lambda: np.zeros(2, int))
    for c in crossed:
        place = "loop" if c.in_loop else "once"
        rows[c.kind, c.dtype, "+".join(c.axes), place] += (c.times, c.times * c.bytes_each)
    print(f"{'collective':20}{'type':6}{'axes':18}{'place':7}{'times':>6}{'bytes a step':>16}")
    for (kind, dtype, axes, place), (times, size) in rows.items():
        print(f"{kind:20}{dtype:6}{axes:18}{place:7}{times:6}{size:16,}")


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    devices = devices_of(arguments.topology)
    config = sized(config, arguments, len(devices))
    built = build(config, devices)
    mesh = built.mesh
    start = time.perf_counter()
    compiled = compile_step(built)
    seconds = time.perf_counter() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    crossed = collectives(text, sizes_of(mesh))
    report(crossed)
    sums = [c for c in crossed if c.kind in ("all-reduce", "reduce-scatter") and c.dtype == "f32" and "data" in c.axes]
    reduced = sum(c.times * c.bytes_each for c in sums)
    gradients = 4 * sum(parameter_counts(config.model).values()) // (mesh.shape["fsdp"] * mesh.shape["tensor"])
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    parts = {"arguments": memory.argument_size_in_bytes, "outputs": outputs, "temporaries": memory.temp_size_in_bytes}
    print(f"\n{mesh.size} x {mesh.devices.flat[0].device_kind}, {sizes_of(mesh)}; compiled in {seconds:.0f} s")
    print(f"float32 reduced over data: {reduced:,} bytes; gradients: {gradients:,}")
    print("memory of a chip:", ", ".join(f"{name} {size / 2**30:.3f} GiB" for name, size in parts.items()))
    if cycles := estimated_cycles(text):
        print(f"estimated cycles: {cycles:,}")
    in_loop = [c for c in crossed if c.in_loop and "data" in c.axes]
    for c in in_loop:
        print(f"FAIL: {c.kind} over data in the loop: {c.times} times a step, {c.bytes_each:,} bytes each")
    unwritten = [c for c in crossed if not c.written]
    for c in unwritten:
        print(
            f"FAIL: {c.kind} over {'+'.join(c.axes)} is not in the code: {c.times} times, {c.bytes_each:,} bytes each"
        )
    return 1 if in_loop or unwritten else 0


if __name__ == "__main__":
    run_command(main)
