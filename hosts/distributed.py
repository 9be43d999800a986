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
from typing import Any, TypeVar, cast

import jax
from jax._src import clusters, distributed  # as Orbax does: neither has a public API

from configs.files import StorageLost
from configs.schema import UserError

DIRECT = "no_grpc_proxy"  # hosts that gRPC reaches without a proxy; it replaces no_proxy
METADATA = "metadata.google.internal,169.254.169.254"  # a Google machine's own server, which no proxy reaches
GIVEN = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
JOIN_SECONDS = 30 * 60  # for the last host: as long as a cluster takes to start it
HEARTBEAT_SECONDS = 30  # without a heartbeat, after which a process counts as lost
SHUTDOWN_SECONDS = 300  # that the end of a process waits for the end of the others
EXCHANGES = "tokensum/exchange"  # in the service's store: the values that processes exchange

T = TypeVar("T")


class NoCheckpoint(Exception):
    """Raised if a run has checkpoints, and none can be read."""


class Damaged(ValueError):
    """Raised if a saved file is missing, or its content differs."""


SHARED_ERRORS = (UserError, StorageLost, Damaged)  # that all processes raise if one does


def join() -> int:
    """Join the other processes of the run, if there are any. Return this one's number. Raise UserError if the
    environment contradicts itself."""
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if os.environ.keys() & {"http_proxy", "HTTP_PROXY"} and direct != "*":
        os.environ["no_proxy"] = direct = f"{direct},{METADATA}".strip(",")
    address, processes, index = given_processes(os.environ)
    if not address and processes != 1:
        address, processes, index = detected_processes()
    if not address or processes == 1 or jax.distributed.is_initialized():
        return distributed.global_state.process_id
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
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )
    notice.cancel()
    if gpus := own_gpus(os.environ, len(glob("/dev/nvidia[0-9]*"))):
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, gpus)))
    return distributed.global_state.process_id


def given_processes(environ: Mapping[str, str]) -> tuple[str | None, int | None, int | None]:
    """Return the address of process 0, the number of processes and this one's number that the user set; None if they
    are not set. JAX_NUM_PROCESSES=1 needs no others. Raise UserError if they are incomplete or impossible."""
    address, processes, index = (environ.get(name, "") for name in GIVEN)
    if not (address or processes or index):
        return None, None, None
    if processes == "1" and not (address or index):
        return None, 1, 0
    host, _, port = address.rpartition(":")
    numbers = processes.isdecimal() and index.isdecimal() and port.isdecimal()
    is_host = re.fullmatch(r"[\w.-]+|\[[\w:.%]+\]", host)
    if not (numbers and is_host and int(index) < int(processes) and 0 < int(port) < 65536):
        found = ", ".join(f"{name}={environ.get(name, '(not set)')}" for name in GIVEN)
        raise UserError(
            f"{GIVEN[0]} (HOST:PORT of process 0), {GIVEN[1]} and {GIVEN[2]} (from 0) belong together; found {found}"
        )
    return address, int(processes), int(index)


def detected_processes() -> tuple[str | None, int | None, int | None]:
    """Return what `given_processes` does, as JAX detects it; None without a launcher. Raise UserError if the launcher's
    variables are incomplete or impossible."""
    if os.environ.get("SLURM_STEP_NUM_TASKS") == "1":  # an interactive step of a larger allocation
        return None, None, None
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    if re.match(r"[^,[]*\[[^]]*\][^,]", nodes):
        raise UserError(f"SLURM_STEP_NODELIST={nodes}: JAX cannot read such a list; use launch/train.sbatch")
    try:
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, [], None, JOIN_SECONDS)[:3]
        if found[0]:
            return given_processes(dict(zip(GIVEN, map(str, found))))
    except Exception as error:  # of the variables, or of a cluster's client
        raise UserError(
            f"the variables of SLURM, Open MPI, Kubernetes or a TPU's machine are incomplete or wrong ({error}); start "
            "the run with srun or mpirun, or with JAX_NUM_PROCESSES=1 to run one process alone"
        ) from error
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):  # Open MPI 5, MPICH
        if os.environ.get(name, "1") != "1":
            raise UserError(
                f"{name}={os.environ[name]}, but this launcher gives JAX no address; set {', '.join(GIVEN)}, or "
                "JAX_NUM_PROCESSES=1 to run one process alone"
            )
    return None, None, None


def own_gpus(environ: Mapping[str, str], gpus: int) -> list[int]:
    """Return the GPUs of this process by their number among those that it sees; none: as JAX chooses. `gpus`: those of
    the machine. Every process must call it, after joining: a mistake of one ends all at once."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    mine = f"{platform.node()} {visible}"
    tasks_of = exchange("the GPUs' tasks", mine)
    tasks, local = tasks_of.count(mine), tasks_of[: distributed.global_state.process_id].count(mine)
    return on_every_process("its GPUs", lambda: local_gpus(environ, gpus, tasks, local))


def local_gpus(environ: Mapping[str, str], gpus: int, tasks: int, local: int) -> list[int]:
    """Return the GPUs of the task `local` of `tasks` that see the same ones: all for one task, else one for each; none:
    as JAX chooses. Raise UserError if the tasks cannot take one GPU each."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for name in (visible or "").split(",") if name not in ("", "-1")]
    gpus = gpus if visible is None else len(names)
    if environ.get("JAX_LOCAL_DEVICE_IDS") or environ.get("JAX_PLATFORMS") in ("cpu", "tpu"):
        return []  # JAX reads these variables
    if gpus > 1 and any(name.startswith("MIG") for name in names):
        raise UserError(f"CUDA_VISIBLE_DEVICES={visible}: CUDA gives a process one MIG device; name one for each task")
    if not gpus or tasks == 1 or len(names) == 1:  # SLURM shows a task only its own
        return list(range(gpus))
    if gpus != tasks:
        raise UserError(
            f"{tasks} tasks of {platform.node()} see {gpus} GPUs; start one task for each machine, or one for each GPU"
        )
    return [local]


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
    given: dict[str, str] = {}
    while missing := [i for i in range(state.num_processes) if f"{name}/{i}" not in given]:
        _wait_for(client, f"{name}/{missing[-1]}", f"{what} of process {missing[-1]}")
        given = dict(client.key_value_dir_get(f"{name}/"))  # all that are there, in one request
    values = [given[f"{name}/{i}"] for i in range(state.num_processes)]
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

    def answer() -> str:
        return json.dumps(function() if jax.process_index() == 0 else None)

    return json.loads(_together("an answer", answer)[1][0])


def on_every_process(what: str, function: Callable[[], T]) -> T:
    """Return the result of `function` here, once it has returned on every process. If it raises one of SHARED_ERRORS on
    some, all raise the first kind in that order, with the process's number; other exceptions end this process.
    `function` must not wait for another process."""
    return _together(what, function)[0]


def _together(what: str, function: Callable[[], T]) -> tuple[T, list[str]]:
    """Return the result of `function` here, and every process's if it is a text, in one exchange."""
    failure: Exception | None = None
    result: Any = None
    try:
        result = function()
    except SHARED_ERRORS as error:
        failure = error
    kind = next((str(i) for i, kind in enumerate(SHARED_ERRORS) if isinstance(failure, kind)), "")
    text = result if isinstance(result, str) else ""
    answers = [answer.split(" ", 1) for answer in exchange(what, f"{kind} {failure or text}")]
    if failed := [(kind, message, i) for i, (kind, message) in enumerate(answers) if kind]:
        kind, message, i = min(failed)
        raise SHARED_ERRORS[int(kind)](message if len(answers) == 1 else f"process {i}: {message}") from failure
    return cast(T, result), [answer for _, answer in answers]
