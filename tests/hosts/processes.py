"""Several processes of one run, each a script that is told what to do, on one machine."""

import os
import subprocess
import sys
from pathlib import Path

from tests.ports import free_ports

ROOT = Path(__file__).parents[2]


def start(script: str, *acts: str, port: int | None = None) -> list[subprocess.Popen]:
    """A process for each act, which is the script's first argument, of one CPU device each."""
    port = port or free_ports(1)[0]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    names = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(len(acts))}
    started = []
    for i, act in enumerate(acts):
        environment = os.environ | names | {"JAX_PROCESS_ID": str(i), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", script, act]
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipe))
    return started


def finish(processes: list[subprocess.Popen], *codes: int) -> list[str]:
    """What they said, once they have ended with these codes, or all with one."""
    said = [process.communicate(timeout=240)[0] for process in processes]
    expected = list(codes) * (len(processes) if len(codes) == 1 else 1)
    assert [process.returncode for process in processes] == expected, "\n---\n".join(said)
    return said
