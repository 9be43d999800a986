"""Print the use of a run's time, over all its starts: python -m tools.goodput RUN. See run/goodput.py for the parts."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from configs.command_line import Exit, parse_arguments
from configs.schema import AnyPath, UserError
from run.goodput import goodput
from run.record import Events, at_hand


@dataclass(frozen=True)
class Arguments:
    """Print the seconds of a run over all its starts, by use."""

    run_dir: Annotated[AnyPath, tyro.conf.Positional]
    """Folder of the run, here or at gs://."""


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    folder = at_hand(arguments.run_dir)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no run (no config.json)")
    spent = goodput(Events(folder).read())
    wall = sum(spent.values())
    for part, seconds in spent.items():
        print(f"{part:12} {seconds:12.1f} s {seconds / (wall or 1):8.1%}")
    print(f"{'wall time':12} {wall:12.1f} s")
    return Exit.COMPLETE


if __name__ == "__main__":
    from hosts.runtime import run_command

    run_command(main)
