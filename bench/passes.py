"""What the compiled training step passes over in memory, by size and origin: one table, and nothing is run.

python -m bench.passes --config=configs/nanochat.py --model.depth=2 --topology=v6e:2x4 --rows=4 --micro_batches=2

The step is compiled ahead of time for that TPU slice or those GPUs. Each row sums up the instructions of one kind, type
and origin: the function and line of this project that they come from. `product` is a matrix product with all that is
fused to it, `pass` a fusion without one, `copy` and the rest are XLA's own instructions. Cycles are XLA:TPU's estimate;
a kernel (`custom-call`) and asynchronous copies have none. Bytes are what an instruction reads and writes.

The programs of two depths differ by the blocks between them.
"""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.measure import Sizes, sized
from configs.command_line import parse
from configs.schema import Positive
from hosts.runtime import run_command
from tools.programs.compile import compile_step
from tools.programs.hlo import Instruction, Program, instruction_cycles, kernels, origins, read_program, type_bytes
from tools.programs.topologies import devices_of
from training.build import build

PROJECT = str(Path(__file__).parent.parent)


@dataclass(frozen=True)
class Arguments:
    """For which machine, and the sizes that differ from the config's."""

    topology: str = "v6e:2x4"
    """A TPU slice, as `v5e:4x4`, or GPUs of a machine, as `h200:8`."""
    rows: Positive[int] = 4
    """Rows of a micro-batch on one device."""
    micro_batches: Positive[int] = 2
    """Micro-batches of a step; of a single one the compiler would leave no loop to look into."""
    top: Positive[int] = 60
    """Rows of the table."""


class Kind(NamedTuple):
    """What instructions of one row have in common."""

    kind: str
    result: str
    origin: str


def kind_of(instruction: Instruction, program: Program) -> str:
    """`product`, `pass`, or the instruction's name in HLO."""
    if instruction.opcode != "fusion":
        return "product" if instruction.opcode in ("convolution", "dot") else instruction.opcode
    called = re.search(r"calls=%?([\w.\-]+)", instruction.attributes)
    inside = program[called[1]] if called else []
    return "product" if any(kind_of(i, program) == "product" for i in inside) else "pass"


def table(hlo_text: str) -> dict[Kind, tuple[int, int, int]]:
    """Of each kind cycles, bytes, and instructions a step."""
    program, _ = read_program(hlo_text)
    where = origins(hlo_text, PROJECT)
    sums = defaultdict[Kind, Counter](Counter)
    for instruction, times, reads in kernels(hlo_text):
        result = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", instruction.type)
        frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        kind = Kind(kind_of(instruction, program), result, where.get(int(frame[1]), "") if frame else "")
        size = sum(map(type_bytes, (instruction.type, *reads)))
        sums[kind].update(cycles=times * instruction_cycles(instruction), bytes=times * size, times=times)
    return {kind: (of["cycles"], of["bytes"], of["times"]) for kind, of in sums.items()}


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    devices = devices_of(arguments.topology)
    config = sized(config, Sizes(rows=arguments.rows, micro_batches=arguments.micro_batches), len(devices))
    rows = table(compile_step(build(config, devices)).as_text())
    print(f"{'cycles a step':>15}{'MB a step':>11}{'times':>7}  kind, result, origin")
    for kind, (cycles, size, times) in sorted(rows.items(), key=lambda row: row[1], reverse=True)[: arguments.top]:
        print(f"{cycles:15,}{size / 1e6:11,.1f}{times:7}  {kind.kind:10}{kind.result[:80]}  {kind.origin}")
    cycles, sizes = Counter(), Counter()
    for kind, (of_kind, size, _) in rows.items():
        cycles[kind.kind] += of_kind
        sizes[kind.kind] += size
    for kind, of_kind in cycles.most_common():
        print(f"{of_kind:15,}{sizes[kind] / 1e6:11,.1f}  of every {kind}")
    return 0


if __name__ == "__main__":
    run_command(main)
