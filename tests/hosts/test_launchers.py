"""Test that two processes, started as by each launcher, find each other. (Only the environment that launchers set is
here.)"""

import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hosts.cluster import HIGH_PORTS
from tests.hosts.processes import finish, start
from tests.ports import free_ports

PROCESS = """
import os, sys
import hosts.runtime as runtime
if "tpu" in sys.argv:  # this machine passes for a TPU's; JAX, imported there, does not set this
    os.environ.pop("TPU_SKIP_MDS_QUERY", None)
    runtime.find_spec = lambda name: True
    runtime.glob = lambda pattern: ["/dev/accel0"] if "accel" in pattern else []
from hosts.peers import exchange
def main():
    cluster = runtime.start_jax()
    import jax
    print(cluster.launcher, jax.process_index(), len(jax.devices()), exchange("the test", str(cluster.index)))
runtime.run_command(main)
"""


class Metadata(ThreadingHTTPServer):
    """Google Cloud's metadata server."""

    daemon_threads = True

    def __init__(self, attributes: dict[str, str]):
        super().__init__(("127.0.0.1", 0), Answer)
        self.attributes = attributes
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        text = self.server.attributes.get(self.path.removeprefix("/computeMetadata/v1/instance/attributes/"))
        self.send_response(200 if text and self.headers["Metadata-Flavor"] == "Google" else 404)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *_):
        pass


def slurm(index: int, port: int) -> dict[str, str]:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    return step | {"SLURM_JOB_ID": str(port - HIGH_PORTS), "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}


def mpirun(index: int, port: int) -> dict[str, str]:
    names = {"SIZE": "2", "RANK": str(index), "LOCAL_RANK": str(index), "LOCAL_SIZE": "2"}
    uri = {"OMPI_MCA_orte_hnp_uri": f"{(port - HIGH_PORTS) * 2**12}.0;tcp://127.0.0.1:1234"}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()} | uri


def gke(index: int, port: int) -> dict[str, str]:
    hosts = {"TPU_WORKER_HOSTNAMES": "127.0.0.1,localhost", "TPU_WORKER_ID": str(index)}
    return hosts | {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JAX_COORDINATOR_PORT": str(port)}


def gke_slices(index: int, port: int) -> dict[str, str]:
    slices = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": str(index)}
    first = {"MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1:8080"}
    return gke(0, port) | slices | first | {"TPU_WORKER_HOSTNAMES": "127.0.0.1"}


def tpu_vm(index: int, port: int) -> dict[str, str]:
    attributes = {
        "agent-worker-number": str(index),
        "worker-network-endpoints": "unknown:8470:127.0.0.1,unknown:8470:localhost",
    }
    server = Metadata(attributes | {"tpu-env": "ACCELERATOR_TYPE: 'v5litepod-16'\nZONE: 'us-west4-a'\n"})
    return {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}", "JAX_COORDINATOR_PORT": str(port)}


def xpk(index: int, port: int) -> dict[str, str]:
    named = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1", "JAX_COORDINATOR_PORT": str(port)}
    return named | {"NNODES": "2", "NODE_RANK": str(index)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (slurm, "SLURM"),
        (mpirun, "mpirun"),
        (gke, "GKE"),
        (gke_slices, "GKE, 2 slices"),
        (tpu_vm, "TPU VM"),
        (xpk, "JAX_* variables"),
    ],
)
def test_two_processes_find_each_other(environment, launcher, monkeypatch):
    (port,) = free_ports(1)
    for name in [name for name in os.environ if name.startswith(("JAX_COORD", "JAX_NUM", "JAX_PROCESS", "TPU_"))]:
        monkeypatch.delenv(name)
    if environment in (slurm, mpirun):  # its port follows from a number below 4096
        port = HIGH_PORTS + port % 2**12
    tpu = ["tpu"] * launcher.startswith(("GKE", "TPU"))
    processes = start(*[["-c", PROCESS, *tpu]] * 2, port=port, devices=[2], variables=environment)
    outputs = finish(processes, 0)
    for index, text in enumerate(outputs):
        assert text.splitlines()[-1] == f"{launcher} {index} 4 ['0', '1']"
