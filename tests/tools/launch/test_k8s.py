"""Test `python -m tools.launch k8s` without a cluster: its JobSets match JobSet's schema, and end by their exit codes
in fake_kubernetes.py."""

import gzip
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from configs.schema import UserError
from tests.tools.launch.fake_kubernetes import action_after, start
from tests.tools.launch.stand_in import BUCKET, put_on_path, wait_for
from tools.launch.__main__ import main
from tools.launch.k8s import LATE, image_of

TPU_LABELS = {"tpu-accelerator": "tpu-v5-lite-podslice", "tpu-topology": "4x4"}


@pytest.fixture(scope="module")
def schema():
    """Return JobSet's schema, which rejects unknown fields, as kubectl does."""
    text = gzip.decompress((Path(__file__).parent / "jobset/jobset.x-k8s.io_jobsets.yaml.gz").read_bytes())
    (version,) = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
    definition = version["schema"]["openAPIV3Schema"]
    definition["properties"]["metadata"] = {"type": "object"}  # the cluster's own fields

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

    strict(definition)
    return jsonschema.Draft202012Validator(definition)


def up(hardware: str, *options: str, train: tuple[str, ...] = (BUCKET,)) -> int:
    words = [f"--hardware={hardware}", "--image=REGISTRY/tokensum", *options]
    return main(["k8s", "up", *words, "--", "--config=tiny.py", *train])


def dry_run(capsys, hardware: str, *options: str, train: tuple[str, ...] = (BUCKET,)) -> tuple[list[str], dict]:
    """Return the commands that would run, and the JobSet."""
    assert up(hardware, "--dry_run", *options, train=train) == 0
    commands, _, text = capsys.readouterr().out.partition(" <<'END'\n")
    return [line for line in commands.splitlines() if line[0] != "#"], yaml.safe_load(text.removesuffix("END\n"))


def job_of(jobset: dict) -> tuple[int, dict, dict]:
    """Return the number of a JobSet's Jobs, the Job, and its pods."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    return replicated["replicas"], job, job["template"]["spec"]


@pytest.mark.parametrize(
    ("hardware", "jobs", "pods", "labels", "devices"),
    [
        (
            "2x v5e:4x4",
            2,
            4,
            {"tpu-accelerator": "tpu-v5-lite-podslice", "tpu-topology": "4x4"},
            {"google.com/tpu": "4"},
        ),
        ("4x h200:8", 1, 4, {"accelerator": "nvidia-h200-141gb"}, {"nvidia.com/gpu": "8"}),
        ("2x cpu:1", 1, 2, {}, {}),
    ],
)
def test_a_jobset_matches_its_schema_and_asks_for_gke_s_nodes(
    repository, capsys, schema, hardware, jobs, pods, labels, devices
):
    options = ["--claim=disk", "--data_claim=corpus", "--queue=mine", "--service_account=writer"]
    train = (BUCKET, "--data.source=/data/mine", "--name=\u00fc: # \U0001f600")
    words = [*options, "--name=tiny", "--node_selector", "pool=a", "b=c"]
    commands, jobset = dry_run(capsys, hardware, *words, train=train)
    schema.validate(jobset)
    build, push, create = commands
    assert build.startswith("docker build --platform=linux/amd64 --build-arg=EXTRA=")
    assert push.startswith("docker push REGISTRY/") and create == "kubectl --namespace=default create --filename=-"
    replicas, job, pod = job_of(jobset)
    (container,) = pod["containers"]
    labels = {f"cloud.google.com/gke-{name}": value for name, value in labels.items()}
    assert (replicas, job["completions"]) == (jobs, pods) and pod["nodeSelector"] == labels | {"pool": "a", "b": "c"}
    assert container["resources"]["limits"] == devices and pod["hostNetwork"] == ("v5" in hardware)
    assert pod["serviceAccountName"] == "writer"
    assert ("fsGroup" in pod["securityContext"]) == ("v5" not in hardware)  # the user who may write to a claim
    assert ("alpha.jobset.sigs.k8s.io/exclusive-topology" in str(jobset["metadata"])) == ("v5" in hardware)
    assert container["args"] == ["--config=tiny.py", *train, "--run_dir=/runs/tiny"]
    claim = {"claimName": "corpus", "readOnly": True}
    assert {"name": "data", "persistentVolumeClaim": claim} in pod["volumes"]
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    # Names become hostnames, which have at most 63 letters.
    assert len(f"{jobset['metadata']['name']}-workers-999-9999") <= 63
    with pytest.raises(UserError, match=r"--data\.source=/data/mine is on this machine"):
        dry_run(capsys, hardware, "--name=tiny", train=train)
    container["enviroment"] = []
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(jobset)


def pods_of(repository, jobset: dict, tmp_path, stop: bool = False, **secrets: dict) -> tuple[set[int], str]:
    """Return the exit codes of the pods, and their output. With `stop`, send SIGTERM once two have started."""
    pods = start(jobset, repository.root, tmp_path / "python", secrets)
    if stop:
        wait_for(lambda: repository.counts() == [1, 1])
        for pod in pods.values():
            pod.terminate()
    output = "".join(pod.communicate(timeout=60)[0].decode() for pod in pods.values())
    return {pod.returncode for pod in pods.values()}, output


def test_processes_of_two_slices_are_numbered_one_after_the_other(repository, capsys, tmp_path):
    repository.plan([0] * 8)
    train = (BUCKET, "--batch.tokens_per_step=1024")
    assert pods_of(repository, dry_run(capsys, "2x v5e:4x4", train=train)[1], tmp_path)[0] == {0}
    (starts,) = zip(*(repository.starts(process) for process in range(8)))
    assert {start["JAX_NUM_PROCESSES"] for start in starts} == {"8"}
    assert len({start["JAX_COORDINATOR_ADDRESS"] for start in starts}) == 1
    assert starts[7]["arguments"] == ["--config=tiny.py", *train]


def test_exit_codes_decide_what_follows(repository, capsys):
    _, jobset = dry_run(capsys, "2x v5e:2x2", "--max_crashes=2", train=(BUCKET, "--batch.tokens_per_step=1024"))
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 2
    for codes, action in (
        *(({(0, 0): code}, "FailJobSet") for code in (1, 2, 3, 130, LATE)),
        ({(0, 0): 42, (1, 0): 1}, "FailJobSet"),  # of two slices: a code that must not be retried wins
        *(({(0, 0): code}, "RestartJobSetAndIgnoreMaxRestarts") for code in (42, 143)),
        ({(0, 0): 0, (1, 0): 42}, "RestartJobSetAndIgnoreMaxRestarts"),
        *(({(0, 1): code}, "RestartJobSet") for code in (134, 137, 139)),
        ({(0, 0): 0, (1, 0): 0}, ""),
    ):
        assert action_after(jobset, codes) == action
        if action == "RestartJobSet":  # the node was drained, which is no crash
            assert action_after(jobset, codes, evicted=next(iter(codes))) == "RestartJobSetAndIgnoreMaxRestarts"


def test_a_pod_that_is_drained_saves_and_at_the_deadline_all_save_and_nothing_starts_again(
    repository, capsys, tmp_path
):
    repository.plan(["wait", "wait"])
    codes, output = pods_of(repository, dry_run(capsys, "2x cpu:1", "--hours=1")[1], tmp_path, stop=True)
    assert codes == {143} and output.count("saved by process") == 2
    _, jobset = dry_run(capsys, "2x cpu:1", f"--hours={8 / 3600}", "--price=2")
    codes, output = pods_of(repository, jobset, tmp_path)
    assert codes == {LATE} and output.count("saved by process") == 2
    assert pods_of(repository, jobset, tmp_path)[0] == {LATE} and len(repository.starts(0)) == 2


def stand_ins(tmp_path, monkeypatch, refusal: str = "") -> Path:
    """Install a kubectl and a docker that log their arguments. kubectl fails with `refusal`."""
    log = tmp_path / "log"
    log.write_text("")
    refuse = f"echo {refusal} >&2; exit 1" if refusal else ":"
    script = f"""echo "$(basename $0) $*" >> {log}
    case "$*" in
        *dry-run=server*) {refuse} ;;
        *create*) cat > {log}.created ;;
        *apply*) cat > {log}.applied ;;
        *build*) cat > {log}.code ;;
    esac"""
    put_on_path(tmp_path / "bin", {"kubectl": script, "docker": script}, monkeypatch)
    return log


def test_up_builds_pushes_and_creates_secrets_are_in_a_secret_alone_and_down_leaves_nothing(
    repository, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("GIVEN_KEY", "s3cret")
    monkeypatch.setenv("GIVEN_PROJECT", "mine")
    log, given = stand_ins(tmp_path, monkeypatch), ["--secret", "GIVEN_KEY", "--env", "GIVEN_PROJECT"]
    assert up("2x cpu:1", "--namespace=mine", "--dry_run", *given) == 0 and not log.read_text()
    shown = capsys.readouterr().out
    assert "tiny-secrets: GIVEN_KEY, from this environment" in shown
    assert up("2x cpu:1", "--namespace=mine", *given) == 0
    commands = log.read_text().splitlines()
    assert [line.split()[:3] for line in commands[1:]] == [
        ["docker", "build", "--platform=linux/amd64"],
        ["docker", "push", commands[2].split()[2]],
        ["kubectl", "--namespace=mine", "apply"],
        ["kubectl", "--namespace=mine", "create"],
    ]
    jobset = yaml.safe_load(Path(f"{log}.created").read_text())
    image = job_of(jobset)[2]["containers"][0]["image"]
    assert re.fullmatch(r"REGISTRY/tokensum:[0-9a-f]{16}", image) and image in commands[2]
    assert b"train.py" in Path(f"{log}.code").read_bytes()
    secret = json.loads(Path(f"{log}.applied").read_text())
    shown += capsys.readouterr().out + log.read_text() + json.dumps(jobset)
    assert secret["kind"] == "Secret" and "s3cret" not in shown and "mine" in json.dumps(jobset)
    assert main(["k8s", "down", "--name=tiny"]) == 0
    assert "delete --ignore-not-found jobset tiny --cascade=foreground --wait" in log.read_text()
    assert "delete --ignore-not-found secret tiny-secrets" in log.read_text()
    repository.plan([0, 0])
    secrets = {secret["metadata"]["name"]: secret["stringData"]}
    assert pods_of(repository, jobset, tmp_path, **secrets)[0] == {0}
    start = repository.starts(1)[0]
    assert (start["GIVEN_KEY"], start["GIVEN_PROJECT"]) == ("s3cret", "mine")


def test_nothing_is_built_if_it_cannot_start(repository, tmp_path, monkeypatch):
    log = stand_ins(tmp_path, monkeypatch, "jobsets tiny already exists")
    with pytest.raises(UserError, match="jobsets tiny already exists"):
        up("2x cpu:1")
    assert len(log.read_text().splitlines()) == 1


def test_a_user_error_is_reported_before_anything_is_created(repository, tmp_path, monkeypatch):
    log = stand_ins(tmp_path, monkeypatch)
    for words, message in (
        (["--", "--config=tiny.py", BUCKET], "--image is missing"),
        (["--image=x", "--", "--config=tiny.py"], "--claim or --checkpoint.folder"),
        (["--image=x", "--node_selector", "a", "--", "--config=tiny.py", BUCKET], "key=value"),
    ):
        with pytest.raises(UserError, match=message):
            main(["k8s", "up", "--hardware=2x cpu:1", *words])
    assert log.read_text() == ""


def test_an_image_with_a_tag_is_used_unchanged():
    assert image_of("here:5000/a", "t") == ("here:5000/a:t", False)
    assert image_of("here:5000/a:1", "t") == ("here:5000/a:1", True)
    assert image_of("a@sha256:12", "t") == ("a@sha256:12", True)
