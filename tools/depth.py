"""Choose the depth that a time or a price allows: python -m tools.depth --config=configs/nanochat.py --hours=4

The last line has the depth, and the tokens and hours of its training. The depth is the largest even one that trains
within `--hours`, or for `--dollars`, on the devices of this machine. Without either it is the config's. Hours are FLOPs
over the devices' peak times `--mfu`: evaluations, saves and all other stages come on top.
"""

import math
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass

from options.command_line import parse, parse_own, refuse_mistakes
from options.schema import Config, NotNegative, Share
from system.errors import Exit, UserError
from system.exits import exit_code_of


@dataclass(frozen=True)
class Arguments:
    """Options of this command, not of the run."""

    hours: NotNegative[float] = 0.0
    """Most hours of training. 0: no limit."""
    dollars: NotNegative[float] = 0.0
    """Most US dollars of training, at `price`. 0: no limit."""
    price: NotNegative[float] = 0.0
    """US dollars a device and hour."""
    mfu: Share = 0.4
    """Share of the devices' peak FLOP/s that training is taken to reach."""


if __name__ == "__main__":
    refuse_mistakes(parse_own, __doc__, Arguments)  # before the imports, which take seconds

import jax

from hosts.machines import peak_flops
from model.gpt import flops_per_token

DEEPEST = 64
"""More than any machine trains with this recipe."""


def config_of_depth(depth: int) -> Config:
    """Return the command's config at another depth, with everything that follows from it."""
    config, _ = parse(__doc__, Arguments, [*sys.argv[1:], f"--model.depth={depth}"])
    return config


def tokens_of(config: Config) -> int:
    """Return the tokens of a run."""
    return config.steps * config.batch.tokens_per_step


def hours_of(config: Config, flops: float) -> float:
    """Return the hours of a run with this many FLOPs a second."""
    return tokens_of(config) * flops_per_token(config.model, config.batch.sequence_length) / flops / 3600


def reached_flops(kind: str, devices: int, mfu: float) -> float:
    """Return the FLOPs a second of these devices. Raise UserError if their peak is not known."""
    peak = peak_flops(kind)
    if not peak:
        raise UserError(
            f"the speed of {devices} x {kind} is not known, so hours cannot be planned: choose the depth yourself "
            "(DEPTH=12 launch/speedrun.sh), or add the device to hosts/machines.toml"
        )
    return devices * peak * mfu


def deepest_within(hours: float, flops: float) -> Config:
    """Return the config of the largest even depth that trains within `hours`. Raise UserError if there is none."""
    chosen = None
    for depth in range(2, DEEPEST + 1, 2):
        config = config_of_depth(depth)
        if hours_of(config, flops) > hours:
            break
        chosen = config
    if chosen is None:
        raise UserError(f"depth 2 alone takes more than {hours:.3g} hours of training here")
    return chosen


def main() -> int:
    arguments = parse_own(__doc__, Arguments)
    if arguments.dollars and not arguments.price:
        raise UserError("--dollars needs --price, the US dollars a device and hour")
    with redirect_stdout(sys.stderr):  # nanochat.py prints what it derives
        if arguments.hours or arguments.dollars:
            devices = jax.devices()
            flops = reached_flops(devices[0].device_kind, len(devices), arguments.mfu)
            affordable = arguments.dollars / (arguments.price * len(devices)) if arguments.dollars else math.inf
            config = deepest_within(min(arguments.hours or math.inf, affordable), flops)
            hours = f"{hours_of(config, flops):.2f}"
        else:
            config, hours = parse(__doc__, Arguments)[0], "unknown"
    print(config.model.depth, tokens_of(config), hours)
    return Exit.COMPLETE


if __name__ == "__main__":
    sys.exit(exit_code_of(main, "interrupted: no depth was chosen"))
