"""Test how the processes of a run find each other, exchange values, and end."""

import platform
import signal
import subprocess
import time
import urllib.request
from unittest.mock import Mock

import pytest
from jax._src import distributed

from hosts.distributed import detected_processes, exchange, join, local_gpu, own_gpu, valid_processes
from system.errors import UserError
from tests.hosts.processes import finish, start

GIVEN = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
SRUN = {"SLURM_JOB_ID": "5", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
SRUN |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
MPIRUN = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "OMPI_COMM_WORLD_SIZE": "2"}
MPIRUN |= {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"JAX_PROCESS_ID": "2"},
        {"JAX_NUM_PROCESSES": "two"},
        *({"JAX_COORDINATOR_ADDRESS": a} for a in ("10.0.0.1", "10.0.0.1:99999", "", ":1234", "http://10.0.0.1:1234")),
    ],
)
def test_the_user_s_variables_are_complete_or_refused(wrong):
    assert valid_processes(*GIVEN.values()) == ("10.0.0.1:1234", 2, 1) and valid_processes("", "1", "") is None
    with pytest.raises(UserError, match=next(iter(wrong.values())) or "JAX_COORDINATOR_ADDRESS=.not set"):
        valid_processes(*(GIVEN | wrong).values())


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (SRUN, ("n1:61445", 2, 1)),
        (MPIRUN, ("10.96.0.1:62624", 2, 1)),
        ({"SLURM_JOB_ID": "5"}, None),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1"}, None),  # a shell inside an allocation
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2, but .*=1 to run one"),  # Open MPI 5
        (SRUN | {"SLURM_STEP_NODELIST": "rack[1-2]-n[1-4]"}, r"rack\[1-2\]-n.*train.sbatch"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"OMPI_MCA_orte_hnp_uri": MPIRUN["OMPI_MCA_orte_hnp_uri"]}, "wrong .'OMPI_COMM_WORLD_SIZE'.*=1 to run one"),
        (SRUN | {"SLURM_NTASKS": "two"}, "wrong .*'two'.*=1 to run one"),
        (SRUN | {"JAX_COORDINATOR_PORT": "99999"}, "wrong .*JAX_COORDINATOR_ADDRESS=n1:99999.*=1 to run one"),
    ],
)
def test_jax_finds_the_processes_of_a_launcher_or_one_message_says_how_to_start(environ, found, monkeypatch):
    for name in (*SRUN, *MPIRUN):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if not isinstance(found, str):
        assert detected_processes() == found
    else:
        with pytest.raises(UserError, match=found):
            detected_processes()


def test_google_s_metadata_never_come_through_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "mine.example")
    assert join() == 0
    for host, direct in {"metadata.google.internal": 1, "169.254.169.254": 1, "mine.example": 1, "other": 0}.items():
        assert bool(urllib.request.proxy_bypass(host)) == direct


def test_a_thread_that_still_saves_after_the_end_does_not_count_as_all_processes(monkeypatch):
    assert exchange("a test", "mine") == ["mine"]
    monkeypatch.setattr(distributed.global_state, "num_processes", 2)  # JAX's shutdown leaves it, and no client
    with pytest.raises(RuntimeError, match="parts of a checkpoint: this process has left"):
        exchange("parts of a checkpoint", "")


@pytest.mark.parametrize(
    ("environ", "gpus", "tasks", "own"),
    [
        ({}, 0, 2, None),
        ({}, 8, 1, None),  # all; under SLURM, JAX alone would take one
        ({}, 8, 8, 3),
        ({"CUDA_VISIBLE_DEVICES": "5"}, 8, 4, None),
        ({"CUDA_VISIBLE_DEVICES": "MIG-b"}, 1, 4, None),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, 8, 1, None),
        ({"JAX_LOCAL_DEVICE_IDS": "1"}, 8, 4, None),
        ({"JAX_PLATFORMS": "cpu"}, 1, 4, None),
        ({}, 4, 8, "8 tasks of .* see 4 GPUs"),
        ({}, 8, 4, "4 tasks of .* see 8 GPUs"),
        ({}, 1, 4, "4 tasks of .* see 1 GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 1, 1, "MIG-a,MIG-b: CUDA gives a process one MIG device"),
    ],
)
def test_a_task_takes_all_gpus_that_it_sees_alone_or_one_or_is_refused(environ, gpus, tasks, own):
    if not isinstance(own, str):
        assert local_gpu(environ, gpus, tasks, 3) == own
    else:
        with pytest.raises(UserError, match=own):
            local_gpu(environ, gpus, tasks, 3)


def test_tasks_of_one_machine_that_see_the_same_gpus_share_them(monkeypatch):
    node = platform.node()
    others = [f"{node} 0,1", "elsewhere 0,1", f"{node} 2,3", f"{node} 0,1", "elsewhere 0,1"]
    monkeypatch.setattr("hosts.distributed.exchange", lambda what, value: others if value == others[3] else [value])
    monkeypatch.setattr(distributed.global_state, "process_id", 3)
    monkeypatch.setattr("hosts.distributed.local_gpu", lambda environ, gpus, tasks, local: [gpus, tasks, local])
    monkeypatch.setattr("hosts.distributed.on_every_process", lambda what, function: function())
    assert own_gpu({"CUDA_VISIBLE_DEVICES": "0,1"}, 4) == [4, 2, 1]


def test_jax_detects_no_cluster_by_itself_which_would_give_each_task_one_gpu(monkeypatch):
    asked = Mock(side_effect=RuntimeError("asked"))
    monkeypatch.setattr("jax.distributed.initialize", asked)
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="asked"):
        join()
    assert asked.call_args.args == ("10.0.0.1:1234", 2, 1)
    assert asked.call_args.kwargs["cluster_detection_method"] == "deactivate"
    assert "local_device_ids" not in asked.call_args.kwargs


PROCESS = """
import os, signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
import hosts.distributed
hosts.distributed.HEARTBEAT_SECONDS = 10
import jax
from options.schema import HangConfig
from hosts.runtime import run_command, start_jax
from hosts.stop import Stop
def main():
    with Stop(HangConfig()) as stop:
        start_jax()
        print("joined", flush=True)
        act, second = sys.argv[1], jax.process_index() == 1
        if act == "complete":
            values = [hosts.distributed.exchange("a test", f"{jax.process_index()} {i}") for i in range(3)]
            print(values[-1], len(jax.devices()))
            return 0
        if act == "failed" and second:
            raise ZeroDivisionError("a bug")
        if act == "alike":
            time.sleep(2)  # what is printed at once could be read with the line above, and be lost to `communicate`
            raise jax.errors.JaxRuntimeError("INTERNAL: the same on all")
        if act == "notice":
            if second:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2)  # a restore
        if act in ("notice", "steps"):
            with stop.deferred_signals():
                for step in range(300):
                    time.sleep(0.1)
                    if second and step == 5:
                        print("step 5", flush=True)
                    if stop.ask():
                        return stop.agreed_code()
            raise AssertionError("nothing stopped it")
        while act == "unread" and second:
            print("an output")
        if second:
            time.sleep(60)
        hosts.distributed.exchange("the end", "")
run_command(main)
"""
LOST = -signal.SIGABRT  # JAX's heartbeat


def begin(act: str) -> list[subprocess.Popen]:
    """Start two processes, and wait until they have joined."""
    processes = start(["-c", PROCESS, act], ["-c", PROCESS, act])
    for process in processes:
        while (line := process.stdout.readline()) != "joined\n":
            assert line, "it ended"
    return processes


@pytest.mark.medium
@pytest.mark.parametrize(
    ("act", "codes", "says"), [("failed", [42, 1], ""), ("alike", [1, 1], "INTERNAL: the same on all")]
)
def test_processes_end_together_or_one_ends_the_others(act, codes, says):
    (first, second) = begin(act)
    outputs = finish([second], codes[1])
    outputs += [first.communicate(timeout=60)[0]]
    # JAX's heartbeat, or the exchange that fails, ends the other first.
    assert first.returncode in ([codes[0], LOST] if codes[0] == 42 else codes), outputs
    assert all(says in text for text in outputs), outputs


@pytest.mark.medium
@pytest.mark.parametrize("end", ["stopped", "unread"])
def test_a_process_that_ends_alone_ends_the_other(end):
    processes = begin("unread" if end == "unread" else "wait")
    if end == "unread":
        processes[1].stdout.close()  # its reader ends
    else:
        processes[1].send_signal(signal.SIGSTOP)
    output, _ = processes[0].communicate(timeout=60)
    processes[1].kill()
    assert processes[0].returncode in (LOST, 42), output
    assert processes[1].wait() == (1 if end == "unread" else -signal.SIGKILL)


@pytest.mark.medium
def test_a_second_ctrl_c_of_one_process_ends_all_with_one_code():
    processes = begin("steps")
    assert processes[1].stdout.readline() == "step 5\n"
    for _ in range(2):
        processes[1].send_signal(signal.SIGINT)
        time.sleep(0.01)
    finish(processes, 130)


@pytest.mark.medium
def test_a_preemption_notice_to_one_process_before_its_first_step_ends_all():
    finish(begin("notice"), 143)


@pytest.mark.medium
def test_processes_find_each_other_in_slurm_s_environment_past_a_proxy_that_does_not_know_them():
    def srun(index: int, port: int) -> dict[str, str]:
        step = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
        step |= {"SLURM_JOB_ID": "7", "SLURM_STEP_TASKS_PER_NODE": "2", "JAX_COORDINATOR_PORT": str(port)}
        step |= {"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": "", "no_grpc_proxy": ""}
        return step | {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}

    command = ["-c", PROCESS, "complete"]
    for text in finish(start(command, command, variables=srun), 0):
        assert "['0 2', '1 2'] 2" in text


ONE_FAILS = """
import errno, jax
from system.errors import UserError
from hosts.distributed import on_every_process
from hosts.runtime import run_command, start_jax
from system.exits import ending_of
def main():
    start_jax()
    def fail(failures):
        for process, error in failures:
            if process == jax.process_index():
                raise error
    mistake, stale, defect = UserError("do this"), OSError(errno.ESTALE, "stale"), ZeroDivisionError("a defect")
    for failures in [(1, mistake)], [(1, stale)], [(1, defect)], [(0, defect), (1, mistake)], []:
        try:
            on_every_process("a test", lambda: fail(failures))
            print("all is well")
        except Exception as error:
            code, message = ending_of(error)
            print(int(code), message.splitlines()[-1])
    return 0
run_command(main)
"""


@pytest.mark.medium
def test_what_fails_on_one_process_fails_on_all_with_one_code():
    of_one = "2 error: process 1: do this\n42 error: process 1: OSError: [Errno 116] stale; start all again\n"
    rest = "2 error: process 1: do this\nall is well\n"
    first, second = finish(start(["-c", ONE_FAILS], ["-c", ONE_FAILS]), 0)
    assert first.endswith(f"{of_one}1 error: process 1: ZeroDivisionError: a defect\n{rest}")
    assert second.endswith(f"{of_one}1 ZeroDivisionError: a defect\n{rest}")  # its own, with its traceback


@pytest.mark.medium
def test_a_mistake_of_one_process_ends_all_in_seconds(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "")
    mistake, command = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, ["-c", PROCESS, "complete"]

    def variables(index: int, port: int) -> dict[str, str]:
        given = GIVEN | {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_PROCESS_ID": str(index)}
        return given | mistake if index else given

    for text in finish(start(command, command, variables=variables), 2):
        assert "error: process 1: CUDA_VISIBLE_DEVICES=MIG-a,MIG-b" in text
