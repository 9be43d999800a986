"""Test how processes wait for each other, and end together."""

import itertools
import re
import signal
import socket
import subprocess
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest

from configs.schema import HangConfig, UserError
from hosts.cluster import Cluster
from hosts.peers import exchange
from hosts.roll_call import PeerLost, missing, roll_call
from hosts.watchdog import limited
from tests.hosts.processes import finish, start
from tests.ports import free_ports


@pytest.fixture
def port():
    return free_ports(1)[0]


class Caller(threading.Thread):
    """A process of a run that waits for the others in a thread."""

    def __init__(self, port: int, index: int, processes: int, timeout: float = 30.0):
        super().__init__(daemon=True)
        self.cluster = Cluster("test", processes, index, f"127.0.0.1:{port}")
        self.timeout, self.log, self.ended = timeout, [], "waiting"
        self.start()

    def run(self):
        try:
            roll_call(self.cluster, self.timeout, 0.1, self.log.append)
            self.ended = "together"
        except (PeerLost, UserError) as error:
            self.ended = f"{type(error).__name__}: {error}"


def connect(port: int) -> socket.socket:
    """Connect to process 0 as soon as it listens."""
    until = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.02)


def wait_for(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_all_wait_for_the_last_and_each_reports_who_is_missing(port):
    callers = [Caller(port, i, 3) for i in (1, 0)]
    wait_for(lambda: all(any("waiting for process 2 of 3" in line for line in caller.log) for caller in callers))
    with connect(port) as scanner:
        scanner.sendall(b"GET / HTTP/1.0\n\n")  # not a process of the run
    callers.append(Caller(port, 2, 3))
    wait_for(lambda: all(caller.ended == "together" for caller in callers))
    socket.create_server(("127.0.0.1", port)).close()  # the port is free for JAX


def test_a_process_that_left_is_missing_and_a_silent_one_is_named(port):
    first, hello = Caller(port, 0, 2), f"here 1 2 {'host-b'}\n".encode()
    with connect(port) as gone:
        gone.sendall(hello)
        wait_for(lambda: any("waiting for an answer of process 1 (host-b), which came" in line for line in first.log))
    first.log.clear()
    wait_for(lambda: any("waiting for process 1 of 2" in line for line in first.log))
    second = Caller(port, 1, 2)
    wait_for(lambda: first.ended == second.ended == "together")


def test_a_process_that_never_joins_ends_the_others_and_is_named(port):
    callers = [Caller(port, i, 3, timeout=2) for i in (0, 1)]
    wait_for(lambda: all(caller.ended.startswith("PeerLost: ") for caller in callers))
    assert all("waiting for process 2 of 3" in caller.ended for caller in callers)
    alone = Caller(port, 1, 2, timeout=0.5)
    wait_for(lambda: alone.ended != "waiting")
    assert re.search(rf"PeerLost: \d+ s: process 0 at 127.0.0.1:{port} cannot be reached", alone.ended), alone.ended


def test_processes_with_different_settings_are_a_user_error(port):
    callers = [Caller(port, 0, 2), Caller(port, 1, 4)]
    wait_for(lambda: all("UserError" in caller.ended for caller in callers))
    assert all("expects 4 processes, process 0 2" in caller.ended for caller in callers)


def test_missing_processes_are_named_by_host_if_known():
    cluster = Cluster("GKE", 4, 0, "a:1", hosts=("a", "b", "c", "d"))
    assert missing(cluster, {0: "a", 2: "pod-c"}, []) == "process 1 (b), 3 (d)"
    assert missing(cluster, {0: "a", 1: "b", 2: "pod-c", 3: "d"}, [2]) == "an answer of process 2 (pod-c), which came"
    assert missing(Cluster("SLURM", 40), {0: "a"}, []).endswith("15, 16 and 23 others")


PROCESS = """
import sys, time, signal, os
import jax
import hosts.peers
import hosts.runtime as runtime
from hosts.runtime import run_command, start_jax
from hosts.stop import Stop
from configs.schema import HangConfig, UserError
def main():
    if sys.argv[1] == "complete":
        hosts.peers.LOOK_EVERY = 0
    hosts.peers.JOIN_TIMEOUT = 5
    if sys.argv[1] == "die":
        jax.distributed.initialize = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    start_jax()
    print("joined", flush=True)
    if sys.argv[1] == "abort":
        time.sleep(60)
    if sys.argv[1] == "complete":
        return 0
    with Stop():
        if sys.argv[1] == "mistake":
            raise UserError("this host's disk is gone")
        if sys.argv[1] == "failure":
            raise ZeroDivisionError("a bug")
        time.sleep(60)
run_command(main)
"""


def begin(port: int, *acts: str, only: int | None = None) -> list[subprocess.Popen]:
    """Start a process for each act, or only number `only`."""
    return start(*(["-c", PROCESS, act] for act in acts), port=port, only=only)


def begin_and_join(port: int, act: str) -> list[subprocess.Popen]:
    """Start two processes, and wait until they have joined."""
    processes = begin(port, act, act)
    assert all(process.stdout.readline() == "joined\n" for process in processes)
    return processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("acts", "codes", "says"),
    [
        (("wait", "mistake"), [2, 2], "process 1 ended the run: UserError: this host's disk is gone"),
        (("failure", "wait"), [1, 1], "process 0 ended the run: ZeroDivisionError: a bug"),
        # JAX's client ends by an abort in Python's own thread.
        (("die", "wait"), [-signal.SIGKILL, 42], ""),
        # Once, threads in JAX's C++ aborted (-11) when Python ended: in six of eight runs of two such processes.
        (("complete",) * 4, [0] * 4, ""),
    ],
)
def test_all_processes_end_with_the_code_of_the_first(port, acts, codes, says):
    outputs = finish(begin(port, *acts), *codes)
    assert all(says in text for act, text in zip(acts, outputs) if act == "wait")


@pytest.mark.slow
def test_a_ctrl_c_of_one_before_training_ends_all_with_130(port):
    processes = begin_and_join(port, "wait")
    time.sleep(0.5)
    processes[1].send_signal(signal.SIGINT)
    finish(processes, 130)


@pytest.mark.slow
def test_an_abort_by_jax_is_code_42(port):
    first, second = begin_and_join(port, "abort")
    first.kill()
    assert "another process of the run was lost" in finish([second], 42)[0]


def test_a_restarted_process_waits_until_the_previous_service_leaves_the_port(port):
    """Its greeting is answered by gRPC, in bytes that are no text."""
    with socket.create_server(("127.0.0.1", port)) as service:
        service.settimeout(20)
        caller = Caller(port, 1, 2)
        for _ in range(2):
            connection, _ = service.accept()
            connection.sendall(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\xff\xff\xff\xff")
            connection.close()
        assert caller.ended == "waiting"
    first = Caller(port, 0, 2)
    wait_for(lambda: first.ended == caller.ended == "together")


@pytest.mark.slow
def test_a_process_that_restarts_first_joins_the_others_later(port):
    """The remaining process ends with 42. Restart it as its launcher would."""
    first, second = begin_and_join(port, "abort")
    second.kill()
    (alone,) = begin(port, "complete", "complete", only=1)  # before the first notices
    assert "another process of the run was lost" in finish([first], 42)[0]
    finish([*begin(port, "complete", "complete", only=0), alone], 0)


@pytest.mark.parametrize("waits", [True, False])
def test_agreement_during_a_restore_waits_as_long_as_a_restore_may_take(monkeypatch, waits):
    """A process that reads for 40 minutes is kept. One that is silent for longer is lost, and its host is named."""
    answers = iter([jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")] * 3 + ['["", ""]'])
    client = Mock(blocking_key_value_get=Mock(side_effect=answers))
    client.key_value_dir_get.side_effect = lambda folder: [(f"{folder}0", "host-a")]
    service = SimpleNamespace(client=client, process_id=1, num_processes=2)
    monkeypatch.setattr("hosts.peers.distributed.global_state", service)
    monkeypatch.setattr("hosts.peers.time.monotonic", itertools.count(0, 800).__next__)
    lost = nullcontext() if waits else pytest.raises(PeerLost, match=r"waiting for checkpoint 2 of process 1 \(")
    with limited(HangConfig(other_seconds=7200 if waits else 1000), "restoring"), lost:
        assert exchange("checkpoint 2", "") == ["", ""]
