"""Print a task for SkyPilot: python -m tools.launch sky yaml. `sky jobs launch FILE` runs it on a cloud that has the
machines, and restarts it after 42, 143 and lost machines.

SkyPilot sends the folder's files except those that git ignores. It restarts all nodes by their exit codes, without a
bound (`recover_on_exit_codes`). If one of several nodes crashes, the others end with 42 and all restart; the crash of a
single node ends the job.
"""

import json
from dataclasses import dataclass
from shlex import join
from typing import Any

from configs.schema import UserError
from tools.launch.job import AGAIN, JobOptions, make_job, require_bucket

# Where SkyPilot names the nodes; on a TPU the machines' metadata do.
PROCESSES = """\
export JAX_COORDINATOR_ADDRESS="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):8476"
export JAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES" JAX_PROCESS_ID="$SKYPILOT_NODE_RANK"
"""


@dataclass(frozen=True)
class SkyOptions(JobOptions):
    """Options of `python -m tools.launch sky`."""

    spot: bool = False
    """Machines that may be taken away at any time."""
    setup: str = ""
    """The command that makes .venv on each node; empty: `make setup` with the extra that the hardware needs."""


def yaml(options: SkyOptions, train: list[str]) -> None:
    """Print the task, without asking SkyPilot."""
    job = make_job(options, train)
    hardware, facts = job.hardware, job.hardware.facts
    if hardware.is_tpu and hardware.slices > 1:
        raise UserError(f"--hardware={hardware}: SkyPilot has no job of several slices; `tpu` and `k8s` do")
    if "sky" not in facts:
        raise UserError(f"--hardware={hardware}: tools/launch/catalog.toml has no SkyPilot name for {hardware.kind}")
    require_bucket(job, "a node's disk disappears with it")
    resources: dict[str, Any] = {
        "accelerators": f"{facts['sky']}:{hardware.inside}",
        "use_spot": options.spot,
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": sorted(AGAIN)},
    }
    if hardware.is_tpu:
        resources["accelerators"] = f"{facts['sky']}-{hardware.chips_inside * facts['units_per_chip']}"
        resources["accelerator_args"] = {"runtime_version": facts["runtime"]}
    fields = {
        "name": job.name,
        "workdir": ".",
        "num_nodes": hardware.slices,
        "resources": resources,
        # SkyPilot takes their values from the environment of `sky`.
        "envs": dict.fromkeys(job.env),
        "secrets": dict.fromkeys(job.secrets),
        "setup": options.setup or f"make setup EXTRA={'tpu' if hardware.is_tpu else 'cuda'},gcs",
        "run": "" if hardware.is_tpu else PROCESSES,
    }
    fields["run"] += join([".venv/bin/python", "train.py", *job.train]) + "\n"
    launch = ["sky", "jobs", "launch", f"{job.name}.yaml", *(f"--env={name}" for name in job.env)]
    launch += [f"--secret={name}" for name in job.secrets]
    print(f"# Written by python -m tools.launch sky yaml; {join(launch)} runs it.")
    for name, value in fields.items():
        if value != {}:
            print(f"{name}: {json.dumps(value, ensure_ascii=False)}")  # YAML contains JSON


COMMANDS = {"yaml": (yaml, SkyOptions)}
