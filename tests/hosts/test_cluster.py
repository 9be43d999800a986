"""Test how every launcher's environment is understood."""

import pytest

from configs.schema import UserError
from hosts.cluster import Cluster, detect

SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
A_TASK_A_GPU = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_PROCID": "11"}
A_TASK_A_GPU["SLURM_LOCALID"] = "3"
UNBOUND = {"SLURM_TRES_PER_TASK": "cpu:12", "SLURM_GPU_BIND": "none"}
GKE = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "TPU_WORKER_HOSTNAMES": "a-0.a,a-1.a", "TPU_WORKER_ID": "1"}
SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "a-slice-0-0.a:8080"}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
MPI_5 = MPI | {"OMPI_MCA_orte_hnp_uri": ""}  # Open MPI 5
JAX = {"JAX_COORDINATOR_ADDRESS": "first:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}
XPK = {"JAX_COORDINATOR_ADDRESS": "w-0-0.w", "JAX_COORDINATOR_PORT": "6002"}
XPK_GPUS, XPK_CPUS = {"NNODES": "2", "NODE_RANK": "1"}, {"JAX_PROCESS_COUNT": "2", "JAX_PROCESS_ID": "1"}
NAMES = ("a-0.a", "a-1.a")


@pytest.mark.parametrize(
    ("environ", "machine", "cluster"),
    [
        ({}, {}, Cluster("none")),
        ({}, {"gpus": 8}, Cluster("none")),
        (JAX, {}, Cluster("JAX_* variables", 4, 2, "first:1234")),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "[fd00::1]:99"}, {}, Cluster("JAX_* variables", 4, 2, "[fd00::1]:99")),
        (JAX | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, {}, Cluster("JAX_* variables")),
        # JobSet and plain Kubernetes: the variables, and no package or rights.
        (JAX | POD, {"gpus": 8}, Cluster("JAX_* variables", 4, 2, "first:1234")),
        (POD, {"gpus": 8}, Cluster("none; pod 0 of a Job, alone without the JAX_* variables")),
        *((XPK | its, {"gpus": 8}, Cluster("JAX_* variables", 2, 1, "w-0-0.w:6002")) for its in (XPK_GPUS, XPK_CPUS)),
        # SLURM
        (SLURM, {"gpus": 8}, Cluster("SLURM", 2, 1, "gpu007:61444")),  # all eight belong to the task
        (SLURM | A_TASK_A_GPU | UNBOUND, {"gpus": 8}, Cluster("SLURM", 16, 11, "gpu007:61444", (3,))),
        (SLURM | A_TASK_A_GPU | {"SLURM_GPUS_PER_TASK": "1"}, {"gpus": 8}, Cluster("SLURM", 16, 11, "gpu007:61444")),
        (SLURM | A_TASK_A_GPU | {"CUDA_VISIBLE_DEVICES": "3"}, {"gpus": 8}, Cluster("SLURM", 16, 11, "gpu007:61444")),
        (SLURM | A_TASK_A_GPU | {"JAX_LOCAL_DEVICE_IDS": "5"}, {"gpus": 8}, Cluster("SLURM", 16, 11, "gpu007:61444")),
        (
            SLURM | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"},
            {"gpus": 8},
            Cluster("SLURM", 4, 1, "gpu007:61444", (4, 5, 6, 7)),
        ),
        (SLURM | {"SLURM_STEP_NODELIST": "n1,n2"}, {}, Cluster("SLURM", 2, 1, "n1:61444")),
        (SLURM | {"SLURM_STEP_NODELIST": "r[1,3]n[04-05],x"}, {}, Cluster("SLURM", 2, 1, "r1n04:61444")),
        (SLURM | {"JAX_COORDINATOR_PORT": "7000"}, {}, Cluster("SLURM", 2, 1, "gpu007:7000")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, {"gpus": 8}, Cluster("SLURM")),
        (
            {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
            {},
            Cluster("none; of a SLURM allocation of 2 tasks, which `srun` would start"),
        ),
        # mpirun
        (MPI, {}, Cluster("mpirun", 4, 3, "10.96.0.1:62624")),
        (MPI, {"gpus": 2}, Cluster("mpirun", 4, 3, "10.96.0.1:62624", (1,))),
        (MPI | SLURM, {}, Cluster("mpirun", 4, 3, "10.96.0.1:62624")),  # mpirun in a SLURM job
        (MPI_5 | {"JAX_COORDINATOR_ADDRESS": "n1:9"}, {}, Cluster("mpirun", 4, 3, "n1:9")),
        # TPUs
        (GKE, {"tpus": 4}, Cluster("GKE", 2, 1, "a-0.a:8482", hosts=NAMES)),
        (GKE | SLICES, {"tpus": 4}, Cluster("GKE, 2 slices", 4, 3, "a-slice-0-0.a:8482")),
        (GKE | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, {"tpus": 4}, Cluster("GKE")),
        (GKE | {"JAX_COORDINATOR_ADDRESS": "x:5"}, {"tpus": 4}, Cluster("GKE", 2, 1, "x:5", hosts=NAMES)),
        (GKE, {}, Cluster("none")),  # no chip: another kind of pod
        ({}, {"tpus": 4}, Cluster("a TPU host")),
    ],
)
def test_every_launcher(environ, machine, cluster):
    assert detect(environ, **machine) == cluster


@pytest.mark.parametrize("endpoints", ["10.0.0.2,10.0.0.3", "a:0:10.0.0.2,b:1:10.0.0.3"])
def test_tpu_vms_are_recognised_by_their_metadata(endpoints):
    facts = {"agent-worker-number": "1", "worker-network-endpoints": endpoints, "tpu-env": "ZONE: 'z'\nNOTHING"}
    read = lambda key: facts.get(key, "")
    hosts = ("10.0.0.2", "10.0.0.3")
    assert detect({}, 4, metadata=read) == Cluster("TPU VM", 2, 1, "10.0.0.2:8482", hosts=hosts)
    assert detect({"TPU_SKIP_MDS_QUERY": "1"}, 4, metadata=read) == Cluster("a TPU host")
    facts["tpu-env"] = "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.9'"
    assert detect({}, 4, metadata=read) == Cluster("TPU VM, 2 slices", 4, 3, "10.0.0.9:8482")


@pytest.mark.parametrize(
    "environ",
    [
        {"JAX_COORDINATOR_ADDRESS": "first:1234"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "JAX_NUM_PROCESSES": "2"},
        JAX | {"JAX_NUM_PROCESSES": "many"},
        JAX | {"JAX_PROCESS_ID": "4"},
        JAX | {"JAX_COORDINATOR_ADDRESS": "first:port"},
        {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
        MPI_5,
    ],
)
def test_an_incomplete_cluster_is_a_user_error(environ):
    with pytest.raises(UserError, match=r"JAX_PROCESS_ID .* belong together"):
        detect(environ)


def test_gpus_that_do_not_divide_among_tasks_are_a_user_error():
    tasks = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "3(x2)"}
    with pytest.raises(UserError, match="8 GPUs do not divide among the 3 tasks"):
        detect(SLURM | tasks, gpus=8)


@pytest.mark.parametrize("listed", ["4(x2", "2(x", "2,", "", "x", "(x2)", "2(x2)junk", "2, 2", "2"])
def test_a_damaged_list_of_tasks_is_a_user_error(listed):
    with pytest.raises(UserError, match="SLURM_STEP_TASKS_PER_NODE="):
        detect(SLURM | {"SLURM_STEP_TASKS_PER_NODE": listed}, gpus=8)
