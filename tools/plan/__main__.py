"""Plan a run without its machines.

python -m tools.plan --config=FILE --topology=v5e:4x4 'h200:8' --search

For each topology it prints whether the step fits the memory, and its speed at best and at worst, with the limiting
part. It also prints the run's time and cost. --search tries meshes, rows_per_device, recomputation and loss_chunks. All
of it is in closed form: nothing is compiled. --compile=N compiles the best N and uses the memory that the programs ask
for. The choice is printed as a command line of train.py. Exit code 1 if nothing fits. docs/planning.md has its errors.
"""

import contextlib
import json
import shlex
import sys
from dataclasses import dataclass, fields

from configs.command_line import Exit, exit_code_of, parse
from configs.schema import AnyPaths, Config, FilePath, NotNegative, UserError
from configs.validation import require_steps
from hosts.machines import HEADROOM, name_of
from tools.plan import output
from tools.plan.corrections import corrected, factors, measured
from tools.plan.search import Given, Row, more_devices, nearest_change, row_of, search
from tools.programs.topologies import known_topology
from tools.report import read_runs
from training.candidate import Candidate
from training.memory import with_rows


@dataclass(frozen=True)
class Arguments:
    """Options of this command, not of the run."""

    topology: tuple[str, ...] = ()
    """TPU slices (`v5e:16x16`), GPUs (`h200:8`), or several of them (`'2x v5e:16x16'`, `'64x h200:8'`), one or more."""
    search: bool = False
    """Search meshes, rows, recomputation and chunks. Otherwise plan the unchanged config."""
    compile: NotNegative[int] = 0
    """Compile this many of the best of each topology, some minutes each, and use their programs' memory."""
    price: tuple[NotNegative[float], ...] = ()
    """US dollars a device and hour: one for all, or one for each topology."""
    preemptions: NotNegative[float] = 0.0
    """Preemptions of the complete run, a day."""
    calibrate: AnyPaths = ()
    """Folders of runs. Their measurements of a machine replace the assumed figures."""
    json: bool = False
    """Print JSON instead of tables."""
    picture: FilePath = ""
    """A file, as plan.png: memory against tokens/s of every candidate, each topology's best marked. Empty: no
    picture."""


def plan(config: Config, arguments: Arguments, words: list[str]) -> int:
    """Print the plan. Raise UserError for an impossible topology or sizes."""
    if arguments.picture:
        output.require_picture(arguments.picture)
    if not arguments.topology:
        raise UserError("--topology is missing: the machines to plan for, as --topology=v5e:16x16 '64x h200:8'")
    require_steps(config)
    asked = [Candidate(config, known_topology(text)) for text in arguments.topology]
    if not arguments.search:
        asked = [with_rows(candidate, HEADROOM * candidate.machine.for_programs) for candidate in asked]
    prices = arguments.price or (None,)
    prices = prices * len(asked) if len(prices) == 1 else prices
    if len(prices) != len(asked):
        raise UserError(f"--price has {len(prices)} numbers for {len(asked)} topologies; give one, or one each")
    say = (lambda text: None) if arguments.json else print
    runs = [measured(run) for run in read_runs(list(arguments.calibrate))]
    for run in runs:
        say(run.words)
    plans: list[list[Row]] = []
    for candidate, price in zip(asked, prices):
        given = Given(price, arguments.preemptions, *factors(runs, candidate.machine.kind))
        rows = search(candidate, given) if arguments.search else [row_of(candidate, given)]
        plans.append(rows)
        say(output.candidates(rows))
    if arguments.compile:
        plans = [corrected(rows, arguments.compile) for rows in plans]
        for rows in plans:
            say(output.candidates(rows))
    best = [rows[0] for rows in plans if rows[0].fits]
    chosen = min(best, key=lambda row: (row.run.cost or 0, row.run.days), default=None)
    if arguments.json:
        print(json.dumps(output.as_json(plans, chosen, command(words, config, chosen)), indent=1))
    elif chosen:
        say(output.details(chosen))
        if len(plans) > 1:
            say(output.comparison(best))
        say(f"\n{command(words, config, chosen)}")
    for rows in plans:
        if not rows[0].fits:
            print(what_would_fit(rows[0], arguments.search), file=sys.stderr)
    if arguments.picture:
        output.picture(plans, arguments.picture)
    return Exit.COMPLETE if chosen else Exit.FAILED


def what_would_fit(row: Row, searched: bool) -> str:
    """Return a line about a topology whose best does not fit: what it asks for, and the nearest change that fits."""
    name = name_of(row.candidate.topology)
    line = f"{name}: does not fit: it asks for {output.gib(row.bytes)}, and {output.limit(row)} may be taken; "
    change = None if searched else nearest_change(row)
    if change:
        return f"{line}nearest that would: {change[0]} ({output.gib(change[1].bytes)})"
    larger = more_devices(row.candidate)
    return line + (f"nothing on it would; {larger} would" if larger else "nothing on it would, nor on 64 times as many")


def command(words: list[str], config: Config, chosen: Row | None) -> str:
    """Return the command line of train.py: what was given, without this command's options, and the choices that
    differ."""
    if chosen is None:
        return ""
    before = Candidate(config, chosen.candidate.topology).options()
    changed = {name: value for name, value in chosen.candidate.options().items() if value != before[name]}
    if config.batch.rows_per_device == "auto" and [*changed] == ["batch.rows_per_device"]:
        changed = {}  # train.py chooses them, too
    own, kept, taken = {field.name for field in fields(Arguments)}, [], False
    for word in words:
        if word.startswith("--"):
            taken = word[2:].partition("=")[0].replace("-", "_") in own | changed.keys()
        kept += [] if taken else [word]
    return shlex.join(["python", "train.py", *kept, *(f"--{name}={value}" for name, value in changed.items())])


def main() -> int:
    words = sys.argv[1:]
    # `--topology=A B` is `--topology A B`
    lists = ("--topology=", "--price=", "--calibrate=")
    spread = [part for word in words for part in (word.split("=", 1) if word.startswith(lists) else [word])]
    # A config may print what follows from its depth, which is not JSON.
    with contextlib.redirect_stdout(sys.stderr if "--json" in words else sys.stdout):
        config, arguments = parse(__doc__, Arguments, spread)
    return plan(config, arguments, words)


if __name__ == "__main__":
    sys.exit(exit_code_of(main, "interrupted; what is printed above is in closed form"))
