"""`python -m tools.launch k8s`: JobSets that the definition of JobSet allows, and that end as the exit codes say, run
by an interpreter of JobSets (fake_kubernetes.py); no cluster is asked."""

import copy
import gzip
import json
import re
import signal
import stat
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from configs.schema import UserError
from tests.tools.launch.fake_kubernetes import Cluster, environment_with
from tests.tools.launch.stand_in import StandIn
from tools.launch.__main__ import main
from tools.launch.k8s import image_of

ROOT = Path(__file__).parents[3]
BUCKET = "--checkpoint.folder=gs://bucket/tiny"


@pytest.fixture(scope="module")
def schema():
    """JobSet's definition, made to refuse fields that it does not have, as kubectl does."""
    text = gzip.decompress((Path(__file__).parent / "jobset/jobset.x-k8s.io_jobsets.yaml.gz").read_bytes())
    (version,) = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
    found = version["schema"]["openAPIV3Schema"]
    found["properties"]["metadata"] = {"type": "object"}  # the cluster's own

    def strict(part):
        if isinstance(part, dict):
            if "properties" in part and "x-kubernetes-preserve-unknown-fields" not in part:
                part.setdefault("additionalProperties", False)
            if part.pop("x-kubernetes-int-or-string", None):
                part.pop("anyOf", None)
                part["type"] = ["integer", "string"]
            for each in part.values():
                strict(each)
        elif isinstance(part, list):
            for each in part:
                strict(each)

    strict(found)
    return jsonschema.Draft202012Validator(found)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    made = StandIn(tmp_path / "repository", tmp_path / "told")
    monkeypatch.chdir(made.root)
    return made


def dry_run(capsys, hardware: str, *options: str, train: tuple[str, ...] = (BUCKET,)) -> tuple[list[str], dict]:
    """The commands that would be typed, and the JobSet."""
    words = [f"--hardware={hardware}", "--image=REGISTRY/tokensum", *options]
    assert main(["k8s", "up", "--dry_run", *words, "--", "--config=tiny.py", *train]) == 0
    said = capsys.readouterr().out
    commands, _, rest = said.partition(" <<'END'\n")
    return [line for line in commands.splitlines() if line[0] != "#"], json.loads(rest.removesuffix("END\n"))


@pytest.mark.parametrize(
    "hardware", ["v5e:2x2", "v5e:4x4", "2x v5e:4x4", "v5p:2x2x2", "2x h200:8", "h100:4", "2x cpu:1"]
)
def test_a_jobset_is_what_its_definition_allows(repository, capsys, schema, hardware):
    commands, jobset = dry_run(
        capsys, hardware, "--claim=disk", "--queue=mine", "--service_account=writer", "--node_selector", "pool=a", "b=c"
    )
    schema.validate(jobset)
    assert commands[0].startswith("docker build --platform=linux/amd64 --build-arg=EXTRA=") and commands[1].startswith(
        "docker push REGISTRY/"
    )
    assert commands[2] == "kubectl --namespace=default create --filename=-"
    (replicated,) = jobset["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "writer" and pod["nodeSelector"]["b"] == "c"
    # Names that become hostnames, of which 63 letters are the most.
    assert len(f"{jobset['metadata']['name']}-workers-999-9999") <= 63


def test_text_is_read_from_a_claim_of_its_own(repository, capsys, schema, tmp_path):
    (tmp_path / "text").mkdir()
    train = (BUCKET, "--data.source=/data/mine")
    _, jobset = dry_run(capsys, "2x cpu:1", "--data_claim=corpus", train=train)
    schema.validate(jobset)
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    claim = {"claimName": "corpus", "readOnly": True}
    assert {"name": "data", "persistentVolumeClaim": claim} in pod["volumes"]
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in pod["containers"][0]["volumeMounts"]
    with pytest.raises(UserError, match=r"--data\.source=/data/mine is on this machine"):
        dry_run(capsys, "2x cpu:1", train=train)


def test_the_definition_refuses_what_it_does_not_know(repository, capsys, schema):
    _, jobset = dry_run(capsys, "v5e:4x4")
    for path, value in (
        (("spec", "failurePolicy", "rules", 0, "onJobFailureMessage"), "x"),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "enviroment"), []),
        (("spec", "replicatedJobs", 0, "replicas"), "two"),
    ):
        wrong = part = copy.deepcopy(jobset)
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            schema.validate(wrong)


def test_slices_and_nodes_are_asked_for_as_gke_names_them(repository, capsys):
    _, two = dry_run(capsys, "2x v5e:4x4")
    (replicated,) = two["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    assert (replicated["replicas"], job["completions"]) == (2, 4)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": "4"}
    assert two["metadata"]["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"].endswith("gke-nodepool")
    _, gpus = dry_run(capsys, "4x h200:8")
    (replicated,) = gpus["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["replicas"], job["completions"]) == (1, 4)
    assert job["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def cluster_of(repository, capsys, tmp_path, *options: str, hardware="2x cpu:1", train=(BUCKET,)) -> Cluster:
    _, jobset = dry_run(capsys, hardware, *options, train=train)
    return Cluster(
        jobset, repository.root, {"runs": tmp_path / "disk"}, environment_with(sys.executable, tmp_path / "bin")
    )


def test_143_and_42_restart_all_and_0_is_complete(repository, capsys, tmp_path):
    repository.plan([143, 143], [42, 42], [143, 42], [0, 0])
    cluster = cluster_of(repository, capsys, tmp_path, "--max_crashes=0", "--claim=disk")
    assert cluster.run() == "Completed"
    assert (cluster.restarts, cluster.counted) == (3, 0)
    # The last starts: of the others, a pod may be ended before it has noted anything.
    first, other = repository.starts(0)[-1], repository.starts(1)[-1]
    assert first["JAX_NUM_PROCESSES"] == "2" and first["JAX_COORDINATOR_ADDRESS"] == other["JAX_COORDINATOR_ADDRESS"]
    assert first["arguments"] == ["--config=tiny.py", BUCKET, f"--run_dir={tmp_path}/disk/tiny"]


def test_processes_of_two_slices_are_numbered_one_after_the_other(repository, capsys, tmp_path):
    repository.plan([0] * 4)
    train = (BUCKET, "--batch.tokens_per_step=1024")
    assert cluster_of(repository, capsys, tmp_path, hardware="2x v5e:2x2", train=train).run() == "Completed"
    assert len(repository.starts(1)) == 1 and not repository.starts(2)
    (repository.folder / "starts.1").unlink()
    (tmp_path / "bin" / "python").unlink()
    repository.plan([0] * 8)
    assert cluster_of(repository, capsys, tmp_path, hardware="2x v5e:4x4", train=train).run() == "Completed"
    assert [len(repository.starts(process)) for process in range(1, 8)] == [1] * 7


@pytest.mark.parametrize("codes", [[1, "wait"], [2, 2], [3, 3], ["wait", 130]])
def test_a_code_that_must_not_be_repeated_fails_it(repository, capsys, tmp_path, codes):
    repository.plan(codes)
    cluster = cluster_of(repository, capsys, tmp_path)
    assert cluster.run().startswith("Failed: FailJobSet") and cluster.restarts == 0


def test_crashes_restart_it_a_bounded_number_of_times(repository, capsys, tmp_path):
    repository.plan(["kill", "wait"], ["wait", 134], [143, 143], [139, "wait"], [0, 0])
    cluster = cluster_of(repository, capsys, tmp_path, "--max_crashes=2")
    assert cluster.run().startswith("Failed: RestartJobSet") and (cluster.restarts, cluster.counted) == (3, 2)


def test_a_drained_node_restarts_all_and_counts_as_no_crash(repository, capsys, tmp_path):
    repository.plan(["wait", "wait"], [0, 0])
    cluster = cluster_of(repository, capsys, tmp_path, "--max_crashes=0")

    def drain(cluster):
        if len(repository.starts(0)) == len(repository.starts(1)) == 1 and not cluster.evicted and not cluster.restarts:
            cluster.evict((0, 1))

    assert cluster.run(when=drain) == "Completed" and (cluster.restarts, cluster.counted) == (1, 0)


def test_at_the_deadline_all_save_and_nothing_starts_again(repository, capsys, tmp_path):
    repository.plan(["wait", "wait"])
    cluster = cluster_of(repository, capsys, tmp_path, f"--hours={8 / 3600}", "--price=2")
    assert cluster.run().startswith("Failed: FailJobSet") and cluster.restarts == 0
    assert "saved by process" in str(cluster.said)
    assert cluster_of(repository, capsys, tmp_path, "--hours=1e-9").run().startswith("Failed: FailJobSet")
    assert len(repository.starts(0)) == 1


def test_a_pod_with_a_deadline_is_told_to_end_and_saves(repository, capsys, tmp_path):
    repository.plan(["wait", "wait"], [0, 0])
    cluster = cluster_of(repository, capsys, tmp_path, "--hours=1", "--max_crashes=0")

    def drain(cluster):
        if len(repository.starts(0)) == len(repository.starts(1)) == 1 and not cluster.restarts and not cluster.evicted:
            cluster.evict((0, 1))

    assert cluster.run(when=drain) == "Completed" and "saved by process 1" in str(cluster.said)


def test_secrets_are_in_a_secret_alone(repository, capsys, tmp_path, monkeypatch, schema):
    monkeypatch.setenv("GIVEN_KEY", "s3cret")
    monkeypatch.setenv("GIVEN_PROJECT", "mine")
    given = ["--secret", "GIVEN_KEY", "--env", "GIVEN_PROJECT"]
    commands, jobset = dry_run(capsys, "2x cpu:1", *given)
    schema.validate(jobset)
    assert "tiny-secrets: GIVEN_KEY, from this environment" in commands[2]
    assert "s3cret" not in json.dumps(jobset) + str(commands) and "mine" in json.dumps(jobset)
    log = stand_ins(tmp_path, monkeypatch)
    assert up("--image=REGISTRY/tokensum", *given) == 0
    secret = json.loads(Path(f"{log}.applied").read_text())
    assert secret["kind"] == "Secret" and "s3cret" not in log.read_text() + capsys.readouterr().out
    assert main(["k8s", "down", "--name=tiny"]) == 0 and "delete secret tiny-secrets" in log.read_text()
    repository.plan([0, 0])
    cluster = Cluster(jobset, repository.root, {}, environment_with(sys.executable, tmp_path / "bin"))
    cluster.secrets[secret["metadata"]["name"]] = secret["stringData"]
    assert cluster.run() == "Completed"
    start = repository.starts(1)[0]
    assert (start["GIVEN_KEY"], start["GIVEN_PROJECT"]) == ("s3cret", "mine")


def test_a_killed_pod_is_a_crash(repository, capsys, tmp_path):
    repository.plan(["wait", "wait"], [0, 0])
    cluster = cluster_of(repository, capsys, tmp_path, "--max_crashes=1")

    def kill(cluster):
        if len(repository.starts(0)) == len(repository.starts(1)) == 1 and not cluster.restarts:
            cluster.pods[0, 0].send_signal(signal.SIGKILL)

    assert cluster.run(when=kill) == "Completed" and cluster.counted == 1


KUBECTL = """#!/bin/sh
echo "$(basename $0) $*" >> {log}
case "$*" in
    *api-resources*) echo {served} ;;
    *"get jobset"*) echo {there} ;;
    *create*) cat > {log}.created ;;
    *apply*) cat > {log}.applied ;;
    *build*) cat > {log}.code ;;
esac
"""


def stand_ins(tmp_path, monkeypatch, served="jobsets.jobset.x-k8s.io", there="") -> Path:
    """A kubectl and a docker that note what they are asked."""
    folder, log = tmp_path / "bin", tmp_path / "log"
    folder.mkdir()
    log.write_text("")
    for name in ("kubectl", "docker"):
        (folder / name).write_text(KUBECTL.format(log=log, served=served, there=there))
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return log


def up(*options: str) -> int:
    return main(["k8s", "up", "--hardware=2x cpu:1", *options, "--", "--config=tiny.py", BUCKET])


def test_up_builds_pushes_and_creates_and_down_sees_that_nothing_is_left(repository, tmp_path, monkeypatch):
    log = stand_ins(tmp_path, monkeypatch)
    assert up("--image=REGISTRY/tokensum", "--namespace=mine") == 0
    commands = log.read_text().splitlines()
    assert [line.split()[:3] for line in commands[2:]] == [
        ["docker", "build", "--platform=linux/amd64"],
        ["docker", "push", commands[3].split()[2]],
        ["kubectl", "--namespace=mine", "create"],
    ]
    jobset = json.loads(Path(f"{log}.created").read_text())
    (replicated,) = jobset["spec"]["replicatedJobs"]
    image = replicated["template"]["spec"]["template"]["spec"]["containers"][0]["image"]
    assert re.fullmatch(r"REGISTRY/tokensum:[0-9a-f]{16}", image) and image in commands[3]
    assert b"train.py" in Path(f"{log}.code").read_bytes()
    assert main(["k8s", "down", "--name=tiny"]) == 0
    assert "delete jobset tiny" in log.read_text() and "get pods" in log.read_text().splitlines()[-1]


def test_nothing_is_built_where_it_cannot_start(repository, tmp_path, monkeypatch):
    log = stand_ins(tmp_path, monkeypatch, served="")
    with pytest.raises(UserError, match="no JobSet"):
        up("--image=REGISTRY/tokensum")
    assert "docker" not in log.read_text()


def test_one_that_is_there_is_left_alone(repository, tmp_path, monkeypatch):
    log = stand_ins(tmp_path, monkeypatch, there="jobset/tiny")
    with pytest.raises(UserError, match="already"):
        up("--image=REGISTRY/tokensum")
    assert "docker" not in log.read_text() and "create" not in log.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "--config=tiny.py", BUCKET], "--image is missing"),
        (["--image=x", "--", "--config=tiny.py"], "--claim or --checkpoint.folder"),
        (["--image=x", "--hardware=v9:4x4", "--", "--config=tiny.py", BUCKET], "v9 is unknown"),
        (["--image=x", "--secret", "NOT_SET", "--", "--config=tiny.py", BUCKET], "--secret NOT_SET: there is no"),
        (["--image=x", "--node_selector", "a", "--", "--config=tiny.py", BUCKET], "key=value"),
        (["--image=x", "--", "--config=tiny.py", BUCKET, "--mesh.fsdp=3"], "does not fit"),
    ],
)
def test_a_mistake_is_told_before_anything_is_made(repository, tmp_path, monkeypatch, words, message):
    log = stand_ins(tmp_path, monkeypatch)
    with pytest.raises(UserError, match=message):
        main(["k8s", "up", "--hardware=2x cpu:1", *words])
    assert log.read_text() == ""


def test_an_image_with_a_tag_is_taken_as_it_is():
    assert image_of("here:5000/a", "t") == ("here:5000/a:t", False)
    assert image_of("here:5000/a:1", "t") == ("here:5000/a:1", True)
    assert image_of("a@sha256:12", "t") == ("a@sha256:12", True)


def test_the_dockerfile_installs_what_pyproject_asks_for_alone():
    lines = (ROOT / "tools" / "launch" / "Dockerfile").read_text().splitlines()
    before_code = lines[: lines.index("COPY . .")]  # a changed file of code leaves what is installed in the cache
    assert any(line.startswith("RUN pip install") and ".[${EXTRA}]" in line for line in before_code)
