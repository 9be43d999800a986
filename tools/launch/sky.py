"""SkyPilot: python -m tools.launch sky yaml. Prints a task, for those who have SkyPilot: `sky jobs launch FILE` runs it
on whatever cloud has the machines, and starts it again after 42, 143 and lost machines.

SkyPilot sends the folder's files but those that git ignores. It starts all nodes again by their exit codes, without a
bound (`recover_on_exit_codes`). Of several nodes one that crashes ends the others with 42, so all start again; the
crash of a single node ends the job.
"""

import json
from dataclasses import dataclass
from shlex import join

from configs.schema import UserError
from tools.launch.job import AGAIN, Job, JobOptions, make_job, require_bucket

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


def yaml(options: SkyOptions, train: list[str]) -> int:
    """Prints the task. Nothing is asked of SkyPilot."""
    print(task(make_job(options, train), options), end="")
    return 0


def task(job: Job, options: SkyOptions) -> str:
    """The task as YAML, of which JSON's strings are a part. UserError where SkyPilot cannot run the job."""
    hardware = job.hardware
    if hardware.is_tpu and hardware.groups > 1:
        raise UserError(f"--hardware={hardware}: SkyPilot has no job of several slices; `tpu` and `k8s` do")
    if "sky" not in hardware.facts:
        raise UserError(f"--hardware={hardware}: tools/launch/catalog.toml has no SkyPilot name for {hardware.kind}")
    require_bucket(job, "a node's disk goes with it")
    facts, size, run = hardware.facts, hardware.devices_per_group, join([".venv/bin/python", "train.py", *job.train])
    if hardware.is_tpu:
        extra, resources = "tpu,gcs", [f"  accelerators: {facts['sky']}-{size * facts['units_per_chip']}"]
        resources.append(f"  accelerator_args: {{runtime_version: {facts['runtime']}}}")
    else:
        extra, resources, run = "cuda,gcs", [f"  accelerators: {facts['sky']}:{size}"], PROCESSES + run
    launch = ["sky", "jobs", "launch", f"{job.name}.yaml", *(f"--env={name}" for name in job.env)]
    launch += [f"--secret={name}" for name in job.secrets]
    return "\n".join(
        [
            f"# Written by python -m tools.launch sky yaml; {join(launch)} runs it.",
            f"name: {job.name}",
            "workdir: .",
            f"num_nodes: {hardware.groups}",
            "resources:",
            *resources,
            f"  use_spot: {json.dumps(options.spot)}",
            "  job_recovery:",
            "    max_restarts_on_errors: 0",
            f"    recover_on_exit_codes: {sorted(map(int, AGAIN))}",
            *names("envs", job.env),
            *names("secrets", job.secrets),
            f"setup: {json.dumps(options.setup or f'make setup EXTRA={extra}')}",
            "run: |",
            *(f"  {line}" for line in run.splitlines()),
            "",
        ]
    )


def names(section: str, variables: dict[str, str]) -> list[str]:
    """Lines that have SkyPilot ask for variables, whose values it takes from the environment of `sky`."""
    return [f"{section}:", *(f"  {name}: null" for name in variables)] if variables else []


COMMANDS = {"yaml": (yaml, SkyOptions)}
