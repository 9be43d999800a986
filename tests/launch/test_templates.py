"""Test that scripts are sound, and that templates match the definitions of their schedulers and loop.sh's codes."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.launch.restarts import OVER

ROOT = Path(__file__).parents[2]
LAUNCH, SCHEMAS = ROOT / "launch", Path(__file__).parent / "schemas"
SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "train.sbatch"]
JOBSET = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
SKY = yaml.safe_load((LAUNCH / "sky.yaml").read_text())


def shellcheck(*words: str | Path, text: str | None = None) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed: the scripts of launch/ were not checked")
    done = subprocess.run(["shellcheck", *words], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci/run"], ids=lambda path: path.name)
def test_shellcheck_accepts(script):
    shellcheck(script)
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("part", ["setup", "run"])
def test_shellcheck_accepts_sky(part):
    shellcheck("--shell=bash", "--exclude=SC2155", "-", text=SKY[part])


def test_shellcheck_accepts_the_hosts_script(tmp_path):
    outer = (LAUNCH / "tpu_vm.sh").read_text().split("<< 'END_OF_HOST'\n")[1].split("END_OF_RUN\n")[0]
    variables = "CODE=x LOGS=x DEADLINE=0 LIMIT=0 SECRETS=x DATA=x TRAIN=() DELETE=()\n"
    shellcheck("--shell=bash", "-", text=variables + outer)


def strict(part: object) -> None:
    """Refuse unknown fields, as kubectl does."""
    if isinstance(part, dict):
        if "properties" in part and "x-kubernetes-preserve-unknown-fields" not in part:
            part.setdefault("additionalProperties", False)
        if part.pop("x-kubernetes-int-or-string", None):
            part.pop("anyOf", None)
            part["type"] = ["integer", "string"]
    for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else []:
        strict(each)


def test_the_jobset_matches_jobset_s_definition():
    text = gzip.decompress((SCHEMAS / "jobset.x-k8s.io_jobsets.yaml.gz").read_bytes())
    (version,) = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
    definition = version["schema"]["openAPIV3Schema"]
    definition["properties"]["metadata"] = {"type": "object"}  # the cluster's own fields
    strict(definition)
    schema = jsonschema.Draft202012Validator(definition)
    schema.validate(JOBSET)
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(JOBSET | {"spec": JOBSET["spec"] | {"enviroment": []}})


def test_the_jobset_ends_with_the_codes_that_end_the_loop_and_its_numbers_agree():
    (workers,) = JOBSET["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    fails, ignores = job["podFailurePolicy"]["rules"]
    assert fails["action"] == "FailJob" and {0, *fails["onExitCodes"]["values"]} == {*OVER, 124}
    assert ignores["action"] == "Ignore" and ignores["onPodConditions"][0]["type"] == "DisruptionTarget"
    (container,) = job["template"]["spec"]["containers"]
    given = {each["name"]: each.get("value") for each in container["env"]}
    assert given["HOSTS"] == str(job["completions"]) == str(job["parallelism"])
    assert given["JAX_NUM_PROCESSES"] == str(workers["replicas"] * job["completions"])
    name = JOBSET["metadata"]["name"]
    assert given["JAX_COORDINATOR_ADDRESS"] == f"{name}-{workers['name']}-0-0.{name}:8476"


def test_the_task_matches_skypilot_s_definition_and_is_recovered_after_143_alone():
    schemas = json.loads(gzip.decompress((SCHEMAS / "skypilot.json.gz").read_bytes()))
    jsonschema.Draft202012Validator(schemas["task"]).validate(SKY)
    jsonschema.Draft202012Validator(schemas["resources"]).validate(SKY["resources"])
    assert SKY["resources"]["job_recovery"]["recover_on_exit_codes"] == [143]


@pytest.mark.parametrize("path", [*LAUNCH.iterdir(), ROOT / "docs/pods.md"], ids=lambda path: path.name)
def test_no_secret_is_applied_or_written(path):
    assert not re.search(r"kind: Secret|stringData|kubectl apply (?!--server-side)", path.read_text())


def test_pods_and_hosts_get_the_rights_that_a_run_needs():
    """Root opens a TPU's devices. The hosts' network would give pods the rights of their nodes."""
    pod = JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys() and pod["serviceAccountName"] == "tokensum"
    commands = (ROOT / "docs/pods.md").read_text().replace("\\\n", " ")
    assert re.findall(r"gcloud projects add-iam.*?--role=(\S+)", commands) == ["roles/tpu.admin"]  # no smaller binding
    assert not re.search(r"scopes=cloud-platform|storage\.(objectA|a)dmin", commands)
    assert re.findall(r"storage rm --recursive (\S+)", commands) == ["gs://BUCKET/d12"]  # the text is beside the run


@pytest.mark.parametrize("template", ["sky.yaml", "tpu_vm.sh"])
def test_uv_is_installed_where_the_system_s_python_is_managed(template, tmp_path):
    """Ubuntu 24.04 and Debian 12 refuse pip outside of an environment (PEP 668)."""
    if not [*Path("/usr/lib").glob("python3*/EXTERNALLY-MANAGED")]:
        pytest.skip("the system's Python is not externally managed here")
    (line,) = re.findall(r".*python3 -m pip install .* uv\b", (LAUNCH / template).read_text())
    (tmp_path / "python3").symlink_to("/usr/bin/python3")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "PIP_NO_INDEX": "1"}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
    assert "No matching distribution found for uv" in done.stderr  # it has come as far as to look for it


def test_the_image_has_what_is_committed_and_nothing_else():
    make = subprocess.run(["make", "-n", "image"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^git archive HEAD \| docker build (.*\\\n)*.* --file=launch/Dockerfile -$", make, re.MULTILINE)
    assert (ROOT / ".dockerignore").read_text().splitlines()[-1] == "*"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it fetches 300 MB
def test_the_image_installs_from_wheels_without_an_index(tmp_path):
    """Run the commands of `make image` and the Dockerfile in a new environment. Only the first has an index. pip finds
    every wheel and builds what it must, but does not unpack them."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    (tmp_path / "code").mkdir()
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / "code" / name).write_bytes((ROOT / name).read_bytes())

    def run(line: str, **environment: str) -> None:
        path = {"PATH": f"{tmp_path}/venv/bin{os.pathsep}{os.environ['PATH']}", "EXTRA": "gcs"}
        here = line.replace("/tokensum", f"{tmp_path}/code").replace("/wheels", f"{tmp_path}/wheels")
        subprocess.run(["bash", "-ec", here], cwd=tmp_path / "code", env=os.environ | path | environment, check=True)

    make = subprocess.run(["make", "-n", "image", "EXTRA=gcs"], cwd=ROOT, capture_output=True, text=True, check=True)
    run(*re.findall("pip download .*", make.stdout))
    install = re.findall("pip install .*", (LAUNCH / "Dockerfile").read_text())
    run(f"{install[0]} --dry-run", PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="")
