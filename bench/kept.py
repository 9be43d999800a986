"""What a block keeps for its backward pass by `model.remat`, read from compiled programs: widths a token and block.

python -m bench.kept --config=configs/d12.py --topology=v5e:2x2 --model.width=256 --model.heads=2 --model.kv_heads=2

A width is `model.width` numbers of the compute type. For each `remat` the step is compiled ahead of time for one device
of --topology (or for one here), with two numbers of blocks and two of rows. The temporaries that more blocks take, and
of these what more rows take, are a block's activations: parameters and their gradients do not grow with the rows.
"""

from dataclasses import dataclass, replace
from typing import Any

from configs.command_line import parse
from configs.schema import Config, Positive
from hosts.runtime import run_command
from tools.programs.compile import compile_step
from tools.programs.topologies import devices_of
from training.build import build

REMATS = "none", "products", "block"


@dataclass(frozen=True)
class Arguments:
    """For which machine, and the sizes that are compared."""

    topology: str = ""
    """A TPU slice, as `v5e:2x2`, or GPUs of a machine, as `h200:1`. Empty: the devices here."""
    depths: tuple[Positive[int], Positive[int]] = (4, 8)
    """Blocks."""
    rows: tuple[Positive[int], Positive[int]] = (16, 32)
    """Rows of a micro-batch."""


def kept_widths(config: Config, device: Any, depths: tuple[int, int], rows: tuple[int, int]) -> float:
    """Widths a token and block that the step keeps, by the four programs of these `depths` and `rows`."""

    def temporaries(depth: int, rows: int) -> int:
        tokens = 2 * rows * config.batch.sequence_length  # two micro-batches: of one there is no scan
        batch = replace(config.batch, rows_per_device=rows, tokens_per_step=tokens, ramp="")
        sized = replace(config, model=replace(config.model, depth=depth), batch=batch)
        return compile_step(build(sized, [device])).memory_analysis().temp_size_in_bytes

    of_rows = [temporaries(depths[1], n) - temporaries(depths[0], n) for n in rows]
    tokens = (rows[1] - rows[0]) * config.batch.sequence_length
    width = config.model.width * build(config, [device]).dtype.itemsize
    return (of_rows[1] - of_rows[0]) / ((depths[1] - depths[0]) * tokens * width)


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    device = devices_of(arguments.topology)[0]
    print(f"{device.device_kind}, width {config.model.width}: widths kept a token and block")
    for remat in REMATS:
        of_remat = replace(config, model=replace(config.model, remat=remat))
        print(f"{remat:10}{kept_widths(of_remat, device, arguments.depths, arguments.rows):6.2f}", flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
