"""Run on Kubernetes, as a JobSet (jobset.sigs.k8s.io, 0.10 or later): python -m tools.launch k8s up|status|logs|down.
Each host is a pod.

A run's exit code decides what follows. Kubernetes counts, restarts and stops:
- a pod's code becomes its Job's failure by podFailurePolicy, with the number of the rule that matched in its message
  (kubernetes/kubernetes, pkg/controller/job/pod_failure_policy.go);
- JobSet's failurePolicy reads that message, and fails or restarts all Jobs, in the order of its rules
  (kubernetes-sigs/jobset, pkg/controllers/failure_policy.go).
"""

import json
import time
from dataclasses import dataclass
from shlex import join
from typing import Any

from configs.schema import Positive, UserError
from tools.launch.job import AGAIN, NEVER, Job, TimedOptions, cost, job_name, make_job
from tools.launch.shell import Shell, ask, say

RUNS, DATA = "/runs", "/data"
LABEL = "jobset.sigs.k8s.io/jobset-name"
LATE = 124  # a pod's exit code at the deadline, as of `timeout`


@dataclass(frozen=True)
class K8sOptions(TimedOptions):
    """Options of `python -m tools.launch k8s`."""

    image: str = ""
    """REGISTRY/NAME: build an image of this code, tag it with its hash, and push it. With a tag or a digest: use that
    image."""
    namespace: str = "default"
    """The namespace of all objects."""
    service_account: str = ""
    """The account that pods run as, which may write to the bucket."""
    claim: str = ""
    """A PersistentVolumeClaim that all pods can write to, at /runs: the run is in /runs/NAME. Not needed if
    --checkpoint.folder=gs://... names a bucket."""
    data_claim: str = ""
    """A PersistentVolumeClaim with text, which pods read at /data: -- --data.source=/data/FOLDER."""
    queue: str = ""
    """The LocalQueue of Kueue, if the cluster has it."""
    node_selector: tuple[str, ...] = ()
    """More labels of the nodes to take: --node_selector key=value key=value"""
    grace: Positive[int] = 300
    """Seconds in which a pod that gets SIGTERM may save."""


def up(options: K8sOptions, train: list[str]) -> None:
    """Build and push the image unless it is given with its tag, and create the JobSet."""
    mounts = [mount for mount, claim in ((RUNS, options.claim), (DATA, options.data_claim)) if claim]
    job, shell = make_job(options, train, *mounts), Shell(options.dry_run)
    if not options.claim and not job.config.checkpoint.folder.startswith("gs://"):
        raise UserError("--claim or --checkpoint.folder=gs://BUCKET/FOLDER is missing: a pod's disk disappears with it")
    image, given = image_of(options.image, job.code.name)
    create = [*kubectl(options), "create", "--filename=-"]
    # YAML does not read JSON's pairs of surrogates.
    manifest = json.dumps(jobset(job, options, image), indent=2, ensure_ascii=False).encode() + b"\n"
    say(cost(job, options.price, options.hours))
    if not shell.dry_run:  # a cluster without JobSet, or with one of this name, refuses it before the image is built
        ask([*create, "--dry-run=server"], stdin=manifest)
    if not given:
        extra = {"cpu": "gcs"}.get(job.hardware.kind, "tpu,gcs" if job.hardware.is_tpu else "cuda,gcs")
        # GKE's nodes are amd64, even if this machine is not.
        build = ["docker", "build", "--platform=linux/amd64", f"--build-arg=EXTRA={extra}", f"--tag={image}"]
        build += ["--file=tools/launch/Dockerfile", "-"]
        shell.run(build, stdin=job.code.archive, shown=f"{join(build)} < code-{job.code.name}.tar")
        shell.run(["docker", "push", image])
    if job.secrets:  # in a separate object, so that no other repeats them
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{job.name}-secrets"}}
        apply = [*kubectl(options), "apply", "--filename=-"]
        shown = f"{join(apply)} < {job.name}-secrets: {', '.join(job.secrets)}, from this environment"
        shell.run(apply, stdin=json.dumps(secret | {"stringData": job.secrets}).encode(), shown=shown)
    shell.run(create, stdin=manifest)
    rest = f"--namespace={options.namespace} --name={job.name}"
    shell.say(f"created; python -m tools.launch k8s logs {rest}   # or status, down")


def kubectl(options: K8sOptions) -> list[str]:
    return ["kubectl", f"--namespace={options.namespace}"]


def image_of(image: str, tag: str) -> tuple[str, bool]:
    """Return the image with its tag, and whether that was given. Raise UserError if none is named."""
    if not image or any(letter.isspace() for letter in image):
        raise UserError(
            "--image is missing: REGISTRY/NAME, which is built and pushed, or one that is there, with a tag"
        )
    given = "@" in image or ":" in image.rsplit("/", 1)[-1]  # a registry may have a port
    return (image if given else f"{image}:{tag}"), given


TRAIN = f"""\
export JAX_PROCESS_ID=$((JOB_INDEX * HOSTS_PER_JOB + JOB_COMPLETION_INDEX))
[ "$DEADLINE" = 0 ] && exec python train.py "$@"
left=$((DEADLINE - $(date +%s)))
[ "$left" -gt 0 ] || exit {LATE}
exec timeout --kill-after="$GRACE" "$left" python train.py "$@"
"""


def jobset(job: Job, options: K8sOptions, image: str) -> dict[str, Any]:
    """Return the JobSet: a Job for each slice, or one Job for all nodes, with a pod for each host. Labels and taints of
    nodes are GKE's. Raise UserError for a bad label."""
    hardware = job.hardware
    tpu, jobs = hardware.is_tpu, hardware.slices if hardware.is_tpu else 1
    per_job = hardware.hosts // jobs
    name = "google.com/tpu" if tpu else "nvidia.com/gpu"
    device = {} if hardware.kind == "cpu" else {name: str(hardware.devices_per_host)}
    selector = {}
    if device:
        selector[f"cloud.google.com/gke-{'tpu-' if tpu else ''}accelerator"] = hardware.facts["gke"]
    if tpu:
        selector["cloud.google.com/gke-tpu-topology"] = hardware.shape
    for label in options.node_selector:
        key, equals, value = label.partition("=")
        if not (key and equals):
            raise UserError(f"--node_selector {label}: write it like key=value")
        selector[key] = value
    metadata: dict[str, Any] = {"name": job.name}
    if options.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": options.queue}
    if tpu:  # each slice is a node pool of GKE's, and no two Jobs share one
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    variables = job.env | {
        # Processes are numbered as TPU hosts are: slice after slice (jax/_src/clusters).
        "JAX_COORDINATOR_ADDRESS": f"{job.name}-workers-0-0.{job.name}:8476",
        "JAX_NUM_PROCESSES": str(hardware.hosts),
        "HOSTS_PER_JOB": str(per_job),
        "DEADLINE": str(int(time.time() + 3600 * options.hours) if options.hours else 0),
        "GRACE": str(options.grace),
    }
    index = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}}
    secret = lambda name: {"secretKeyRef": {"name": f"{job.name}-secrets", "key": name}}
    computed = {"JOB_INDEX": index} | {name: secret(name) for name in job.secrets}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for claim, path, only in ((options.claim, RUNS, {}), (options.data_claim, DATA, {"readOnly": True})):
        if claim:
            mounts.append({"name": path[1:], "mountPath": path, **only})
            volumes.append({"name": path[1:], "persistentVolumeClaim": {"claimName": claim, **only}})
    container = {
        "name": "train",
        "image": image,
        "workingDir": "/code",
        "command": ["bash", "-c", TRAIN, "train"],
        "args": job.train_in(f"{RUNS}/{job.name}") if options.claim else job.train,
        "env": [{"name": name, "value": value} for name, value in variables.items()]
        + [{"name": name, "valueFrom": value} for name, value in computed.items()],
        "resources": {"requests": device, "limits": device},
        "volumeMounts": mounts,
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace,
        # Without this train.py would be process 1, for which the kernel ignores a SIGTERM that has no handler yet.
        "shareProcessNamespace": True,
        "serviceAccountName": options.service_account or "default",
        # The image's user is 1000, whose group can then write to claims. A TPU's devices belong to root.
        "securityContext": {"runAsUser": 0} if tpu else {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"},
        # Slices speak to each other over the hosts' network, at its full speed, as under xpk.
        "hostNetwork": tpu,
        "dnsPolicy": "ClusterFirstWithHostNet" if tpu else "ClusterFirst",
        "nodeSelector": selector,
        "tolerations": [{"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in device],
        "containers": [container],
        "volumes": volumes,
    }
    on_codes = lambda codes: {"action": "FailJob", "onExitCodes": {"operator": "In", "values": sorted(codes)}}
    drained = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    spec = {
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": per_job,
        "parallelism": per_job,
        "podFailurePolicy": {"rules": [on_codes([*NEVER, LATE]), drained, on_codes(AGAIN)]},
        "template": {"spec": pod},
    }
    by_rule = {"onJobFailureReasons": ["PodFailurePolicy"]}
    never = by_rule | {"name": "never", "action": "FailJobSet", "onJobFailureMessagePatterns": ["rule at index 0$"]}
    again = by_rule | {"name": "again", "action": "RestartJobSetAndIgnoreMaxRestarts"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            # A pod that fails in any other way (a crash) fails its Job by backoffLimit; all restart, up to maxRestarts.
            "failurePolicy": {"maxRestarts": job.max_crashes, "rules": [never, again]},
            "replicatedJobs": [{"name": "workers", "replicas": jobs, "template": {"spec": spec}}],
        },
    }


def status(options: K8sOptions, train: list[str]) -> None:
    """Show the JobSet, its restarts, and its pods."""
    name, shell = job_name(options.name), Shell(options.dry_run)
    columns = "NAME:.metadata.name,STATE:.status.terminalState,STARTED_AGAIN:.status.restarts"
    columns += ",CRASHES:.status.restartsCountTowardsMax"
    for words in (["jobset", name, f"--output=custom-columns={columns}"], ["pods", f"--selector={LABEL}={name}"]):
        say(shell.run([*kubectl(options), "get", *words]).stdout.rstrip())


def logs(options: K8sOptions, train: list[str]) -> None:
    """Follow the lines of all pods, each with its pod's name, until Ctrl-C."""
    words = ["logs", f"--selector={LABEL}={job_name(options.name)}", "--prefix", "--follow", "--tail=-1"]
    Shell(options.dry_run).become([*kubectl(options), *words, "--max-log-requests=1000", "--ignore-errors"])


def down(options: K8sOptions, train: list[str]) -> None:
    """Let the pods save, delete the JobSet, and wait until none is left. The image and the run stay."""
    name, shell = job_name(options.name), Shell(options.dry_run)
    delete = [*kubectl(options), "delete", "--ignore-not-found"]
    shell.run([*delete, "jobset", name, "--cascade=foreground", "--wait"])
    shell.run([*delete, "secret", f"{name}-secrets"])
    shell.say(f"{name} is gone, with its pods")


COMMANDS = {f.__name__: (f, K8sOptions) for f in (up, status, logs, down)}
