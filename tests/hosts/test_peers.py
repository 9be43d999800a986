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
from hosts import cluster
from hosts.cluster import HIGH_PORTS, Cluster, PeerLost, named, roll_call
from hosts.peers import exchange
from hosts.stop import limited
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


def test_a_silent_process_is_named_with_its_host_and_one_that_leaves_at_the_end_is_lost(port, monkeypatch):
    monkeypatch.setattr(cluster, "AWAY", 0.1)
    monkeypatch.setattr(cluster, "RELEASE", 0.1)
    first = Caller(port, 0, 3)
    with connect(port) as silent:
        silent.sendall(b"1 3 host-b its-name\n")
    wait_for(lambda: any("waiting for process 1 (host-b), 2 of 3" in line for line in first.log))
    monkeypatch.setattr(cluster, "AWAY", 10)
    second = Caller(port, 1, 3)  # it restarted
    wait_for(lambda: any("waiting for process 2 of 3" in line for line in second.log))
    with connect(port) as leaving:
        leaving.sendall(b"2 3 host-c other-name\n")
    wait_for(lambda: "PeerLost: process" in first.ended and "2 came and left" in first.ended)


def test_an_answer_that_a_process_did_not_wait_for_is_given_again(port):
    """While process 0 is slow, a process gives up its question and asks again."""
    first, answers = Caller(port, 0, 2), []
    for waits in (True, False, True):
        with connect(port) as process:
            process.sendall(b"1 2 host-b its-name\n")
            if waits:
                answers.append(process.makefile().readline().split()[0])
                process.sendall(b"understood\n")
    wait_for(lambda: first.ended == "together")
    assert answers == ["wait", "go"]


def test_two_processes_with_one_number_are_a_user_error(port):
    callers = [Caller(port, i, 3) for i in (0, 1, 1)]
    wait_for(lambda: any("is process 1 too" in caller.ended for caller in callers))
    callers.append(Caller(port, 2, 3))
    wait_for(lambda: sorted(caller.ended[:9] for caller in callers) == ["UserError", *["together"] * 3])


def test_a_process_that_never_joins_ends_the_others_and_is_named(port):
    callers = [Caller(port, i, 3, timeout=2) for i in (0, 1)]
    wait_for(lambda: all(caller.ended.startswith("PeerLost: ") for caller in callers))
    assert all("waiting for process 2 of 3" in caller.ended for caller in callers)
    alone = Caller(port, 1, 2, timeout=0.5)
    wait_for(lambda: alone.ended != "waiting")
    assert re.match(rf"PeerLost: \d+ s: waiting for process 0 at 127.0.0.1:{port}: .*refused", alone.ended), alone.ended


def test_processes_with_different_settings_are_a_user_error(port):
    callers = [Caller(port, 0, 2), Caller(port, 1, 4)]
    wait_for(lambda: all("UserError" in caller.ended for caller in callers))
    assert all("expects 4 processes, process 0 2" in caller.ended for caller in callers)


def test_processes_are_named_with_their_hosts_if_known():
    assert named([1, 3], {3: "d"}) == "1, 3 (d)"
    assert named(range(1, 40), {}).endswith("15, 16 and 23 others")


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
    cluster = start_jax()
    print("joined", flush=True)
    if sys.argv[1] == "abort":
        time.sleep(60)
    if sys.argv[1] == "complete":
        values = hosts.peers.exchange("the test", str(cluster.index))
        print(cluster.launcher, jax.process_index(), len(jax.devices()), values)
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
    ],
)
def test_all_processes_end_with_the_code_of_the_first(port, acts, codes, says):
    outputs = finish(begin(port, *acts), *codes)
    assert all(says in text for act, text in zip(acts, outputs) if act == "wait")


def slurm(index: int, port: int) -> dict[str, str]:
    """Return what srun sets for one of four tasks on a node."""
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "4"}
    return step | {"SLURM_JOB_ID": str(port - HIGH_PORTS), "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}


@pytest.mark.slow
def test_processes_find_each_other_in_slurm_s_environment_and_end_together(port):
    """Once, threads in JAX's C++ aborted (-11) when Python ended: in six of eight runs of two such processes."""
    command = ["-c", PROCESS, "complete"]
    for index, text in enumerate(finish(start(*[command] * 4, port=HIGH_PORTS + port % 2**12, variables=slurm), 0)):
        assert text.splitlines()[-1] == f"SLURM {index} 4 ['0', '1', '2', '3']"


@pytest.mark.slow
def test_a_ctrl_c_of_one_before_training_ends_all_with_130(port):
    processes = begin_and_join(port, "wait")
    time.sleep(0.5)
    processes[1].send_signal(signal.SIGINT)
    finish(processes, 130)


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
    lost = nullcontext() if waits else pytest.raises(PeerLost, match=r"waiting for checkpoint 2 of process 1 of 2")
    with limited(HangConfig(other_seconds=7200 if waits else 1000), "restoring"), lost:
        assert exchange("checkpoint 2", "") == ["", ""]
