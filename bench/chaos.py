"""Inject faults into a run until it completes: python -m bench.chaos --faults=100. Exit code 1 if its result changed.

A small run completes once without faults. A second run gets SIGKILL at random moments and at the most delicate ones: in
compilation, while a checkpoint is written or completed, and while an old one is deleted. With `--processes=4` the run
has four hosts. Each fault hits one of them: it is killed, preempted (SIGTERM), stopped (SIGSTOP), cut off from process
0, or gets I/O errors from the checkpoints' disk. All are restarted after exit codes that ask for it. At the end,
parameters, metrics and TensorBoard's series must equal the undisturbed run's. No checkpoint may have been put aside,
and nothing incomplete may remain.
"""

import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hosts.runtime import run_command
from options.command_line import parse_arguments
from options.schema import FilePath, NotNegative, Positive
from run.folder import RunFolder
from system.errors import Exit, UserError

TIMES = ("seconds", "tokens_per_second", "mfu", "data_wait", "peak_memory_bytes", "time")
SHORT, LONG = 3, 45  # seconds: below and above the limit of silence (hosts.distributed.HEARTBEAT_SECONDS)
LONE = 90  # seconds until a process that ended is restarted alone, if others still run
BOUND = 240  # seconds within which a run must save a newer checkpoint, or end


@dataclass(frozen=True)
class Arguments:
    """Injects faults into a run until it completes, and compares it with a run without faults."""

    out: FilePath = "runs/chaos"
    """A folder for the runs."""
    config: FilePath = "configs/small.py"
    """The run."""
    options: str = (
        "--steps=400 --model.depth=1 --model.width=64 --model.heads=1 --model.kv_heads=1 --batch.sequence_length=64 "
        "--batch.tokens_per_step=512 --checkpoint.every_steps=10 --checkpoint.keep_every=100 --eval.every_steps=100 "
        "--eval.tokens=4096 --log.every_steps=5"
    )
    """Options, as typed, that keep the run short. Frequent checkpoints give faults something to hit."""
    processes: Positive[int] = 1
    """Hosts of the run."""
    faults: NotNegative[int] = 100
    """Number of faults: SIGKILLs for one process, all kinds in turn for several. The last run then completes."""
    seed: NotNegative[int] = 0
    """Seed of the moments of faults."""


class Wire:
    """Carries a host's connections to process 0. While it is cut, nothing passes, and neither end notices."""

    def __init__(self, target: int):
        self.target, self.connected = target, threading.Event()
        self.connected.set()
        self.server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self.server.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(65536):
                self.connected.wait()
                sink.sendall(content)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Hosts:
    """The processes of a run, on this machine."""

    def __init__(self, arguments: Arguments, run_dir: Path):
        self.run_dir, self.log = run_dir, run_dir.with_suffix(".log")
        options = shlex.split(arguments.options)
        self.command = [sys.executable, "train.py", f"--config={arguments.config}", f"--run_dir={run_dir}", *options]
        self.count = arguments.processes
        self.errors = [run_dir.with_suffix(f".errors-{i}") for i in range(self.count)]
        self.processes: list[subprocess.Popen] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.wires = [Wire(self.port) for _ in range(self.count)]
        self.library = run_dir.parent / "errors.so"
        if self.count > 1:
            source = Path(__file__).with_name("errors.c")
            subprocess.run(["cc", "-shared", "-fPIC", "-o", self.library, source, "-ldl"], check=True)

    def start(self, i: int) -> subprocess.Popen:
        """Start one process."""
        environment = dict(os.environ)
        if self.count > 1:
            port = self.wires[i].server.getsockname()[1] if i else self.port
            environment |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_PROCESS_ID": str(i)}
            environment |= {"JAX_NUM_PROCESSES": str(self.count)}
            environment |= {"LD_PRELOAD": str(self.library), "CHAOS_ERRORS": str(self.errors[i])}
        with self.log.open("a") as log:
            return subprocess.Popen(self.command, env=environment, stdout=log, stderr=log)

    @property
    def running(self) -> int:
        """Return the number of processes that still run."""
        return sum(process.poll() is None for process in self.processes)

    @property
    def all_run(self) -> bool:
        return self.running == self.count

    @property
    def newest(self) -> int:
        """Return the step of the newest checkpoint, or 0."""
        folder = self.run_dir / "checkpoints"
        return max([int(path.name) for path in folder.glob("*") if path.name.isdigit()], default=0)


class Fault(NamedTuple):
    """A fault: an action on one process, for some seconds."""

    begin: Callable[[Hosts, subprocess.Popen, int], object]
    end: Callable[[Hosts, subprocess.Popen, int], object] = lambda hosts, process, victim: None
    seconds: tuple[int, ...] = (0,)
    codes: tuple[int, ...] = (Exit.COMPLETE, Exit.PEER_LOST)
    """Exit codes that processes may end with."""


FAULTS = {
    "killed": Fault(lambda hosts, process, victim: process.kill(), codes=(0, -signal.SIGKILL)),
    "preempted": Fault(lambda hosts, process, victim: process.terminate(), codes=(0, Exit.PREEMPTED, -signal.SIGTERM)),
    "stopped": Fault(
        lambda hosts, process, victim: process.send_signal(signal.SIGSTOP),
        lambda hosts, process, victim: process.send_signal(signal.SIGCONT),
        (SHORT, LONG),
    ),
    "cut off": Fault(
        lambda hosts, process, victim: hosts.wires[victim].connected.clear(),
        lambda hosts, process, victim: hosts.wires[victim].connected.set(),
        (SHORT, LONG),
    ),
    "given errors": Fault(
        lambda hosts, process, victim: hosts.errors[victim].touch(),
        lambda hosts, process, victim: hosts.errors[victim].unlink(),
        (SHORT, LONG),
    ),
}


def moments(hosts: Hosts, generator: random.Random) -> dict[str, Callable[[float], bool]]:
    """Return conditions by name. Each is polled with the seconds since the start or the last fault."""
    run_dir, checkpoints = hosts.run_dir, hosts.run_dir / "checkpoints"
    several = hosts.newest + 10 * generator.randint(0, 2)
    delay = generator.uniform(0, 8)
    later = lambda pattern: hosts.newest >= several and any(checkpoints.glob(pattern))
    return {
        "at a random moment": lambda seconds: seconds > delay,
        "before the first step": lambda seconds: (run_dir / "lock").exists() and seconds > delay / 2,
        "after a few checkpoints": lambda seconds: hosts.newest > several,
        "while a checkpoint is written": lambda seconds: later("*.orbax*/*"),
        "while it is completed": lambda seconds: later("*.orbax*/facts/metadata"),
        "while an old one is deleted": lambda seconds: seconds > 2 and any(checkpoints.glob("*.deleted")),
    }


def state_of(run_dir: Path, processes: int) -> dict:
    """Return everything that a fault must not change."""
    lines = [{key: value for key, value in line.items() if key not in TIMES} for line in RunFolder(run_dir).metrics()]
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    series = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in ("loss", "val_bpb")}
    left = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    if processes > 1:  # a save that fails, or a preemption, moves a checkpoint to another step
        left = [name for name in left if not name.isdigit()]
    return {
        "params_sha256": json.loads((run_dir / "summary.json").read_text())["params_sha256"],
        "metrics": lines,
        "tensorboard": series,
        "checkpoints": left,
        "put aside": len(list(run_dir.glob("bad-checkpoints/*"))),
    }


def wait(happened: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    """Wait for an event, `seconds` at most. Return whether it happened."""
    until = time.monotonic() + seconds
    while not happened() and time.monotonic() < until:
        time.sleep(pause)
    return happened()


def harm(arguments: Arguments, run_dir: Path, generator: random.Random, record: Counter[str], faults: int) -> list[str]:
    """Inject faults into one run until it completes, or until `faults` were injected in total. After a fault, wait for
    a newer checkpoint before the next. Return which fault ended the run with a wrong code, or too late."""
    hosts = Hosts(arguments, run_dir)
    while True:
        hosts.processes, begin = [hosts.start(i) for i in range(hosts.count)], time.monotonic()
        allowed, ended = {int(Exit.COMPLETE)}, []
        late = False
        while hosts.running and not late:
            if hosts.all_run:
                if record.total() < faults:
                    allowed |= harm_once(hosts, generator, record)
                late = not wait(lambda saved=hosts.newest: not hosts.all_run or hosts.newest > saved, BOUND)
            elif not wait(lambda: not hosts.running, LONE):
                gone = [i for i, process in enumerate(hosts.processes) if process.poll() is not None]
                ended += [hosts.processes[i].poll() for i in gone]
                late = len(ended) > 2 * hosts.count
                for i in gone:  # the others may wait for it at the start
                    hosts.processes[i] = hosts.start(i)
        for process in hosts.processes:
            process.kill()
        last = [process.wait() for process in hosts.processes]
        ended += last
        print(f"{run_dir.name}: {ended}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        if late or not set(ended) <= allowed:
            return [f"codes {ended}{' (late)' * late} after fault {record.total()} of {hosts.log}"]
        if not any(last):
            return []


def harm_once(hosts: Hosts, generator: random.Random, record: Counter[str]) -> set[int]:
    """Wait for a moment, and inject a fault into one process, unless one ends before. Return the codes that processes
    may end with."""
    kinds, victim = moments(hosts, generator), generator.randrange(hosts.count)
    moment, begin = generator.choice(sorted(kinds)), time.monotonic()
    name = sorted(FAULTS)[record.total() % len(FAULTS)] if hosts.count > 1 else "killed"
    fault = FAULTS[name]
    if name == "cut off" and victim == 0:
        victim = hosts.count - 1
    # If no such moment comes, the fault is injected all the same.
    wait(lambda: not hosts.all_run or kinds[moment](time.monotonic() - begin), BOUND, pause=0.002)
    if not hosts.all_run:
        return set()
    process, seconds = hosts.processes[victim], generator.choice(fault.seconds)
    print(f"{hosts.run_dir.name}: {name} for {seconds} s: {victim}, {moment}", file=sys.stderr, flush=True)
    fault.begin(hosts, process, victim)
    time.sleep(seconds)
    fault.end(hosts, process, victim)
    record[f"{name} {moment}" if hosts.count > 1 else moment] += 1
    lost = {Exit.PEER_LOST, -signal.SIGABRT} if hosts.count > 1 else set()  # how the others of a lost process end
    return {*map(int, fault.codes), *map(int, lost)}


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    generator, out = random.Random(arguments.seed), Path(arguments.out)
    if out.exists():
        raise UserError(f"{out} is there already; give another --out, or delete it")
    out.mkdir(parents=True)
    if wrong := harm(arguments, out / "untouched", generator, Counter(), 0):
        raise UserError(f"the run does not complete without faults: {wrong}")
    expected = state_of(out / "untouched", arguments.processes)
    record: Counter[str] = Counter()
    runs, differ = 0, []
    while not differ and record.total() < arguments.faults:
        if differ := harm(arguments, out / f"harmed-{runs}", generator, record, arguments.faults):
            break
        state = state_of(out / f"harmed-{runs}", arguments.processes)
        differ = [f"{name} of harmed-{runs}" for name in expected if expected[name] != state[name]]
        runs += 1
    result = {"faults": record.total(), **record, "runs": runs, "differ": differ}
    print(json.dumps({**result, "params_sha256": expected["params_sha256"]}))
    return 1 if differ else 0


if __name__ == "__main__":
    run_command(main)
