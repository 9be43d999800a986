"""Starts train.py elsewhere: python -m tools.launch tpu|k8s|slurm|sky COMMAND [options] -- arguments of train.py.

`python -m tools.launch tpu up --help` shows one command's options; docs/pods.md goes through each.
"""

import sys

import tyro

from configs.command_line import exit_code_of
from configs.exit_codes import Exit
from configs.schema import UserError, check_types, with_homes
from tools.launch import k8s, sbatch, sky, tpu
from tools.launch.shell import Trouble, warn

SCHEDULERS = {"k8s": k8s, "sky": sky, "slurm": sbatch, "tpu": tpu}


def main(argv: list[str]) -> int:
    """Runs `argv`, the words after `python -m tools.launch`. UserError for a mistake."""
    given, train = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    if not given or given[0] not in SCHEDULERS:
        if given and given[0] in ("-h", "--help"):
            print(__doc__)
            return Exit.COMPLETE
        raise UserError(f"python -m tools.launch takes one of {', '.join(SCHEDULERS)}; --help shows more")
    room = SCHEDULERS[given[0]]
    if len(given) < 2 or given[1] not in room.COMMANDS:
        if {"-h", "--help"} & set(given):
            print(room.__doc__)
            return Exit.COMPLETE
        raise UserError(f"python -m tools.launch {given[0]} takes one of {', '.join(room.COMMANDS)}; --help shows more")
    command, options = room.COMMANDS[given[1]]
    program = f"python -m tools.launch {given[0]} {given[1]}"
    parsed = tyro.cli(options, prog=program, description=command.__doc__, args=given[2:], use_underscores=True)
    check_types(parsed)
    try:
        return command(with_homes(parsed), train)
    except Trouble as trouble:
        warn(f"error: {trouble}")
        return Exit.PEER_LOST


if __name__ == "__main__":
    words = sys.argv[1:]
    interrupted = "interrupted: what was launched stays and MAY COST MONEY; the same command goes on, `down` ends it"
    sys.exit(exit_code_of(lambda: main(words), interrupted))
