"""Measure what needs a device, in order of worth, within some minutes: python -m bench.accelerator --minutes=9

Each part is a command with a time limit, and starts only if that limit still fits. A part that fails is recorded with
its last lines. The same command again continues with what is missing. It writes accelerator.json (each part's command,
seconds and result), summary.md (what it prints at the end) and each part's output.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hosts.runtime import run_command
from options.command_line import parse_arguments
from options.schema import FilePath, Positive
from system.errors import UserError
from system.files import is_there, write_whole

LAST_LINES = 15
DEVICE = (
    "import jax, json; d = jax.devices(); "
    "print(json.dumps({'device': d[0].device_kind, 'devices': len(d), 'jax': jax.__version__}))"
)
PLAIN, FULL = "configs/plain.py", "configs/nanochat.py"
SWITCHES = {
    "not deterministic": "config = with_options(config, {'deterministic': False})",
    "complete rows": "config = with_options(config, {'model.window_pattern': 'L'})",
    "Muon in fewer passes": "config = with_options(config, {'optimizer.muon.products': 'fewer_passes'})",
    "loss in 2 chunks": "config = with_options(config, {'model.loss_chunks': 2})",
}
"""Lines of a config file, by the name of the part that times the full network with it."""
CONFIG = """from configs import nanochat
from configs.schema import with_options

derive = nanochat.derive


def get_config():
    config = nanochat.get_config()
    {line}
    return config
"""
AUTOTUNING = "--xla_gpu_experimental_enable_fusion_autotuner=false --xla_gpu_per_fusion_autotune_cache_dir={folder}"
AUTOTUNING += " --xla_gpu_experimental_autotune_cache_mode=AUTOTUNE_CACHE_MODE_"
TUNED = {
    "tuned": ("--deterministic=False", "UPDATE"),
    "deterministic as tuned": ("--deterministic=True", "READ --xla_gpu_require_complete_aot_autotune_results=true"),
}
"""By the part's name, its option and the end of XLA's flags. Only the first times kernels, and keeps its choices. The
second takes these, and fails if it does not find one."""
COLUMNS = ("tokens_per_second", "mfu", "peak_gib", "step_seconds", "compile_seconds")


@dataclass(frozen=True)
class Arguments:
    """Measurements to make on the devices here, and their time limit."""

    minutes: Positive[float] = 9.0
    """Time for all parts. A part starts only if its own limit still fits."""
    out: FilePath = "runs/accelerator"
    """Folder of the results. A part with a result there is not measured again."""
    depths: tuple[Positive[int], ...] = (12, 20)
    """Depths at which the throughput of both networks is measured. All other parts use the first."""
    rows: tuple[Positive[int], ...] = (32, 16)
    """Rows of a micro-batch on a device at each depth."""
    micro_batches: Positive[int] = 8
    """Micro-batches of a step."""
    options: str = ""
    """More options for every config, as typed: `--options="--data.source=FOLDER --mesh.fsdp=2"`."""
    reference: str = ""
    """A shell command that measures another program on the same network and prints a JSON line with tokens_per_second.
    DEPTH, ROWS and MICRO_BATCHES in it are replaced, and FP8 by False. It runs after each depth's throughput, and from
    depth 20 on again with True for FP8, if that is in it. Empty: none."""


class Part(NamedTuple):
    """One measurement. The last line of the command's output is its result, in JSON."""

    name: str
    command: list[str]
    limit: int
    """Time limit in seconds. The part starts only if as much is left."""


def parts_of(arguments: Arguments) -> list[Part]:
    """Return all parts, the most useful first."""
    out, options = Path(arguments.out), shlex.split(arguments.options)
    depth, rows, step = arguments.depths[0], arguments.rows[0], f"--micro_batches={arguments.micro_batches}"

    def throughput(name: str, config: str, *words: str, depth: int = depth, rows: int = rows) -> Part:
        command = [sys.executable, "-m", "bench.throughput", f"--config={config}"]
        command += [f"--model.depth={depth}", f"--rows={rows}"]
        return Part(name, [*command, *words, *options], 120)

    def reference(depth: int, rows: int, fp8: bool = False) -> Part:
        shell = arguments.reference
        words = {"MICRO_BATCHES": arguments.micro_batches, "DEPTH": depth, "ROWS": rows, "FP8": fp8}
        for word, value in words.items():
            shell = shell.replace(word, str(value))
        return Part(f"reference d{depth}" + ", fp8" * fp8, ["bash", "-c", shell], 150)

    def compared(depth: int, rows: int) -> list[Part]:
        full = throughput(f"full d{depth}", FULL, step, depth=depth, rows=rows)
        fp8 = [reference(depth, rows, True)] if depth >= 20 and "FP8" in arguments.reference else []
        return [full, reference(depth, rows), *fp8]

    def tuned(name: str, option: str, mode: str) -> Part:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {AUTOTUNING.format(folder=out.absolute() / 'autotuning')}{mode}"
        part = throughput(f"full d{depth}, {name}", FULL, step, option)
        return part._replace(command=["env", f"XLA_FLAGS={flags.strip()}", *part.command])

    def switched(name: str, line: str) -> Part:
        path = out / f"{name.replace(' ', '_')}.py"
        path.write_text(CONFIG.format(line=line))
        return throughput(f"full d{depth}, {name}", str(path), step)

    short = "--steps=60 --model.depth=4 --checkpoint.every_steps=10 --checkpoint.keep_every=20 --eval.every_steps=30"
    short += f" --eval.tokens=65536 --log.every_steps=5 --batch.tokens_per_step=65536 {arguments.options}"
    chaos = ["--faults=3", f"--out={out / 'chaos'}", f"--config={FULL}", f"--options={short}"]
    return [
        *(part for sizes in zip(arguments.depths, arguments.rows) for part in compared(*sizes)),
        *(tuned(name, *ends) for name, ends in TUNED.items()),
        *(switched(*switch) for switch in SWITCHES.items()),
        Part("kill and resume", [sys.executable, "-m", "bench.chaos", *chaos], 240),
        *(throughput(f"plain d{d}", PLAIN, step, depth=d, rows=n) for d, n in zip(arguments.depths, arguments.rows)),
    ]


def carry_out(part: Part, log: Path, limit: float) -> dict[str, Any]:
    """Run a part. At its time limit, end it and its children. Return its result, or its last lines."""
    begin = time.monotonic()
    with log.open("w+") as file:
        process = subprocess.Popen(part.command, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=limit)
            reason = f"exit code {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            output, reason = "", f"not done in {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                output = process.communicate()[0]
        file.write(output)
    facts = {"command": shlex.join(part.command), "seconds": round(time.monotonic() - begin, 1)}
    try:
        if not reason:
            return facts | {"result": json.loads(output.strip().splitlines()[-1])}
    except (ValueError, LookupError) as error:
        reason = f"its output cannot be read: {error}"
    lines = log.read_text().splitlines()
    reason = ": ".join([reason, *[line for line in lines if "Error: " in line][-1:]])
    return facts | {"failed": reason, "last_lines": lines[-LAST_LINES:]}


def summary_of(record: dict[str, Any], names: list[str]) -> str:
    """Return the contents of accelerator.json as text and a table; `names`: those of the parts, in order."""
    results = {name: record["parts"].get(name, {}).get("result", {}) for name in names}
    lines = [f"# {record['device']['devices']} x {record['device']['device']}, JAX {record['device']['jax']}", ""]
    lines += [f"- {text}" for text in comparisons(results)]
    for name, part in record["parts"].items():
        lines += [f"- {name} failed: {part['failed']}"] if "failed" in part else []
    lines += [f"- no time yet for {name}" for name in record["no_time_for"]]
    lines += ["", "| | " + " | ".join(COLUMNS).replace("_", " ") + " |", "| --- " * (1 + len(COLUMNS)) + "|"]
    for name, result in results.items():
        if "tokens_per_second" in result:
            lines.append(f"| {name} | " + " | ".join(str(result.get(key, "")) for key in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def comparisons(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the ratio of each part's throughput to its reference's, and other figures."""
    rate = {name: result["tokens_per_second"] for name, result in results.items() if "tokens_per_second" in result}
    pairs = [(name, name.replace("full", "plain")) for name in rate if name.startswith("full ") and "," not in name]
    pairs += [(name, name.split(",")[0]) for name in rate if "," in name]
    references = [name for name in rate if name.startswith("reference ")]
    pairs += [(name.split(",")[0].replace("reference", "full"), name) for name in references]
    for name, other in pairs:
        if name in rate and other in rate:
            attention = f" ({results[other]['attention']})" if "attention" in results[other] else ""
            yield f"{name}: {rate[name] / rate[other]:.3f} of the tokens a second of {other}{attention}"
            loss, expected = (results[part].get("loss", 0.0) for part in (name, other))
            if name.startswith(f"{other},") and abs(loss - expected) > 0.01 * expected:
                yield f"{name}: its loss is {loss}, {other}'s {expected}; rounding alone differs less"
    if killed := results["kill and resume"]:
        yield f"runs killed {killed['faults']} times ended with the parameters of one that was not, to the bit"


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    deadline, out = time.monotonic() + 60 * arguments.minutes, Path(arguments.out)
    if len(arguments.depths) != len(arguments.rows) or not arguments.rows:
        raise UserError(f"--rows={arguments.rows}: give as many as --depths={arguments.depths}")
    (out / "autotuning").mkdir(parents=True, exist_ok=True)
    parts = parts_of(arguments)
    names = [part.name for part in parts]
    path = out / "accelerator.json"
    record: dict[str, Any] = json.loads(path.read_text()) if is_there(path) else {"parts": {}}
    here = carry_out(Part("device", [sys.executable, "-c", DEVICE], 120), out / "device.log", 120)
    if "failed" in here:
        raise UserError("JAX finds no device here:\n" + "\n".join(here["last_lines"]))
    device = here["result"]
    if record.setdefault("device", device) != device:
        raise UserError(f"{path} was measured on {record['device']}; this machine has {device}: give another --out")

    def wanted(part: Part) -> bool:
        if part.name.startswith("reference") and not arguments.reference:
            return False
        before = record["parts"].get(part.name, {})
        return "result" not in before or before["command"] != shlex.join(part.command)

    todo = [part for part in parts if wanted(part)]
    todo.sort(key=lambda part: "failed" in record["parts"].get(part.name, {}))  # failed parts come last
    record["no_time_for"] = [part.name for part in todo]
    for part in todo:
        if time.monotonic() + part.limit > deadline:
            continue
        if part.name == "kill and resume":
            shutil.rmtree(out / "chaos", ignore_errors=True)  # from a failed attempt
        print(f"{part.name} ...", flush=True)
        record["parts"][part.name] = carry_out(part, out / f"{part.name}.log", part.limit)
        record["no_time_for"].remove(part.name)
        write_whole(path, json.dumps(record, indent=2))
    write_whole(path, json.dumps(record, indent=2))
    write_whole(out / "summary.md", summary_of(record, names))
    print(summary_of(record, names) + f"{path} has the rest")
    if record["no_time_for"]:
        print(f"no time for {', '.join(record['no_time_for'])}; the same command continues there")
    return 0


if __name__ == "__main__":
    run_command(main)
