"""Start train.py on other machines: python -m tools.launch tpu|k8s|slurm|sky COMMAND [options] -- TRAIN_ARGUMENTS

`python -m tools.launch tpu up --help` shows one command's options; docs/pods.md explains each.
"""

import sys

from configs.command_line import Exit, exit_code_of, parse_arguments
from configs.messages import outlive_the_log
from configs.schema import UserError
from tools.launch import k8s, sbatch, sky, tpu
from tools.launch.shell import Trouble, warn

SCHEDULERS = {"k8s": k8s, "sky": sky, "slurm": sbatch, "tpu": tpu}


def main(argv: list[str]) -> int:
    """Run `argv`, the words after `python -m tools.launch`, and return the exit code. Raise UserError for a mistake."""
    end = argv.index("--") if "--" in argv else len(argv)
    words, train = argv[:end], argv[end + 1 :]
    scheduler = SCHEDULERS.get(words[0]) if words else None
    names = list(scheduler.COMMANDS if scheduler else SCHEDULERS)
    if scheduler is None or len(words) < 2 or words[1] not in names:
        if {"-h", "--help"} & set(words):
            print(scheduler.__doc__ if scheduler else __doc__)
            return Exit.COMPLETE
        program = f"python -m tools.launch{f' {words[0]}' if scheduler else ''}"
        raise UserError(f"{program} takes one of {', '.join(names)}; --help shows more")
    command, options = scheduler.COMMANDS[words[1]]
    program = f"python -m tools.launch {words[0]} {words[1]}"
    parsed = parse_arguments(command.__doc__, options, words[2:], program)
    if scheduler is tpu and not parsed.dry_run:
        outlive_the_log("stdout", "stderr")  # an error there would leave machines that cost money
    try:
        return command(parsed, train) or Exit.COMPLETE
    except Trouble as trouble:
        warn(f"error: {trouble}")
        return Exit.PEER_LOST


if __name__ == "__main__":
    given = sys.argv[1:]
    interrupted = "interrupted: what was launched stays and MAY COST MONEY; the same command continues, `down` ends it"
    sys.exit(exit_code_of(lambda: main(given), interrupted))
