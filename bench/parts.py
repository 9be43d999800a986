"""Draw where a step's time goes on a CPU: taskset -c 0 python -m bench.parts --config=configs/small.py.

It traces steps on random tokens, and adds up the seconds of the program's operations for each part of the code, matrix
products apart from all other passes. JAX keeps with each operation the source lines that it comes from; a backward pass
has those of its forward pass. On one core, as above, no thread waits for another. It writes parts.json and .png. For a
TPU or a GPU, `train.py --profile.steps` makes a trace for XProf.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

from bench.throughput import WARMUP_STEPS, random_batch
from hosts.runtime import ROOT, run_command
from options.command_line import parse
from options.schema import FilePath, Positive
from options.validation import require_steps
from system.errors import UserError
from system.files import write_picture, write_whole
from training.build import build

PARTS = {
    "attention": ("model/attention.py:", "model/rotary.py:", "model/kernels.py:"),
    "MLP": ("model/gpt.py:MLP.", "model/layers.py:relu_squared", "model/layers.py:_relu_squared"),
    "head and loss": ("model/loss.py:",),
    "embeddings, norms, residual stream": ("model/gpt.py:",),
    "Muon": ("training/muon.py:", "training/deal.py:"),
    "Adam, clip, casts": ("training/",),
}
"""The functions of each part, as beginnings of `FILE:FUNCTION`. Of an operation's functions the innermost that is
listed counts."""
UNKNOWN = "without a source line"
CONTAINERS = ("while", "call", "conditional")
"""Operations whose time is that of others."""


@dataclass(frozen=True)
class Arguments:
    """Options of this command."""

    traced_steps: Positive[int] = 5
    """Steps in the trace, after 3 to warm up."""
    out: FilePath = "runs/parts"
    """A folder for parts.json and parts.png."""


class Operation(NamedTuple):
    """An operation of a program."""

    part: str
    """A key of PARTS, or UNKNOWN."""
    is_product: bool
    """True for a matrix product."""


def operations(program: str) -> dict[str, Operation]:
    """Return the operations of a compiled program, by name, from its text. Those that contain others are left out."""
    stacks = source_stacks(program)
    found = {}
    for name, kind, rest in re.findall(r"^ *(?:ROOT )?%(\S+) = .*? ([a-z][a-z-]*)\((.*)$", program, re.MULTILINE):
        if kind in CONTAINERS:
            continue
        stack = re.search(r"stack_frame_id=(\d+)", rest)
        origin = re.search(r'op_name="([^"]*)"', rest)
        is_product = origin is not None and origin[1].endswith("dot_general")
        found[name] = Operation(part_of(stacks[int(stack[1])]) if stack else UNKNOWN, is_product)
    return found


def source_stacks(program: str) -> dict[int, list[str]]:
    """Return the functions that each stack of a program's text has, as `FILE:FUNCTION`, the innermost first."""
    files = {number: quoted.strip('"') for number, quoted in entries(program, "FileNames")}
    functions = {number: quoted.strip('"') for number, quoted in entries(program, "FunctionNames")}
    places = {}
    for number, place in entries(program, "FileLocations"):
        file = files[field(place, "file_name_id")].removeprefix(f"{ROOT}/")
        places[number] = f"{file}:{functions[field(place, 'function_name_id')]}"
    stacks: dict[int, list[str]] = {0: []}
    for number, frame in entries(program, "StackFrames"):
        outer = field(frame, "parent_frame_id") - 1
        stacks[number] = [places[field(frame, "file_location_id")], *stacks[outer]]
    return stacks


def entries(program: str, table: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a table of a program's text."""
    _, _, rest = program.partition(f"\n{table}\n")
    for line in rest.partition("\n\n")[0].splitlines():
        number, _, entry = line.partition(" ")
        yield int(number), entry


def field(entry: str, name: str) -> int:
    """Return a number of an entry `{name=number ...}`."""
    return int(entry.partition(f"{name}=")[2].split()[0].rstrip("}"))


def part_of(stack: list[str]) -> str:
    """Return the part that an operation with this stack belongs to."""
    for function in stack:
        for part, beginnings in PARTS.items():
            if function.startswith(beginnings):
                return part
    return UNKNOWN


def traced_seconds(trace: Path, known: dict[str, Operation]) -> Counter[Operation]:
    """Return the seconds of a trace's operations, by part, and products apart."""
    seconds: Counter[Operation] = Counter()
    (file,) = trace.glob("**/*.xplane.pb")
    for plane in ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name in known:
                    seconds[known[event.name]] += event.duration_ns / 1e9  # pyright: ignore[reportArgumentType]
    return seconds


def draw(shares: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw a bar for each part: its matrix products, then all else."""
    from matplotlib.figure import Figure  # a second to import

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot()
    labels = [share["part"] for share in shares]
    products = [100 * share["products"] for share in shares]
    others = [100 * share["other"] for share in shares]
    axes.barh(labels, products, color="tab:blue", label="matrix products")
    axes.barh(labels, others, left=products, color="tab:orange", label="all else")
    for row, (product, other) in enumerate(zip(products, others)):
        axes.annotate(
            f"{product + other:.0f}%", (product + other, row), (4, 0), textcoords="offset points", va="center"
        )
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set(xlabel="% of a step's time", title=title)
    axes.legend(loc="lower right")
    write_picture(path, figure)


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    require_steps(config)
    if jax.default_backend() != "cpu":
        raise UserError("bench.parts reads traces of a CPU; here, give train.py --profile.steps, and open it in XProf")
    if config.batch.rows_per_device == "auto":
        raise UserError("give --batch.rows_per_device=ROWS: the config has `auto`")
    built = build(config)
    state, batch = built.create_state(), random_batch(built)
    compiled = built.train_step.lower(state, batch).compile()
    for _ in range(WARMUP_STEPS):
        state, _ = jax.block_until_ready(compiled(state, batch))
    with TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(arguments.traced_steps):
                state, _ = jax.block_until_ready(compiled(state, batch))
        seconds = traced_seconds(Path(folder), operations(compiled.as_text()))
    total = seconds.total()
    shares = []
    for part in (*PARTS, UNKNOWN):
        products, other = seconds[Operation(part, True)], seconds[Operation(part, False)]
        shares.append({"part": part, "products": products / total, "other": other / total})
    out = Path(arguments.out)
    result = {"config": config.name, "dtype": built.dtype.name, "jax": jax.__version__, "shares": shares}
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "parts.json", json.dumps(result, indent=2))
    draw(shares, f"A step of {config.name}, {built.dtype.name}", out / "parts.png")
    for share in shares:
        print(f"{share['part']:36} products {share['products']:6.1%}  all else {share['other']:6.1%}")
    print(f"in {out}: parts.json and parts.png")
    return 0


if __name__ == "__main__":
    run_command(main)
