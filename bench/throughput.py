"""Tokens a second of the training step on random tokens, as one JSON line: what speed is quoted from.

python -m bench.throughput --config=configs/d12.py --depth=20 --rows=16 --micro_batches=4 --profile
"""

import json
from dataclasses import dataclass

import jax

from bench.measure import Sizes, measure, sized
from configs.command_line import parse
from configs.schema import Positive
from hosts.runtime import run_command


@dataclass(frozen=True)
class Arguments(Sizes):
    """What is measured, where it differs from the config."""

    timed_steps: Positive[int] = 9
    """Steps whose median is taken, after 3 that are not."""
    profile: bool = False
    """Before the line, a table of the instructions that take the most time, from steps that are not timed."""


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    config = sized(config, arguments, jax.device_count())
    print(json.dumps(measure(config, arguments.timed_steps, arguments.profile)))
    return 0


if __name__ == "__main__":
    run_command(main)
