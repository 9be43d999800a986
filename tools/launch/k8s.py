"""Kubernetes: python -m tools.launch k8s up|status|logs|down. A JobSet (jobset.sigs.k8s.io, 0.10 or later).
Each host is a pod.

A run's exit code decides what follows. Kubernetes itself counts, restarts and stops:
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

from configs.schema import NotNegative, Positive, UserError
from tools.launch.job import AGAIN, NEVER, Job, JobOptions, cost, job_name, make_job
from tools.launch.shell import Shell, say

WORKERS, PORT, RUNS, DATA = "workers", 8476, "/runs", "/data"
LABEL = "jobset.sigs.k8s.io/jobset-name"
LATE = 124  # a pod's exit code at the deadline, as of `timeout`
START = f"""\
export JAX_PROCESS_ID=$((JOB_INDEX * HOSTS_PER_JOB + JOB_COMPLETION_INDEX))
[ "$DEADLINE" = 0 ] && exec python train.py "$@"
left=$((DEADLINE - $(date +%s)))
[ "$left" -gt 0 ] || exit {LATE}
exec timeout --kill-after="$GRACE" "$left" python train.py "$@"
"""


@dataclass(frozen=True)
class K8sOptions(JobOptions):
    """Options of `python -m tools.launch k8s`."""

    image: str = ""
    """REGISTRY/NAME: an image of the code as it lies here is built, tagged by its hash, and pushed. With a tag or a
    digest: that one is taken as it is."""
    namespace: str = "default"
    """Of all that is made."""
    service_account: str = ""
    """The account that pods run as, which may write to the bucket."""
    claim: str = ""
    """A PersistentVolumeClaim that all pods can write to, at /runs: the run is in /runs/NAME. Not needed where
    --checkpoint.folder=gs://... names a bucket."""
    data_claim: str = ""
    """A PersistentVolumeClaim with text, which pods read at /data: -- --data.source=/data/FOLDER."""
    queue: str = ""
    """The LocalQueue of Kueue, where a cluster has it."""
    node_selector: tuple[str, ...] = ()
    """More labels of the nodes to take: --node_selector key=value key=value"""
    grace: Positive[int] = 300
    """Seconds in which a pod that is told to end may save."""
    hours: NotNegative[float] = 0.0
    """The run saves and fails so many hours after `up`, waiting in a queue included; 0: whenever it is complete."""
    price: NotNegative[float] = 0.0
    """US dollars per device and hour; 0: what tools/launch/catalog.toml says, if it does."""


def up(options: K8sOptions, train: list[str]) -> int:
    """Builds and pushes the image unless it is given with its tag, and creates the JobSet."""
    mounts = [mount for mount, claim in ((RUNS, options.claim), (DATA, options.data_claim)) if claim]
    job, shell = make_job(options, train, *mounts), Shell(options.dry_run)
    require_place(job, options)
    say(cost(job, options.price, options.hours))
    image, given = image_of(options.image, job.code.name)
    objects = jobset(job, options, image)
    kubectl = ["kubectl", f"--namespace={options.namespace}"]
    if not shell.dry_run:
        served = shell.ask(["kubectl", "api-resources", "--api-group=jobset.x-k8s.io", "--output=name"]).stdout
        if "jobsets.jobset.x-k8s.io" not in served:
            raise UserError("this cluster has no JobSet: install it first (jobset.sigs.k8s.io/docs/installation)")
        if shell.ask([*kubectl, "get", "jobset", job.name, "--ignore-not-found", "--output=name"]).stdout.strip():
            raise UserError(f"there is a JobSet {job.name} already: python -m tools.launch k8s down --name={job.name}")
    if not given:
        extra = {"cpu": "gcs"}.get(job.hardware.kind, "tpu,gcs" if job.hardware.is_tpu else "cuda,gcs")
        # GKE's nodes are amd64, whatever this machine is.
        build = [
            "docker",
            "build",
            "--platform=linux/amd64",
            f"--build-arg=EXTRA={extra}",
            f"--tag={image}",
            "--file=tools/launch/Dockerfile",
            "-",
        ]
        shell.change(build, stdin=job.code.archive, shown=f"{join(build)} < code-{job.code.name}.tar")
        shell.change(["docker", "push", image])
    if job.secrets:
        apply = [*kubectl, "apply", "--filename=-"]
        shown = f"{join(apply)} < {secret_of(job.name)}: {', '.join(job.secrets)}, from this environment"
        shell.change(apply, stdin=json.dumps(secret(job)).encode(), shown=shown)
    text = json.dumps(objects, indent=2) + "\n"
    shell.change([*kubectl, "create", "--filename=-"], stdin=text.encode())
    if not shell.dry_run:
        rest = f"--namespace={options.namespace} --name={job.name}"
        say(f"created; python -m tools.launch k8s logs {rest}   # or status, down")
    return 0


def secret_of(name: str) -> str:
    """The name of the Secret of a job's secrets."""
    return f"{name}-secrets"


def secret(job: Job) -> dict[str, Any]:
    """The Secret that holds the values, which no other object names."""
    metadata = {"name": secret_of(job.name)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": job.secrets}


def require_place(job: Job, options: K8sOptions) -> None:
    """UserError where what the run saves would be lost with its pods."""
    if not options.claim and not job.config.checkpoint.folder.startswith("gs://"):
        raise UserError("--claim or --checkpoint.folder=gs://BUCKET/FOLDER is missing: a pod's own disk goes with it")


def image_of(image: str, tag: str) -> tuple[str, bool]:
    """The image with its tag, and whether that was given. UserError where none is named."""
    if not image or any(letter.isspace() for letter in image):
        raise UserError(
            "--image is missing: REGISTRY/NAME, which is built and pushed, or one that is there, with a tag"
        )
    given = "@" in image or ":" in image.rsplit("/", 1)[-1]  # a registry may have a port
    return (image if given else f"{image}:{tag}"), given


def jobset(job: Job, options: K8sOptions, image: str) -> dict[str, Any]:
    """The JobSet: a Job for each slice, or one Job for all nodes; a pod a host."""
    hardware = job.hardware
    jobs, hosts = (hardware.groups, hardware.hosts_per_group) if hardware.is_tpu else (1, hardware.hosts)
    labels = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    # Each slice is a node pool of GKE's, and no two Jobs share one.
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    template = {
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": hosts,
        "parallelism": hosts,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": sorted([*map(int, NEVER), LATE])}},
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": sorted(map(int, AGAIN))}},
            ]
        },
        "template": {"spec": pod(job, options, image, hosts)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name, "labels": labels, "annotations": exclusive if hardware.is_tpu else {}},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                # A pod that fails in any other way (a crash) fails its Job by backoffLimit; all restart, so many times.
                "maxRestarts": job.max_crashes,
                "rules": [
                    {
                        "name": "never",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                        "onJobFailureMessagePatterns": ["rule at index 0$"],
                    },
                    {
                        "name": "again",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    },
                ],
            },
            "replicatedJobs": [{"name": WORKERS, "replicas": jobs, "template": {"spec": template}}],
        },
    }


def pod(job: Job, options: K8sOptions, image: str, hosts: int) -> dict[str, Any]:
    """A host's pod. Processes are numbered as TPU hosts are: slice after slice (jax/_src/clusters)."""
    hardware = job.hardware
    env = [
        {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{job.name}-{WORKERS}-0-0.{job.name}:{PORT}"},
        {"name": "JAX_NUM_PROCESSES", "value": str(hardware.hosts)},
        {"name": "HOSTS_PER_JOB", "value": str(hosts)},
        {"name": "DEADLINE", "value": str(int(time.time() + 3600 * options.hours) if options.hours else 0)},
        {"name": "GRACE", "value": str(options.grace)},
        {
            "name": "JOB_INDEX",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}},
        },
    ]
    env += [{"name": name, "value": value} for name, value in job.env.items()]
    key = {"name": secret_of(job.name)}
    env += [{"name": name, "valueFrom": {"secretKeyRef": key | {"key": name}}} for name in job.secrets]
    own = [word for word in job.train if word.split("=")[0] in ("--run_dir", "--run-dir")]
    train = [*job.train, *([f"--run_dir={RUNS}/{job.name}"] if options.claim and not own else [])]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    for claim, path, only in ((options.claim, RUNS, False), (options.data_claim, DATA, True)):
        if claim:
            read = {"readOnly": True} if only else {}
            mounts.append({"name": path[1:], "mountPath": path, **read})
            volumes.append({"name": path[1:], "persistentVolumeClaim": {"claimName": claim, **read}})
    selector, resources, tolerations = devices(job)
    for label in options.node_selector:
        key, equals, value = label.partition("=")
        if not (key and equals):
            raise UserError(f"--node_selector {label}: write it like key=value")
        selector[key] = value
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace,
        # Without this train.py would be process 1, for which the kernel ignores a SIGTERM that has no handler yet.
        "shareProcessNamespace": True,
        "nodeSelector": selector,
        "tolerations": tolerations,
        "containers": [
            {
                "name": "train",
                "image": image,
                "workingDir": "/code",
                "command": ["bash", "-c", START, "train"],
                "args": train,
                "env": env,
                "resources": resources,
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    if hardware.is_tpu:  # slices speak to each other over the hosts' network, at its full speed, as under xpk
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    return spec


def devices(job: Job) -> tuple[dict[str, str], dict[str, Any], list[dict[str, str]]]:
    """Labels of the nodes, what a container takes of one, and the taints it stands, as GKE names them."""
    hardware = job.hardware
    if hardware.kind == "cpu":
        return {}, {}, []
    resource = "google.com/tpu" if hardware.is_tpu else "nvidia.com/gpu"
    selector = {f"cloud.google.com/gke-{'tpu-' if hardware.is_tpu else ''}accelerator": hardware.facts["gke"]}
    if hardware.is_tpu:
        selector["cloud.google.com/gke-tpu-topology"] = hardware.topology
    taken = {resource: str(hardware.devices_per_host)}
    tolerations = [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
    return selector, {"requests": taken, "limits": taken}, tolerations


def named(options: K8sOptions) -> tuple[list[str], str]:
    """kubectl's first words, and the JobSet's name. UserError where it is missing."""
    if not options.name:
        raise UserError("--name is missing: the job's name, as `k8s up` printed it")
    return ["kubectl", f"--namespace={options.namespace}"], job_name(options.name)


def status(options: K8sOptions, train: list[str]) -> int:
    """Shows the JobSet, how often it has started again, and its pods."""
    (kubectl, name), shell = named(options), Shell(options.dry_run)
    columns = "NAME:.metadata.name,STATE:.status.terminalState,STARTED_AGAIN:.status.restarts"
    crashes = "CRASHES:.status.restartsCountTowardsMax"
    for words in (
        ["jobset", name, f"--output=custom-columns={columns},{crashes}"],
        ["pods", f"--selector={LABEL}={name}"],
    ):
        say(shell.change([*kubectl, "get", *words]).stdout.rstrip())
    return 0


def logs(options: K8sOptions, train: list[str]) -> int:
    """Follows the lines of all pods, each with its pod's name, until Ctrl-C."""
    kubectl, name = named(options)
    words = [*kubectl, "logs", f"--selector={LABEL}={name}", "--prefix", "--follow", "--tail=-1"]
    words += ["--max-log-requests=1000", "--ignore-errors"]
    Shell(options.dry_run).become(words)
    return 0


def down(options: K8sOptions, train: list[str]) -> int:
    """Deletes the JobSet, its pods saving first, and sees that none is left. The image and the run stay."""
    (kubectl, name), shell = named(options), Shell(options.dry_run)
    shell.change([*kubectl, "delete", "jobset", name, "--ignore-not-found", "--cascade=foreground", "--wait"])
    shell.change([*kubectl, "delete", "secret", secret_of(name), "--ignore-not-found"])
    if not shell.dry_run:
        left = shell.ask([*kubectl, "get", "pods", f"--selector={LABEL}={name}", "--output=name"]).stdout.split()
        if left:
            raise UserError(f"{len(left)} pod(s) are left: {' '.join(left[:5])}; type the same again")
        say(f"{name} is gone, with its pods")
    return 0


COMMANDS = {
    "up": (up, K8sOptions),
    "status": (status, K8sOptions),
    "logs": (logs, K8sOptions),
    "down": (down, K8sOptions),
}
