"""Imitate Kubernetes and JobSet for the fields that tools/launch/k8s.py writes. Pods are local processes.

The rules are in kubernetes/kubernetes (pkg/controller/job) and kubernetes-sigs/jobset
(pkg/controllers/failure_policy.go).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.ports import free_ports

Pod = tuple[int, int]
"""The index of its Job, and its own in the Job."""


def start(jobset: dict, code: Path, python: Path, secrets: dict[str, dict[str, str]]) -> dict[Pod, subprocess.Popen]:
    """Start every Job's pods, each with the environment of its template. The folder `python` gets a program of that
    name, since a link to Python would not find its packages."""
    python.mkdir(exist_ok=True)
    (python / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (python / "python").chmod(0o755)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job, name = replicated["template"]["spec"], jobset["metadata"]["name"]
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["restartPolicy"] == "Never" and pod["shareProcessNamespace"] is True
    assert container["workingDir"] == "/code"
    (port,) = free_ports(1)
    started = {}
    for index in range(replicated["replicas"]):
        labels = {"metadata.labels['jobset.sigs.k8s.io/job-index']": str(index)}
        for number in range(job["completions"]):
            environment = os.environ | {"JOB_COMPLETION_INDEX": str(number)}
            environment["PATH"] = f"{python}:{environment['PATH']}"
            for entry in container["env"]:
                if "value" in entry:
                    environment[entry["name"]] = entry["value"]
                elif key := entry["valueFrom"].get("secretKeyRef"):
                    environment[entry["name"]] = secrets[key["name"]][key["key"]]
                else:
                    environment[entry["name"]] = labels[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            host, _ = environment["JAX_COORDINATOR_ADDRESS"].split(":")
            assert host == f"{name}-{replicated['name']}-0-0.{name}"  # its name in JobSet's DNS
            environment["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
            words, pipe = [*container["command"], *container["args"]], subprocess.PIPE
            started[index, number] = subprocess.Popen(
                words, cwd=code, env=environment, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
            )
    return started


def action_after(jobset: dict, codes: dict[Pod, int], evicted: Pod | None = None) -> str:
    """Return what the JobSet does after pods ended with these codes and one may have been drained: nothing, or its
    failure policy's action. Only RestartJobSet counts towards `maxRestarts`."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["backoffLimit"] == 0
    failures = [
        failure(job["podFailurePolicy"]["rules"], code, pod == evicted) for pod, code in codes.items() if code != 0
    ]
    for rule in jobset["spec"]["failurePolicy"]["rules"] if failures else []:
        if any(
            reason in rule.get("onJobFailureReasons", [reason])
            and any(re.search(pattern, text) for pattern in rule.get("onJobFailureMessagePatterns", [""]))
            for reason, text in failures
        ):
            return rule["action"]
    return "RestartJobSet" if failures else ""


def failure(rules: list[dict], code: int, evicted: bool) -> tuple[str, str]:
    """Return the reason and the message of a Job's failure caused by one pod."""
    for index, rule in enumerate(rules):
        assert rule["action"] == "FailJob"
        matches = evicted
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["operator"] == "In"
            matches = code in rule["onExitCodes"]["values"]
        if matches:
            about = f"Container train for pod default/tiny failed with exit code {code}"
            return "PodFailurePolicy", f"{about} matching FailJob rule at index {index}"
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
