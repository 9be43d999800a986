"""Run SLURM for a test: a controller, and three nodes on this machine."""

import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_ports

SLURM_CONF = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/none
CryptoType=crypto/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n.spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=2
NodeName=node0 NodeHostname=localhost NodeAddr=localhost Port={ports[1]} CPUs=2
NodeName=node1 NodeHostname=localhost NodeAddr=localhost Port={ports[2]} CPUs=2
NodeName=node2 NodeHostname=localhost NodeAddr=localhost Port={ports[3]} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def real(monkeypatch):
    """Start a controller and three nodes on this machine."""
    if not (shutil.which("slurmctld") and shutil.which("slurmd")):
        pytest.skip("SLURM itself is not installed (Debian: slurm-wlm): slurmctld and slurmd did not run")
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:  # a short path, since it contains Unix sockets
        folder = Path(name)
        for name in ("state", "node0.spool", "node1.spool", "node2.spool"):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(SLURM_CONF.format(ports=free_ports(4), folder=folder))
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"node{i}"] for i in range(3))]
        started = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for words in daemons]
        deadline = time.time() + 60
        try:
            while subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%D"], capture_output=True).stdout.strip() != b"3":
                assert time.time() < deadline, [log.read_text()[-2000:] for log in sorted(folder.glob("*.log"))]
                time.sleep(0.5)
            yield
            subprocess.run(["scancel", "--me"], check=False)
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait()
