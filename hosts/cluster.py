"""Find the processes of a run from the environment that the launcher set: no network, no devices, no JAX.

| launcher | recognized by | processes, and this one's index |
| --- | --- | --- |
| mpirun | OMPI_COMM_WORLD_SIZE | OMPI_COMM_WORLD_*; the first host from OMPI_MCA_orte_hnp_uri (Open MPI 4) |
| SLURM | SLURM_STEP_NUM_TASKS, which srun sets | SLURM_PROCID of them; the first of SLURM_STEP_NODELIST |
| TPUs on GKE | TPU_WORKER_HOSTNAMES | TPU_WORKER_ID; MEGASCALE_* if there are several slices |
| TPU VMs | the machine's metadata | the same, from there |
| anything else | JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID | as they say |

The JAX_* variables override the launcher; so do XPK's names of them (JAX_COORDINATOR_PORT, NNODES and NODE_RANK on
GPUs, JAX_PROCESS_COUNT). The rules and ports equal jax/_src/clusters, with two exceptions. JAX gives every SLURM or MPI
task one GPU and leaves the others idle. On Kubernetes JAX asks the API server, which needs a package and rights, and
takes one Job's `parallelism` for the complete JobSet.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from configs.schema import UserError

TPU_PORT = 8482  # jax/_src/clusters/cloud_tpu_cluster.py
HIGH_PORTS = 65536 - 2**12  # one of these, by the job's number: jax/_src/clusters/slurm_cluster.py


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


class Found(NamedTuple):
    """Describe what a launcher sets; None: it does not."""

    launcher: str
    processes: int | None = None
    index: int | None = None
    host: str = ""
    port: int = TPU_PORT
    local_devices: tuple[int, ...] | None = None
    hosts: tuple[str, ...] = ()


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
    named = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": index}
    processes = int(count) if count.isdigit() else None if count else launch.processes
    place = int(index) if index.isdigit() else None if index else launch.index
    host, port = split_address(address)
    port = port or text("JAX_COORDINATOR_PORT") or str(launch.port)
    host = host or launch.host
    if not any(named.values()) and (processes or 1) == 1:
        return Cluster(launch.launcher)
    if not (host and port.isdigit() and processes and place is not None and place < processes):
        values = ", ".join(f"{name}={value or '(not set)'}" for name, value in named.items())
        raise UserError(
            f"incomplete multi-process settings ({launch.launcher}): JAX_COORDINATOR_ADDRESS (host:port of process 0), "
            f"JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0) belong together; found {values}"
        )
    launcher = launch.launcher if launch.processes else "JAX_* variables"
    if processes == 1:
        return Cluster(launcher)
    local = None if environ.get("JAX_LOCAL_DEVICE_IDS") else launch.local_devices  # which JAX reads itself
    where = f"[{host}]" if ":" in host else host
    hosts = launch.hosts if len(launch.hosts) == processes else ()
    return Cluster(launcher, processes, place, f"{where}:{port}", local, hosts)


def launched(environ: Mapping[str, str], tpus: int, gpus: int, metadata: Callable[[str], str]) -> Found:
    """Return what the launcher sets, without the JAX_* variables."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = gpus if visible is None else len([name for name in visible.split(",") if name not in ("", "-1")])
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return of_mpirun(environ, gpus)
    if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_STEP_NODELIST" in environ:
        return of_slurm(environ, gpus)
    if tpus:
        return of_tpus(environ, metadata)
    if int(environ.get("SLURM_NTASKS", "1")) > 1:
        return Found(f"none; of a SLURM allocation of {environ['SLURM_NTASKS']} tasks, which `srun` would start")
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        return Found(f"none; pod {environ['JOB_COMPLETION_INDEX']} of a Job, alone without the JAX_* variables")
    return Found("none")


def of_mpirun(environ: Mapping[str, str], gpus: int) -> Found:
    """Read Open MPI's variables. Version 5 does not name the first host: JAX_COORDINATOR_ADDRESS must."""
    read = lambda name: int(environ[f"OMPI_COMM_WORLD_{name}"])
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    host = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    port = int(uri.split(".")[0]) // 2**12 % 2**12 + HIGH_PORTS if host else TPU_PORT
    devices = share(gpus, int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1)), read("LOCAL_RANK"))
    return Found("mpirun", read("SIZE"), read("RANK"), host[1] or host[2] if host else "", port, devices)


def of_slurm(environ: Mapping[str, str], gpus: int) -> Found:
    """Read the variables of an srun step, with one task per node or per GPU."""
    count = int(environ["SLURM_STEP_NUM_TASKS"])
    if count == 1:
        return Found("SLURM", 1)
    tasks = per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))[int(environ.get("SLURM_NODEID", 0))]
    # With these SLURM shows a task only its own GPUs.
    bound = (
        "SLURM_GPUS_PER_TASK" in environ
        or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
        or environ.get("SLURM_GPU_BIND", "none") != "none"
    )
    devices = None if bound else share(gpus, tasks, int(environ["SLURM_LOCALID"]))
    port = int(environ["SLURM_JOB_ID"]) % 2**12 + HIGH_PORTS
    host = first_host(environ["SLURM_STEP_NODELIST"])
    return Found("SLURM", count, int(environ["SLURM_PROCID"]), host, port, devices)


def of_tpus(environ: Mapping[str, str], metadata: Callable[[str], str]) -> Found:
    """Read the hosts of one or more TPU slices from the environment (GKE), else from the machine's metadata."""
    listed = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if listed:
        launcher = "GKE" if "KUBERNETES_SERVICE_HOST" in environ else "TPU_WORKER_HOSTNAMES"
        workers, worker = listed.split(","), environ.get("TPU_WORKER_ID", "0")
        slices = environ
    else:
        if "TPU_SKIP_MDS_QUERY" in environ or not (worker := metadata("agent-worker-number")):
            return Found("a TPU host", 1)
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
    return Found(launcher, count * len(workers), index, host, hosts=tuple(workers) if count == 1 else ())


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


def first_host(nodes: str) -> str:
    """Return the first of SLURM's list: `node[001-015],host2` gives node001."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first[0] if first else "")


def per_node(tasks: str) -> list[int]:
    """Return SLURM's tasks of each node: `8(x2),4` gives 8, 8, 4."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]
