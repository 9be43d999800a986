"""Start several processes of one run on this machine, each a Python command, or let this one be one of two."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jax._src import distributed

from tests.ports import free_ports

ROOT = Path(__file__).parents[2]


def environment_of(devices: int) -> dict[str, str]:
    """Return the environment of a process with `devices` CPU devices."""
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": str(devices)}


def start(
    *commands: Sequence[str | Path],
    folders: Sequence[Path] = (ROOT,),
    devices: Sequence[int] = (1,),
    variables: Callable[[int, int], dict[str, str]] | None = None,
) -> list[subprocess.Popen]:
    """Start a process for each of `commands`, Python's arguments. `folders` and `devices` have one value
    each, or one for all. `variables(index, port)` tells processes how to meet; by default, by
    JAX's variables."""
    port = free_ports(1)[0]
    number = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(len(commands))}
    variables = variables or (lambda index, port: number | {"JAX_PROCESS_ID": str(index)})
    value_of = lambda values, i: values[i] if len(values) > 1 else values[0]
    return [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=value_of(folders, i),
            env=environment_of(value_of(devices, i)) | variables(i, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, command in enumerate(commands)
    ]


def finish(processes: Sequence[subprocess.Popen], *codes: int) -> list[str]:
    """Return the outputs of processes that must end with these codes; one code applies to all."""
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    expected = list(codes) * (len(processes) if len(codes) == 1 else 1)
    assert [process.returncode for process in processes] == expected, "\n---\n".join(outputs)
    return outputs


def fail_elsewhere(monkeypatch, where: str) -> None:
    """Let this process be one of two. The other one, which does all as this one does, fails in the exchange `where`."""
    monkeypatch.setattr(distributed.global_state, "num_processes", 2)

    def exchange(what: str, value: str, channel: str = "") -> list[str]:
        return [value, "0 it is not there" if what == where else value]

    monkeypatch.setattr("hosts.distributed.exchange", exchange)
    monkeypatch.setattr("hosts.preflight.exchange", exchange)
