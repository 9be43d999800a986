"""Test the image without containers: what `make image` and the Dockerfile run, in a new virtual environment."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TINY = "--model.depth=1 --model.width=64 --model.head_dim=16 --model.vocab_size=300 --model.backout=False"
TINY += " --batch.sequence_length=32 --batch.tokens_per_step=256 --eval.tokens=2000 --eval.every_steps=10"
DOCKERFILE = (ROOT / "tools" / "launch" / "Dockerfile").read_text()


def test_changed_code_keeps_the_installed_packages():
    """Each line is run again only if a file that was copied before it has changed."""
    installs, code = DOCKERFILE.split("pip install", 1)
    assert re.findall("^COPY .*", installs, re.MULTILINE) == ["COPY pyproject.toml ."]
    assert "\nCOPY --chown=trainer . .\n" in code and DOCKERFILE.endswith("\nUSER 1000\n")


def test_the_image_has_no_file_that_git_ignores():
    ignored, left_out = (
        {line.removeprefix("**").strip("/") for line in (ROOT / name).read_text().splitlines() if line[0] != "#"}
        for name in (".gitignore", ".dockerignore")
    )
    assert left_out == ignored | {".git"}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it fetches 300 MB
def test_it_installs_from_wheels_without_an_index_and_trains(tmp_path):
    """Only the first command has pip's index and settings. The rest runs on the installed packages alone."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())

    def run(line: str, folder: Path = tmp_path / "code", **environment: str):
        path = {"PATH": f"{tmp_path}/venv/bin{os.pathsep}{os.environ['PATH']}", "EXTRA": "gcs"}
        line = line.replace("/tokensum", f"{tmp_path}/code").replace("/wheels", f"{tmp_path}/wheels")
        subprocess.run(["bash", "-ec", line], cwd=folder, env=os.environ | path | environment, check=True)

    make = subprocess.run(["make", "-n", "image", "EXTRA=gcs"], cwd=ROOT, capture_output=True, text=True, check=True)
    run(*re.findall("pip download .*", make.stdout))
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_NO_COMPILE": "1"}
    run(*re.findall("pip install .*", DOCKERFILE), **offline)
    words = f"--run_dir={tmp_path}/run --data.source={ROOT}/tests --steps=10 {TINY}"
    run(f"python train.py --config=configs/small.py {words}", ROOT, TOKENSUM_CACHE=str(tmp_path / "cache"))
    assert (tmp_path / "run" / "summary.json").exists()
