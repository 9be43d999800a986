"""Everything that wants a device, in order of worth, within so many minutes: python -m bench.accelerator --minutes=9

Each part is a command of its own with a time limit, and is begun only where that still fits; what failed is recorded
with its last lines. The same command again goes on with what is missing. It leaves accelerator.json (each part's
command, seconds and result), index.html (a page with pictures, that needs nothing else) and every part's output.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.accelerator_page import page
from configs.command_line import parse_arguments
from configs.files import write_whole
from configs.schema import FilePath, Positive, UserError
from hosts.runtime import run_command
from run.lines import read_metrics

LAST_LINES = 15
DEVICE = (
    "import jax, json; d = jax.devices(); "
    "print(json.dumps({'device': d[0].device_kind, 'devices': len(d), 'jax': jax.__version__}))"
)


@dataclass(frozen=True)
class Arguments:
    """What is measured on the devices here, and for how long."""

    minutes: Positive[float] = 9.0
    """No part is begun that might not end within them."""
    out: FilePath = "runs/accelerator"
    """Folder of the results. What it holds already is not measured again."""
    plain: FilePath = "configs/d12.py"
    """Config of the plain network."""
    full: FilePath = "configs/nanochat.py"
    """Config of the network with all options and Muon."""
    depths: tuple[Positive[int], ...] = (12, 20)
    """The first is what all parts but the throughput of both networks are measured at."""
    rows: tuple[Positive[int], ...] = (32, 16)
    """Rows of a micro-batch on a device at each depth."""
    micro_batches: Positive[int] = 8
    """Of a step."""
    options: str = ""
    """Further options of every config, as they are typed: `--options="--data.source=FOLDER --mesh.fsdp=2"`."""
    beside: str = ""
    """A shell command that measures another program on the same network and prints a JSON line with tokens_per_second;
    it is run between the throughputs. Empty: left out."""
    parts: tuple[str, ...] = ()
    """Only these, by their names. Empty: all."""


class Part(NamedTuple):
    """One thing that is measured."""

    name: str
    command: list[str]
    limit: int
    """Seconds after which it is ended; it is begun only where they are left."""
    read: Callable[[str], dict[str, Any]]
    """Its result, from what the command printed."""


def last_json(said: str) -> dict[str, Any]:
    return json.loads(said.strip().splitlines()[-1])


def profiled(said: str) -> dict[str, Any]:
    """The JSON line, and the table before it."""
    return last_json(said) | {"profile": "\n".join(said.strip().splitlines()[:-1])}


def swept(said: str) -> dict[str, Any]:
    return {"points": [json.loads(line) for line in said.splitlines() if line.startswith("{")]}


def parts_of(arguments: Arguments) -> list[Part]:
    """All parts, the most telling first."""
    out, plain, full = Path(arguments.out), arguments.plain, arguments.full
    depth, rows, options = arguments.depths[0], arguments.rows[0], shlex.split(arguments.options)
    at, size = f"d{depth}", [f"--depth={depth}", f"--rows={rows}", f"--micro_batches={arguments.micro_batches}"]

    def bench(program: str, config: str, *words: str) -> list[str]:
        return [sys.executable, "-m", f"bench.{program}", f"--config={config}", *words, *options]

    def throughput(name: str, config: str, *words: str, i: int = 0) -> Part:
        sizes = [f"--depth={arguments.depths[i]}", f"--rows={arguments.rows[i]}", size[2]]
        return Part(name, bench("throughput", config, *sizes, *words), 150, profiled)

    def of_depth(i: int) -> list[Part]:
        both, at = (("plain", plain), ("full", full)), arguments.depths[i]
        return [throughput(f"{name} d{at}", config, "--profile", i=i) for name, config in both]

    run_dir, some = out / "run", [str(max(1, rows * n // 4)) for n in (1, 2, 4, 8)]
    training = (
        f"--steps=40 --log.every_steps=5 --checkpoint.every_steps=1000 --eval.every_steps=1000 --run_dir={run_dir}"
    )
    train = f"{training} --eval.tokens=65536 --batch.rows_per_device={rows}".split()
    short = "--steps=60 --model.depth=4 --checkpoint.every_steps=10 --checkpoint.keep_every=20 --eval.every_steps=30"
    short += f" --eval.tokens=65536 --log.every_steps=5 --batch.tokens_per_step=65536 {arguments.options}"
    chaos = ["--faults=3", f"--out={out / 'chaos'}", f"--config={full}", f"--options={short}"]
    return [
        *of_depth(0),
        throughput(f"full {at}, not deterministic", full, "--deterministic=False"),
        Part("beside", ["bash", "-c", arguments.beside], 180, last_json),
        Part("kill and resume", [sys.executable, "-m", "bench.chaos", *chaos], 300, last_json),
        *(part for i in range(1, len(arguments.depths)) for part in of_depth(i)),
        Part(
            "train.py",
            [sys.executable, "train.py", f"--config={plain}", *train, *options],
            300,
            lambda _: of_run(run_dir),
        ),
        Part("micro-batches", bench("micro_batches", plain, f"--out={out}/rows.png", "--rows", *some), 300, swept),
        throughput(f"plain {at}, windows", plain, "--model.window_pattern=SSSL"),
        Part("checkpoints", bench("checkpoints", plain, "--saves=3", "--steps_between=20"), 200, last_json),
        Part("inference", bench("inference", plain, *size), 150, last_json),
        Part("diagnostics", bench("diagnostics", plain, *size), 180, last_json),
    ]


def of_run(run_dir: Path) -> dict[str, Any]:
    """The rate of a run's logged steps, after the first."""
    lines = [line for line in read_metrics(run_dir) if "tokens_per_second" in line][1:]
    rates = sorted(line["tokens_per_second"] for line in lines)
    summary = json.loads((run_dir / "summary.json").read_text())
    return {"tokens_per_second": rates[len(rates) // 2], "goodput": summary["goodput"], "loss": summary["loss"]}


def carry_out(part: Part, log: Path, limit: float) -> dict[str, Any]:
    """Runs it and whatever it starts, and ends them all at the limit. What it gave, or its last lines."""
    begin = time.monotonic()
    with log.open("w+") as output:
        process = subprocess.Popen(
            part.command, stdout=subprocess.PIPE, stderr=output, text=True, start_new_session=True
        )
        try:
            said, _ = process.communicate(timeout=limit)
            reason = f"exit code {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            said, reason = "", f"not done in {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                said = process.communicate()[0]
        output.write(said)
    facts = {"command": shlex.join(part.command), "seconds": round(time.monotonic() - begin, 1)}
    try:
        if not reason:
            return facts | {"result": part.read(said)}
    except (ValueError, LookupError, OSError, TypeError) as error:
        reason = f"its output cannot be read: {error}"
    return facts | {"failed": reason, "last_lines": log.read_text().splitlines()[-LAST_LINES:]}


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    deadline, out = time.monotonic() + 60 * arguments.minutes, Path(arguments.out)
    if len(arguments.depths) != len(arguments.rows) or not arguments.rows:
        raise UserError(f"--rows={arguments.rows}: give as many as --depths={arguments.depths}")
    parts = parts_of(arguments)
    if unknown := set(arguments.parts) - {part.name for part in parts}:
        raise UserError(f"--parts: no part is named {sorted(unknown)}; there are {[part.name for part in parts]}")
    out.mkdir(parents=True, exist_ok=True)
    record = out / "accelerator.json"
    found: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {"parts": {}}
    where = carry_out(Part("device", [sys.executable, "-c", DEVICE], 120, last_json), out / "device.log", 120)
    if "failed" in where:
        raise UserError("JAX finds no device here:\n" + "\n".join(where["last_lines"]))
    if found.get("where", where["result"]) != where["result"]:
        raise UserError(f"{record} was measured on {found['where']}, and this is {where['result']}; give another --out")
    found["where"] = where["result"]

    def wanted(part: Part) -> bool:
        mine = found["parts"].get(part.name, {})
        chosen = not arguments.parts or part.name in arguments.parts
        return chosen and not ("result" in mine and mine["command"] == shlex.join(part.command))

    todo = [part for part in parts if wanted(part) and (part.name != "beside" or arguments.beside)]
    todo.sort(key=lambda part: "failed" in found["parts"].get(part.name, {}))  # those that failed come last
    waiting = [part.name for part in todo]
    for part in [*todo, None]:
        if part is not None:
            if time.monotonic() + part.limit > deadline:
                continue
            for folder in ("run", "chaos") if part.name in ("train.py", "kill and resume") else ():
                shutil.rmtree(out / folder, ignore_errors=True)  # of an attempt that failed
            print(f"{part.name} ...", flush=True)
            done = carry_out(part, out / f"{part.name}.log", part.limit)
            found["parts"][part.name] = done
            waiting.remove(part.name)
            said = {name: value for name, value in done.get("result", {}).items() if name != "profile"}
            print(f"  {done['seconds']} s: {done.get('failed') or json.dumps(said)}", flush=True)
        found["no_time_for"], found["beside"] = waiting, arguments.beside
        write_whole(record, json.dumps(found, indent=2))
        write_whole(out / "index.html", page(found, [part.name for part in parts]))
    print(f"{out}/index.html, {record}")
    if waiting:
        print(f"no time for {', '.join(waiting)}; the same command goes on there")
    return 0


if __name__ == "__main__":
    run_command(main)
