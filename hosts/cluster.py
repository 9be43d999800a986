"""Find the processes of a run from the environment that the launcher set, and wait until all are there. Without JAX.

docs/multihost.md lists the launchers, and the variables that each sets.

The JAX_* variables override the launcher; so do XPK's names of them (JAX_COORDINATOR_PORT, NNODES and NODE_RANK on
GPUs, JAX_PROCESS_COUNT). The rules and ports equal jax/_src/clusters, with two exceptions. JAX gives every SLURM or MPI
task one GPU and leaves the others idle. On Kubernetes JAX asks the API server, which needs a package and rights, and
takes one Job's `parallelism` for the complete JobSet.

JAX's own start (`initialization_timeout`) gives up with an abort, exit code 134, and names nobody. So process 0 first
listens on the coordinator's port, and the others ask it every second until all are there: the roll call. Then JAX's
service takes the port.
"""

import random
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4

from configs.schema import UserError

TPU_PORT = "8482"  # jax/_src/clusters/cloud_tpu_cluster.py
HIGH_PORTS = 65536 - 2**12  # one of these, by the job's number: jax/_src/clusters/slurm_cluster.py
START_TIMEOUT = 30 * 60  # seconds to wait for the last host: as long as a cluster takes to start it
TELL_EVERY = 60  # seconds between lines that name the missing processes
AWAY = 10  # seconds without a question after which a process that came counts as missing
RELEASE = 30  # seconds in which all processes learn the result of the roll call

Say = Callable[[str], Any]


class PeerLost(Exception):
    """Raised if another process has stopped, or cannot be reached: start all again."""


class Cluster(NamedTuple):
    """Describe the processes of a run, from this one's environment."""

    launcher: str
    processes: int = 1
    index: int = 0
    """This process."""
    address: str = ""
    """host:port of process 0; empty if there is one process."""
    local_devices: tuple[int, ...] | None = None
    """The machine's GPUs that this process uses; None: all that it sees."""
    hosts: tuple[str, ...] = ()
    """The processes' hosts, in order, if the launcher names them."""


def detect(
    environ: Mapping[str, str], tpus: int = 0, gpus: int = 0, metadata: Callable[[str], str] = lambda key: ""
) -> Cluster:
    """Return the run's processes. `tpus` and `gpus` count the machine's devices. `metadata(key)` returns an attribute
    of a Google Cloud machine, empty if there is none. Raise UserError if the settings are incomplete or
    contradictory."""
    launch = launched(environ, tpus, gpus, metadata)
    text = lambda *names: next((environ[name] for name in names if environ.get(name)), "")
    address = text("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP")
    count = text("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT", *(["NNODES"] if address else []))
    index = text("JAX_PROCESS_ID", *(["NODE_RANK"] if address else []))
    processes = int(count) if count.isdigit() else 0 if count else launch.processes
    place = int(index) if index.isdigit() else -1 if index else launch.index
    if not (address or count or index) and processes <= 1:
        return Cluster(launch.launcher)
    (host, port), (its_host, its_port) = split_address(address), split_address(launch.address)
    host, port = host or its_host, port or text("JAX_COORDINATOR_PORT") or its_port or TPU_PORT
    if not (host and port.isdigit() and 0 <= place < processes):
        given = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": index}
        values = ", ".join(f"{name}={value or '(not set)'}" for name, value in given.items())
        raise UserError(
            f"incomplete multi-process settings ({launch.launcher}): JAX_COORDINATOR_ADDRESS (host:port of process 0), "
            f"JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0) belong together; found {values}"
        )
    launcher = launch.launcher if launch.processes else "JAX_* variables"
    if processes == 1:
        return Cluster(launcher)
    local = None if environ.get("JAX_LOCAL_DEVICE_IDS") else launch.local_devices  # which JAX reads itself
    hosts = launch.hosts if len(launch.hosts) == processes else ()
    return Cluster(launcher, processes, place, with_port(host, port), local, hosts)


def launched(environ: Mapping[str, str], tpus: int, gpus: int, metadata: Callable[[str], str]) -> Cluster:
    """Return what the launcher sets, without the JAX_* variables; 0 processes, and index -1, if it sets none."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = gpus if visible is None else len([name for name in visible.split(",") if name not in ("", "-1")])
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return of_mpirun(environ, gpus)
    if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_STEP_NODELIST" in environ:
        return of_slurm(environ, gpus)
    if tpus:
        return of_tpus(environ, metadata)
    launcher = "none"
    if int(environ.get("SLURM_NTASKS", "1")) > 1:
        launcher += f"; of a SLURM allocation of {environ['SLURM_NTASKS']} tasks, which `srun` would start"
    elif "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        launcher += f"; pod {environ['JOB_COMPLETION_INDEX']} of a Job, alone without the JAX_* variables"
    return Cluster(launcher, 0, -1)


def of_mpirun(environ: Mapping[str, str], gpus: int) -> Cluster:
    """Read Open MPI's variables. Version 5 does not name the first host: JAX_COORDINATOR_ADDRESS must."""
    read = lambda name: int(environ[f"OMPI_COMM_WORLD_{name}"])
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    host = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    address = with_port(host[1] or host[2], int(uri.split(".")[0]) // 2**12 % 2**12 + HIGH_PORTS) if host else ""
    devices = share(gpus, int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1)), read("LOCAL_RANK"))
    return Cluster("mpirun", read("SIZE"), read("RANK"), address, devices)


def of_slurm(environ: Mapping[str, str], gpus: int) -> Cluster:
    """Read the variables of an srun step, with one task per node or per GPU."""
    count = int(environ["SLURM_STEP_NUM_TASKS"])
    if count == 1:
        return Cluster("SLURM", 1, -1)
    listed, node = environ.get("SLURM_STEP_TASKS_PER_NODE", "1"), environ.get("SLURM_NODEID", "0")
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", listed)  # 8(x2),4: 8, 8, 4
    every = [int(tasks) for tasks, nodes in parts for _ in range(int(nodes or 1))]
    if not (re.fullmatch(r"(\d+(\(x\d+\))?(,(?=\d)|$))+", listed) and node.isdecimal() and int(node) < len(every)):
        raise UserError(
            f"SLURM_STEP_TASKS_PER_NODE={listed} has no tasks of node SLURM_NODEID={node}; it is a list such as "
            "8(x2),4: start the run with srun"
        )
    tasks = every[int(node)]
    # With these SLURM shows a task only its own GPUs.
    bound = (
        "SLURM_GPUS_PER_TASK" in environ
        or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
        or environ.get("SLURM_GPU_BIND", "none") != "none"
    )
    devices = None if bound else share(gpus, tasks, int(environ["SLURM_LOCALID"]))
    first = re.split(r",(?![^\[]*\])", environ["SLURM_STEP_NODELIST"])[0]
    host = re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first)  # node[001-015],host2: node001
    address = with_port(host, int(environ["SLURM_JOB_ID"]) % 2**12 + HIGH_PORTS)
    return Cluster("SLURM", count, int(environ["SLURM_PROCID"]), address, devices)


def of_tpus(environ: Mapping[str, str], metadata: Callable[[str], str]) -> Cluster:
    """Read the hosts of one or more TPU slices from the environment (GKE), else from the machine's metadata."""
    listed = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if listed:
        launcher = "GKE" if "KUBERNETES_SERVICE_HOST" in environ else "TPU_WORKER_HOSTNAMES"
        workers, worker = listed.split(","), environ.get("TPU_WORKER_ID", "0")
        slices = environ
    else:
        if "TPU_SKIP_MDS_QUERY" in environ or not (worker := metadata("agent-worker-number")):
            return Cluster("a TPU host", 1, -1)
        launcher = "TPU VM"
        # Names, or name:number:address.
        workers = [endpoint.split(":")[-1] for endpoint in metadata("worker-network-endpoints").split(",")]
        lines = [line.partition(":") for line in metadata("tpu-env").splitlines()]
        slices = {name.strip(): value.strip().strip("'") for name, _, value in lines} | dict(environ)
    workers = [split_address(worker)[0] for worker in workers]
    count, this = int(slices.get("MEGASCALE_NUM_SLICES") or 1), int(slices.get("MEGASCALE_SLICE_ID") or 0)
    host = split_address(slices.get("MEGASCALE_COORDINATOR_ADDRESS") or workers[0])[0]
    index = this * len(workers) + int(worker)
    launcher += f", {count} slices" if count > 1 else ""
    return Cluster(launcher, count * len(workers), index, host, hosts=tuple(workers) if count == 1 else ())


def share(gpus: int, tasks: int, local: int) -> tuple[int, ...] | None:
    """Return the GPUs of the `local`-th of a machine's `tasks`; None for all that it sees, which may be only its own.
    Raise UserError if the tasks do not divide the GPUs."""
    if tasks == 1 or gpus < tasks:
        return None
    if gpus % tasks:
        raise UserError(f"{gpus} GPUs do not divide among the {tasks} tasks of this machine; start one, or one a GPU")
    each = gpus // tasks
    return tuple(range(local * each, (local + 1) * each))


def split_address(address: str) -> tuple[str, str]:
    """Return host and port; either may be empty. An IPv6 address with a port is in brackets."""
    bracketed = re.fullmatch(r"\[(.*)\](?::(\d*))?", address)
    if bracketed:
        return bracketed[1], bracketed[2] or ""
    host, _, port = address.partition(":")
    return (address, "") if ":" in port else (host, port)


def with_port(host: str, port: str | int) -> str:
    """Return host:port, the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def roll_call(
    cluster: Cluster,
    timeout: float = START_TIMEOUT,
    tell_every: float = TELL_EVERY,
    say: Say = lambda text: print(text, flush=True),
) -> None:
    """Return on every process once all have come. Raise PeerLost, on those that are there, if one is missing after
    `timeout` seconds, UserError if their settings contradict each other. Every `tell_every` seconds each `say`s which
    are missing."""
    word, text = (_answer_all if cluster.index == 0 else _ask_first)(cluster, timeout, tell_every, say)
    if word != "go":
        raise {"no": UserError, "lost": PeerLost}[word](text)


def _answer_all(cluster: Cluster, timeout: float, tell_every: float, say: Say) -> tuple[str, str]:
    """Run process 0: answer every process with a word (wait, go, no, lost) and a text, until all have acknowledged the
    last one. Return that."""
    start = reported = now = time.monotonic()
    came: dict[int, tuple[str, str, float]] = {}  # each process's host, its random name, and its last question's time
    replaced, informed = set[str](), set[str]()  # names of processes that restarted; of those with the last answer
    word, text, settled = "wait", "", 0.0

    def answer(question: str) -> str:
        nonlocal word, text, settled
        number, processes, host, process = question.split()
        index = int(number)
        if process in replaced:
            return f"no another process, on {came[index][0]}, is process {index} too"
        if index in came and came[index][1] != process:
            replaced.add(came[index][1])
        came[index] = host, process, now
        if int(processes) != cluster.processes and word == "wait":
            word, settled = "no", now
            text = f"process {index} on {host} expects {processes} processes, process 0 {cluster.processes}"
        return f"{word} {text}"

    def unaware() -> list[int]:
        return sorted(i for i, (_, process, _) in came.items() if process not in informed)

    with _listen(int(split_address(cluster.address)[1])) as server:
        server.settimeout(min(1.0, tell_every))
        while word == "wait" or (unaware() and now - settled < RELEASE):
            with suppress(OSError, ValueError):  # nobody asked, or not one of our processes: a port scanner
                connection, _ = server.accept()
                connection.settimeout(2)
                with connection, connection.makefile("rw", encoding="utf-8") as stream:
                    question = stream.readline(1000)
                    stream.write(answer(question) + "\n")
                    stream.flush()
                    # The side that closes first keeps the port for a while: not this one.
                    if stream.read() and word != "wait":  # it did not leave before the answer
                        informed.add(question.split()[-1])
            now = time.monotonic()
            missing = [i for i in range(1, cluster.processes) if i not in came or now - came[i][2] > AWAY]
            if word == "wait":
                hosts = dict(enumerate(cluster.hosts)) | {i: host for i, (host, *_) in came.items()}
                text = f"{now - start:.0f} s: waiting for process {named(missing, hosts)} of {cluster.processes}"
                if not missing or now - start > timeout:
                    word, settled = "lost" if missing else "go", now
                elif now - reported > tell_every:
                    reported = now
                    say(text)
    if word == "go" and (lost := unaware()):
        return "lost", f"process {', '.join(map(str, lost))} came and left"
    return word, text


def _ask_first(cluster: Cluster, timeout: float, tell_every: float, say: Say) -> tuple[str, str]:
    """Run any other process: ask process 0 until it answers with something other than `wait`. Return that."""
    start = reported = reached = time.monotonic()
    host, port = split_address(cluster.address)
    question = f"{cluster.index} {cluster.processes} {socket.gethostname()} {uuid4().hex}\n"
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(question.encode())
                with connection.makefile(encoding="utf-8") as stream:
                    word, _, text = stream.readline().strip().partition(" ")
                if word not in ("wait", "go", "no", "lost"):
                    raise ConnectionError("it closed the connection")
                if word != "wait":
                    connection.sendall(b"understood\n")
                    return word, text
            reached = time.monotonic()
        except (OSError, UnicodeDecodeError) as problem:
            # Not there yet, or restarted; or JAX's service of the previous run, whose answer is not text.
            passed = time.monotonic() - start
            text = f"{passed:.0f} s: waiting for process 0 at {cluster.address}: {problem}"
            if time.monotonic() - reached > timeout:
                return "lost", text
        if time.monotonic() - reported > tell_every:
            reported = time.monotonic()
            say(text)
        time.sleep(random.uniform(0.5, 1.5))


def _listen(port: int) -> socket.socket:
    """Listen on the port. Raise UserError if it stays taken for a minute: the previous run may still be ending."""
    until, dual = time.monotonic() + 60, False
    while True:
        dual = not dual and socket.has_dualstack_ipv6()  # in turn, since IPv6 may be switched off
        try:
            family = socket.AF_INET6 if dual else socket.AF_INET
            return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=4096)
        except OSError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"process 0 cannot listen on port {port} ({error.strerror}): is another run on this machine? "
                    "JAX_COORDINATOR_PORT names another port, the same for all"
                ) from error
        time.sleep(0.5)


def named(processes: Iterable[int], hosts: dict[int, str]) -> str:
    """Return the processes' numbers, with their hosts if known; 16 at most, and how many more."""
    names = [f"{i} ({hosts[i]})" if i in hosts else str(i) for i in processes]
    return ", ".join(names[:16]) + (f" and {len(names) - 16} others" if names[16:] else "")
