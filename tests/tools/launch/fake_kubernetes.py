"""A small interpreter of JobSets: runs the pods as local processes, by their own environment, and follows their
podFailurePolicy and the JobSet's failurePolicy.

It does what kubernetes/kubernetes (pkg/controller/job) and kubernetes-sigs/jobset (pkg/controllers/failure_policy.go)
do with the fields that tools/launch/k8s.py writes.
"""

import copy
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from tests.ports import free_ports


class Cluster:
    """Runs one JobSet until it is complete or has failed."""

    def __init__(self, jobset: dict, code: Path, mounts: dict[str, Path], environment: dict[str, str]) -> None:
        self.jobset, self.code, self.mounts, self.environment = jobset, code, mounts, environment
        self.name, self.spec = jobset["metadata"]["name"], jobset["spec"]
        self.restarts = self.counted = 0
        self.lines: list[str] = []
        self.pods: dict[tuple[int, int], subprocess.Popen] = {}
        self.evicted: set[tuple[int, int]] = set()
        self.secrets: dict[str, dict[str, str]] = {}

    def run(self, seconds: float = 120, when=lambda cluster: None) -> str:
        """`Completed`, or `Failed: reason`. `when` is called again and again meanwhile, to do harm."""
        deadline = time.time() + seconds
        self.start()
        while time.time() < deadline:
            when(self)
            failed = {job: message for job in self.jobs() if (message := self.failure(job))}
            if failed and (ended := self.follow(failed)):
                self.delete()
                return ended
            if not failed and all(pod.poll() == 0 for pod in self.pods.values()):
                self.read()
                return "Completed"
            time.sleep(0.02)
        self.delete()
        raise AssertionError(f"not over after {seconds} s: {self.lines}")

    def jobs(self) -> range:
        (replicated,) = self.spec["replicatedJobs"]
        return range(replicated["replicas"])

    def start(self) -> None:
        """Every Job's pods, each with the environment that its template gives it."""
        (replicated,) = self.spec["replicatedJobs"]
        job = replicated["template"]["spec"]
        assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
        assert job["backoffLimit"] == 0
        (port,) = free_ports(1)
        for index in self.jobs():
            labels = {
                "jobset.sigs.k8s.io/job-index": str(index),
                "jobset.sigs.k8s.io/jobset-name": self.name,
            }
            for number in range(job["completions"]):
                pod = copy.deepcopy(job["template"]["spec"])
                assert pod["restartPolicy"] == "Never" and pod["shareProcessNamespace"] is True
                (container,) = pod["containers"]
                environment = self.environment | {
                    "JOB_COMPLETION_INDEX": str(number),
                    "STAND_IN_START": str(self.restarts),
                }
                for entry in container["env"]:
                    if "value" in entry:
                        environment[entry["name"]] = entry["value"]
                    elif key := entry["valueFrom"].get("secretKeyRef"):
                        environment[entry["name"]] = self.secrets[key["name"]][key["key"]]
                    else:
                        path = entry["valueFrom"]["fieldRef"]["fieldPath"]
                        environment[entry["name"]] = labels[re.fullmatch(r"metadata\.labels\['(.*)'\]", path)[1]]
                host, _ = environment["JAX_COORDINATOR_ADDRESS"].split(":")
                assert host == f"{self.name}-{replicated['name']}-0-0.{self.name}"  # the name that JobSet's DNS gives
                environment["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
                words = [*container["command"], *container["args"]]
                for mount in container["volumeMounts"]:
                    if here := self.mounts.get(mount["name"]):
                        words = [word.replace(mount["mountPath"], str(here)) for word in words]
                assert container["workingDir"] == "/code"
                self.pods[index, number] = subprocess.Popen(
                    words,
                    cwd=self.code,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def evict(self, pod: tuple[int, int]) -> None:
        """What draining a node does to a pod: a condition, then SIGTERM."""
        self.evicted.add(pod)
        self.pods[pod].send_signal(signal.SIGTERM)

    def failure(self, job: int) -> tuple[str, str] | None:
        """The reason and message of a Job's failure."""
        (replicated,) = self.spec["replicatedJobs"]
        rules = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
        for (of, number), pod in self.pods.items():
            code = pod.poll()
            if of != job or not code:
                continue
            code = code if code > 0 else 128 - code
            for index, rule in enumerate(rules):
                assert rule["action"] == "FailJob"
                if "onExitCodes" in rule:
                    assert rule["onExitCodes"]["operator"] == "In"
                    if code in rule["onExitCodes"]["values"]:
                        about = f"Container train for pod default/{number} failed with exit code {code}"
                        return "PodFailurePolicy", f"{about} matching FailJob rule at index {index}"
                elif (of, number) in self.evicted:
                    about = f"Pod default/{number} has condition DisruptionTarget"
                    return "PodFailurePolicy", f"{about} matching FailJob rule at index {index}"
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        return None

    def follow(self, failed: dict[int, tuple[str, str]]) -> str:
        """Restarts all, or returns why the JobSet has failed."""
        policy, action = self.spec["failurePolicy"], "RestartJobSet"
        for rule in policy["rules"]:
            if any(
                reason in rule.get("onJobFailureReasons", [reason])
                and any(re.search(pattern, text) for pattern in rule.get("onJobFailureMessagePatterns", [""]))
                for reason, text in failed.values()
            ):
                action = rule["action"]
                break
        if action == "FailJobSet" or (action == "RestartJobSet" and self.counted >= policy["maxRestarts"]):
            return f"Failed: {action}: {next(iter(failed.values()))[1]}"
        self.restarts += 1
        self.counted += action == "RestartJobSet"
        self.delete()
        self.start()
        return ""

    def delete(self) -> None:
        """End the pods, which may take their time."""
        for pod in self.pods.values():
            pod.terminate()
        self.read()
        self.pods, self.evicted = {}, set()

    def read(self) -> None:
        self.lines += [pod.communicate(timeout=60)[0].decode() for pod in self.pods.values()]


def environment_with(python: str, folder: Path) -> dict[str, str]:
    """The environment of the image: its `python` is `python` (a link to it would not find its packages)."""
    folder.mkdir(exist_ok=True)
    (folder / "python").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    (folder / "python").chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
