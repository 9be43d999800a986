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


def dry_run(capsys, hardware: str, *options: str, train: tuple[str, ...] = (BUCKET,)) -> tuple[list[str], dict]:
    """Return the commands that would run, and the JobSet."""
    words = [f"--hardware={hardware}", "--image=REGISTRY/tokensum", *options]
    assert main(["k8s", "up", "--dry_run", *words, "--", "--config=tiny.py", *train]) == 0
    commands, _, text = capsys.readouterr().out.partition(" <<'END'\n")
    return [line for line in commands.splitlines() if line[0] != "#"], yaml.safe_load(text.removesuffix("END\n"))


def job_of(jobset: dict) -> tuple[int, dict, dict]:
    """Return the number of a JobSet's Jobs, the Job, and its pods."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    return replicated["replicas"], job, job["template"]["spec"]


@pytest.mark.parametrize(
    "hardware", ["v5e:2x2", "v5e:4x4", "2x v5e:4x4", "v5p:2x2x2", "2x h200:8", "h100:4", "2x cpu:1"]
)
def test_a_jobset_matches_its_schema(repository, capsys, schema, hardware):
    options = ["--claim=disk", "--data_claim=corpus", "--queue=mine", "--service_account=writer"]
    train = (BUCKET, "--data.source=/data/mine", "--name=\u00fc: # \U0001f600")
    words = [*options, "--name=tiny", "--node_selector", "pool=a", "b=c"]
    commands, jobset = dry_run(capsys, hardware, *words, train=train)
    schema.validate(jobset)
    build, push, create = commands
    assert build.startswith("docker build --platform=linux/amd64 --build-arg=EXTRA=")
    assert push.startswith("docker push REGISTRY/") and create == "kubectl --namespace=default create --filename=-"
    _, _, pod = job_of(jobset)
    (container,) = pod["containers"]
    assert pod["serviceAccountName"] == "writer" and pod["nodeSelector"]["b"] == "c"
    assert ("fsGroup" in pod["securityContext"]) == ("v5" not in hardware)  # the user who may write to a claim
    assert container["args"] == ["--config=tiny.py", *train, "--run_dir=/runs/tiny"]
    claim = {"claimName": "corpus", "readOnly": True}
    assert {"name": "data", "persistentVolumeClaim": claim} in pod["volumes"]
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    # Names become hostnames, which have at most 63 letters.
    assert len(f"{jobset['metadata']['name']}-workers-999-9999") <= 63
    with pytest.raises(UserError, match=r"--data\.source=/data/mine is on this machine"):
        dry_run(capsys, hardware, "--name=tiny", train=train)


def test_the_schema_refuses_unknown_fields(repository, capsys, schema):
    _, jobset = dry_run(capsys, "v5e:4x4")
    schema.validate(jobset)
    job_of(jobset)[2]["containers"][0]["enviroment"] = []
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(jobset)


def test_slices_and_nodes_are_requested_by_gke_s_names(repository, capsys):
    _, jobset = dry_run(capsys, "2x v5e:4x4")
    jobs, job, pod = job_of(jobset)
    assert (jobs, job["completions"]) == (2, 4) and pod["hostNetwork"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": "4"}
    assert jobset["metadata"]["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"].endswith("gke-nodepool")
    jobs, job, pod = job_of(dry_run(capsys, "4x h200:8")[1])
    assert (jobs, job["completions"]) == (1, 4) and not pod["hostNetwork"]
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h200-141gb"}
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def pods_of(repository, jobset: dict, tmp_path, stop: bool = False, **secrets: dict) -> tuple[set[int], str]:
    """Return the exit codes of the pods, and their output. With `stop`, send SIGTERM once two have started."""
    pods = start(jobset, repository.root, tmp_path / "python", secrets)
    if stop:
        wait_for(repository.both_have_started)
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


@pytest.mark.parametrize(
    ("codes", "action"),
    [
        *(({(0, 0): code}, "FailJobSet") for code in (1, 2, 3, 130)),
        ({(0, 0): 42, (1, 0): 1}, "FailJobSet"),  # of two slices: a code that must not be retried wins
        *(({(0, 0): code}, "RestartJobSetAndIgnoreMaxRestarts") for code in (42, 143)),
        ({(0, 0): 0, (1, 0): 42}, "RestartJobSetAndIgnoreMaxRestarts"),
        *(({(0, 1): code}, "RestartJobSet") for code in (134, 137, 139)),
        ({(0, 0): 0, (1, 0): 0}, ""),
    ],
)
def test_exit_codes_decide_what_follows(repository, capsys, codes, action):
    _, jobset = dry_run(capsys, "2x v5e:2x2", "--max_crashes=2", train=(BUCKET, "--batch.tokens_per_step=1024"))
    assert action_after(jobset, codes) == action and jobset["spec"]["failurePolicy"]["maxRestarts"] == 2
    if action == "RestartJobSet":  # the node was drained, which is no crash
        assert action_after(jobset, codes, evicted=next(iter(codes))) == "RestartJobSetAndIgnoreMaxRestarts"


@pytest.mark.parametrize("options", [[], ["--hours=1"]])
def test_a_pod_that_is_drained_saves(repository, capsys, tmp_path, options):
    repository.plan(["wait", "wait"])
    codes, output = pods_of(repository, dry_run(capsys, "2x cpu:1", *options)[1], tmp_path, stop=True)
    assert codes == {143} and output.count("saved by process") == 2


def test_at_the_deadline_all_save_and_nothing_starts_again(repository, capsys, tmp_path):
    repository.plan(["wait", "wait"])
    _, jobset = dry_run(capsys, "2x cpu:1", f"--hours={8 / 3600}", "--price=2")
    codes, output = pods_of(repository, jobset, tmp_path)
    assert codes == {LATE} and output.count("saved by process") == 2
    assert action_after(jobset, {(0, 0): LATE}) == "FailJobSet"
    assert pods_of(repository, jobset, tmp_path)[0] == {LATE} and len(repository.starts(0)) == 1


def test_secrets_are_in_a_secret_alone(repository, capsys, tmp_path, monkeypatch, schema):
    monkeypatch.setenv("GIVEN_KEY", "s3cret")
    monkeypatch.setenv("GIVEN_PROJECT", "mine")
    given = ["--secret", "GIVEN_KEY", "--env", "GIVEN_PROJECT"]
    commands, jobset = dry_run(capsys, "2x cpu:1", *given)
    schema.validate(jobset)
    assert "tiny-secrets: GIVEN_KEY, from this environment" in commands[2]
    assert "s3cret" not in json.dumps(jobset) + str(commands) and "mine" in json.dumps(jobset)
    log = stand_ins(tmp_path, monkeypatch)
    assert up(*given) == 0
    secret = json.loads(Path(f"{log}.applied").read_text())
    assert secret["kind"] == "Secret" and "s3cret" not in log.read_text() + capsys.readouterr().out
    assert (
        main(["k8s", "down", "--name=tiny"]) == 0 and "delete --ignore-not-found secret tiny-secrets" in log.read_text()
    )
    repository.plan([0, 0])
    secrets = {secret["metadata"]["name"]: secret["stringData"]}
    assert pods_of(repository, jobset, tmp_path, **secrets)[0] == {0}
    start = repository.starts(1)[0]
    assert (start["GIVEN_KEY"], start["GIVEN_PROJECT"]) == ("s3cret", "mine")


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


def up(*options: str) -> int:
    return main(
        ["k8s", "up", "--hardware=2x cpu:1", "--image=REGISTRY/tokensum", *options, "--", "--config=tiny.py", BUCKET]
    )


def test_up_builds_pushes_and_creates_and_down_waits_until_nothing_is_left(repository, tmp_path, monkeypatch):
    log = stand_ins(tmp_path, monkeypatch)
    assert up("--namespace=mine") == 0
    commands = log.read_text().splitlines()
    assert [line.split()[:3] for line in commands[1:]] == [
        ["docker", "build", "--platform=linux/amd64"],
        ["docker", "push", commands[2].split()[2]],
        ["kubectl", "--namespace=mine", "create"],
    ]
    image = job_of(yaml.safe_load(Path(f"{log}.created").read_text()))[2]["containers"][0]["image"]
    assert re.fullmatch(r"REGISTRY/tokensum:[0-9a-f]{16}", image) and image in commands[2]
    assert b"train.py" in Path(f"{log}.code").read_bytes()
    assert main(["k8s", "down", "--name=tiny"]) == 0
    assert "delete --ignore-not-found jobset tiny --cascade=foreground --wait" in log.read_text()


@pytest.mark.parametrize("refusal", ["no matches for kind JobSet", "jobsets tiny already exists"])
def test_nothing_is_built_if_it_cannot_start(repository, tmp_path, monkeypatch, refusal):
    log = stand_ins(tmp_path, monkeypatch, refusal)
    with pytest.raises(UserError, match=refusal):
        up()
    assert len(log.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "--config=tiny.py", BUCKET], "--image is missing"),
        (["--image=x", "--", "--config=tiny.py"], "--claim or --checkpoint.folder"),
        (["--image=x", "--node_selector", "a", "--", "--config=tiny.py", BUCKET], "key=value"),
    ],
)
def test_a_user_error_is_reported_before_anything_is_created(repository, tmp_path, monkeypatch, words, message):
    log = stand_ins(tmp_path, monkeypatch)
    with pytest.raises(UserError, match=message):
        main(["k8s", "up", "--hardware=2x cpu:1", *words])
    assert log.read_text() == ""


def test_an_image_with_a_tag_is_used_unchanged():
    assert image_of("here:5000/a", "t") == ("here:5000/a:t", False)
    assert image_of("here:5000/a:1", "t") == ("here:5000/a:1", True)
    assert image_of("a@sha256:12", "t") == ("a@sha256:12", True)
