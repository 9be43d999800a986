"""Compile candidates, each in its own process: Ctrl-C ends that at once, which XLA's compiler would not allow."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

from configs.schema import UserError
from hosts.machines import GIB, HEADROOM, VECTOR_MEMORY, exceeds_vector_memory, name_of
from tools.plan.search import Row
from tools.programs.topologies import CORES


def corrected(rows: list[Row], most: int) -> list[Row]:
    """Return the rows, the best `most` that should fit with their programs' memory. Rows that fit come first, of these
    the compiled ones. If one does not fit, the next is compiled instead, once. GPUs that CUDA 13 does not compile for
    keep the closed form's."""
    machine = rows[0].candidate.machine
    if machine.gpu and machine.capability not in CORES:
        return rows
    compiled_rows, spare = list(rows), most
    for i, row in enumerate(rows):
        if not row.fits or most == 0:
            break
        compiled_rows[i] = replace(row, compiled=_compiled_bytes(row))
        most -= 1
        if not compiled_rows[i].fits and spare:
            most, spare = most + 1, spare - 1
    return sorted(compiled_rows, key=lambda row: (not row.fits, row.compiled is None, row.time.expected))


def _compiled_bytes(row: Row) -> int:
    candidate = row.candidate
    options = " ".join(f"{name}={value}" for name, value in candidate.options().items())
    print(f"compiling {name_of(candidate.topology)}, {options} ...", end=" ", file=sys.stderr, flush=True)
    request = json.dumps({"config": asdict(candidate.config), "topology": name_of(candidate.topology)})
    start = time.monotonic()
    # subprocess.run ends the child if it is interrupted.
    child = subprocess.run([sys.executable, "-m", "tools.plan.compiled"], input=request.encode(), capture_output=True)
    seconds = time.monotonic() - start
    if child.returncode == 0:
        size = json.loads(child.stdout.splitlines()[-1])
        print(f"{size / GIB:.2f} GiB, {size / sum(row.parts.values()) - 1:+.1%} ({seconds:.0f} s)", file=sys.stderr)
        return size
    log = child.stderr.decode(errors="replace")
    if exceeds_vector_memory(next((line for line in log.splitlines() if "RESOURCE_EXHAUSTED" in line), "")):
        raise UserError(f"--compile: {VECTOR_MEMORY}")
    if "RESOURCE_EXHAUSTED" not in log:
        problem = (re.findall(r"^[\w.]*(?:Error|Exception): .*", log, re.MULTILINE) or ["it ended without a message"])[
            -1
        ]
        raise UserError(f"--compile: compiling for {name_of(candidate.topology)} failed: {problem}")
    print(f"more than the device has ({seconds:.0f} s)", file=sys.stderr)  # a TPU's compiler refuses it
    return int(candidate.machine.for_programs / HEADROOM) + 1


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    from configs.command_line import config_from_json
    from tools.programs.compile import compile_step, program_bytes
    from tools.programs.topologies import devices_of
    from training.build import build

    asked = json.loads(sys.stdin.read())
    built = build(config_from_json(json.dumps(asked["config"])), devices_of(asked["topology"]))
    print(program_bytes(compile_step(built)))


if __name__ == "__main__":
    _main()
