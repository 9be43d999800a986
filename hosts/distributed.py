"""Join the processes of a run, and let them exchange values, through JAX's coordination service.

JAX finds the other processes itself under SLURM, Open MPI, GKE and on TPU VMs (jax/_src/clusters). Elsewhere the user
sets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. docs/pods.md lists what each launcher sets.

A process that ends alone does not wait for the others. JAX's heartbeat then ends them with an abort (exit code 134).
"""

import hashlib
import json
import os
import platform
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from glob import glob
from itertools import count
from typing import Any, TypeVar

import jax
from jax._src import clusters, distributed  # as Orbax does: neither has a public API

from system.errors import CODES, FailedElsewhere, UserError
from system.exits import kind_of_ours, shared_kind

DIRECT = "no_grpc_proxy"  # hosts that gRPC reaches without a proxy; it replaces no_proxy
METADATA = "metadata.google.internal,169.254.169.254"  # a Google machine's own server, which no proxy reaches
GIVEN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
JOIN_SECONDS = 30 * 60  # for the last host: as long as a cluster takes to start it
HEARTBEAT_SECONDS = 30  # without a heartbeat, after which a process counts as lost
EXCHANGES = "tokensum/exchange"  # in the service's store: the values that processes exchange

KINDS = list(CODES)
"""What all processes raise if some fail: the first of these that one of them has (`on_every_process`)."""

T = TypeVar("T")


def join() -> int:
    """Join the other processes of the run, if there are any. Return this one's number. Raise UserError if the
    environment contradicts itself."""
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if os.environ.keys() & {"http_proxy", "HTTP_PROXY"} and direct != "*":
        os.environ["no_proxy"] = direct = f"{direct},{METADATA}".strip(",")
    variables = [os.environ.get(name, "") for name in GIVEN]
    found = valid_processes(*variables) if any(variables) else detected_processes()
    if not found or jax.distributed.is_initialized():
        return distributed.global_state.process_id
    address, processes, index = found
    if os.environ.keys() & {"grpc_proxy", "https_proxy", "http_proxy"}:  # gRPC would ask it for the coordinator
        direct = os.environ.get(DIRECT) or direct
        os.environ[DIRECT] = f"{direct},{address.rpartition(':')[0].strip('[]')}".strip(",")
    waits = f"process {index} of {processes} waits for the others, process 0 at {address}; JAX_NUM_PROCESSES=1: alone"
    notice = threading.Timer(60, print, [waits], {"flush": True})
    notice.daemon = True
    notice.start()
    jax.distributed.initialize(
        address,
        processes,
        index,
        cluster_detection_method="deactivate",
        initialization_timeout=JOIN_SECONDS,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    notice.cancel()
    gpu = own_gpu(os.environ, len(glob("/dev/nvidia[0-9]*")))
    if gpu is not None:
        jax.config.update("jax_cuda_visible_devices", str(gpu))
    return index


def valid_processes(address: str, processes: str, index: str) -> tuple[str, int, int] | None:
    """Return the address of process 0, the number of processes and this one's number; None for one process, which
    needs no others. Raise UserError if they are incomplete or impossible."""
    if processes == "1":
        return None
    host, _, port = address.rpartition(":")
    is_address = re.fullmatch(r"[\w.-]+|\[[\w:.%]+\]", host) and port.isdecimal() and 0 < int(port) < 65536
    if is_address and processes.isdecimal() and index.isdecimal() and int(index) < int(processes):
        return address, int(processes), int(index)
    found = ", ".join(f"{name}={value or '(not set)'}" for name, value in zip(GIVEN, (address, processes, index)))
    raise UserError(
        f"{GIVEN[0]} (HOST:PORT of process 0), {GIVEN[1]} and {GIVEN[2]} (from 0) belong together; found {found}"
    )


def detected_processes() -> tuple[str, int, int] | None:
    """Return what `valid_processes` does, as JAX detects it; None without a launcher. Raise UserError if the launcher's
    variables are incomplete or impossible."""
    if os.environ.get("SLURM_STEP_NUM_TASKS") == "1":  # an interactive step of a larger allocation
        return None
    nodes, tasks = os.environ.get("SLURM_STEP_NODELIST", ""), os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
    try:
        if re.match(r"[^,[]*\[[^]]*\][^,]", nodes):
            raise ValueError(f"JAX cannot read SLURM_STEP_NODELIST={nodes}; launch/train.sbatch can")
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, [], None, JOIN_SECONDS)[:3]
        if found[0]:
            return valid_processes(*map(str, found))
        if tasks != "1":
            raise ValueError(f"OMPI_COMM_WORLD_SIZE={tasks}, but JAX finds no address; set {', '.join(GIVEN)}")
    except Exception as error:  # of the variables, or of a cluster's client
        raise UserError(
            f"the variables of SLURM, Open MPI, Kubernetes or a TPU's machine are incomplete or wrong ({error}); start "
            "the run with srun or mpirun, or with JAX_NUM_PROCESSES=1 to run one process alone"
        ) from error
    return None


def own_gpu(environ: Mapping[str, str], gpus: int) -> int | None:
    """Return the number of this process's GPU among those that it sees; None: all of them. `gpus`: those of the
    machine. Every process must call it, after joining: a mistake of one ends all at once."""
    mine = f"{platform.node()} {environ.get('CUDA_VISIBLE_DEVICES')}"
    tasks_of = exchange("the GPUs' tasks", mine)
    tasks, local = tasks_of.count(mine), tasks_of[: distributed.global_state.process_id].count(mine)
    return on_every_process("its GPUs", lambda: local_gpu(environ, gpus, tasks, local))


def local_gpu(environ: Mapping[str, str], gpus: int, tasks: int, local: int) -> int | None:
    """Return the GPU of the task `local` of `tasks` that see the same ones; None: all that it sees. Raise UserError if
    the tasks cannot take one GPU each."""
    if environ.get("JAX_LOCAL_DEVICE_IDS") or environ.get("JAX_PLATFORMS") in ("cpu", "tpu"):
        return None  # JAX reads these variables
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for name in (visible or "").split(",") if name not in ("", "-1")]
    gpus = gpus if visible is None else len(names)
    if gpus > 1 and any(name.startswith("MIG") for name in names):
        raise UserError(f"CUDA_VISIBLE_DEVICES={visible}: CUDA gives a process one MIG device; name one for each task")
    if not gpus or tasks == 1 or len(names) == 1:  # SLURM shows a task only its own
        return None
    if gpus != tasks:
        raise UserError(
            f"{tasks} tasks of {platform.node()} see {gpus} GPUs; start one task for each machine, or one for each GPU"
        )
    return local


def everyone_is_here(seconds: float) -> bool:
    """Return whether all processes of the run call this within `seconds`."""
    client: Any = distributed.global_state.client
    try:
        client.wait_at_barrier("tokensum/end", int(1000 * seconds))
    except jax.errors.JaxRuntimeError:
        return False
    return True


_numbers = defaultdict[str, Iterator[int]](lambda: count(1))
"""Numbers of the exchanges of each channel. Every process counts them alike, so that no two share a name."""


def exchange(what: str, value: str, channel: str = "") -> list[str]:
    """Return every process's `value`, in order, through JAX's service, not through the devices. Every process must call
    it, with the same `what`. A thread other than the main one needs its own `channel`. A missing process delays it
    until JAX's heartbeat or the caller's time limit ends this one. Raise RuntimeError after `jax.distributed.shutdown`,
    which may come while a thread still saves."""
    state = distributed.global_state
    client: Any = state.client
    if client is None:
        if state.num_processes > 1:
            raise RuntimeError(f"{what}: this process has left the others of its run")
        return [value]
    number = next(_numbers[channel])
    name = f"{EXCHANGES}{channel}/{number}"
    client.key_value_set(f"{name}/{state.process_id}", value)
    if state.process_id > 0:  # the first gathers them, so that the requests grow with the processes, not their square
        return json.loads(_wait_for(client, f"{name}/all", what))
    answers: dict[str, str] = {}
    while missing := [i for i in range(state.num_processes) if f"{name}/{i}" not in answers]:
        _wait_for(client, f"{name}/{missing[-1]}", f"{what} of process {missing[-1]}")
        answers = dict(client.key_value_dir_get(f"{name}/"))  # all that are there, in one request
    values = [answers[f"{name}/{i}"] for i in range(state.num_processes)]
    client.key_value_set(f"{name}/all", json.dumps(values))
    client.key_value_delete(f"{EXCHANGES}{channel}/{number - 1}")  # all have come here, so they have read it
    return values


def _wait_for(client: Any, key: str, what: str) -> str:
    """Return the value of `key` once it is there. Print a line for each minute without it."""
    for minutes in count(1):
        try:
            return client.blocking_key_value_get(key, 60_000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            print(f"{minutes} min: waiting for {what}", flush=True)
    raise AssertionError


def max_over_processes(value: int) -> int:
    """Return the highest of the processes' values, through JAX's service. Every process must call it."""
    return max(map(int, exchange("a number", str(int(value)))))


def check_hosts_agree(about: str, value: str) -> None:
    """Raise UserError on every process if their `value`s differ. Every process must call it."""
    digests = exchange(about, f"{hashlib.sha256(value.encode()).hexdigest()} {platform.node()}")
    values, hosts = zip(*(answer.split(" ", 1) for answer in digests))
    different = [i for i, other in enumerate(values) if other != values[0]]
    if different:
        raise UserError(
            f"of {len(digests)} processes, {different} differ from process 0 in {about} (on "
            f"{', '.join(hosts[i] for i in different[:8])}; process 0 on {hosts[0]}); start all with one command"
        )


def on_first_process(function: Callable[[], Any]) -> Any:
    """Return the result of `function` on process 0 to every process, through JSON. Raise as `on_every_process` does.
    Every process must call it."""
    if jax.process_count() == 1:
        return function()
    here = (lambda: json.dumps(function())) if jax.process_index() == 0 else str
    answer, failure = attempt(here)
    return json.loads(exchange_answers("the first process's answer", answer or "", failure)[0])


def on_every_process(what: str, function: Callable[[], T]) -> T:
    """Return the result of `function` here, once it has returned on every process. If it fails on some, all raise the
    first of their errors' `shared_kind`s in KINDS, with the process's number. A process that has an error of its own
    raises that instead of FailedElsewhere. So all end with one exit code. `function` must not exchange, nor wait for
    another process without end."""
    if distributed.global_state.num_processes == 1:
        return function()
    result, failure = attempt(function)
    exchange_answers(what, "", failure)
    return result  # pyright: ignore[reportReturnType]


def attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `function`, or the exception that it raised."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def exchange_answers(what: str, answer: str, failure: Exception | None) -> list[str]:
    """Return every process's `answer`, in order. If some have a `failure`, raise what `on_every_process` does."""
    answers = [one.split(" ", 1) for one in exchange(what, _described(failure) if failure else f" {answer}")]
    if failed := [(int(kind), message, i) for i, (kind, message) in enumerate(answers) if kind]:
        kind, message, i = min(failed)
        shared = KINDS[kind]
        if failure and shared is FailedElsewhere:
            raise failure
        raise shared(f"process {i}: {message}") from failure
    return [text for _, text in answers]


def _described(failure: Exception) -> str:
    """Return the place in KINDS of what all processes raise, and its message."""
    message = str(failure) if kind_of_ours(failure) else f"{type(failure).__name__}: {failure}"
    return f"{KINDS.index(shared_kind(failure))} {message}"
