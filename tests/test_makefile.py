"""Test which Python and which CUDA `make setup` takes and its errors, and what `make chat` runs. Nothing is installed:
the Pythons are scripts that print a version and log their arguments."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STUB = """#!/bin/sh
case "$*" in
  *"print(sys.version_info"*) echo "({0})" ;;
  *sys.exit*) [ "{1}" = suits ] || {{ echo "it is {0}" >&2; exit 1; }} ;;
  "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo "venv {0}" >> log ;;
  "-m pip --version") ;;
  "-m pip"*) echo "pip {0}" >> log; [ "{2}" = installs ] ;;
  *.py*) echo "$*" >> log ;;
esac
"""
SHIM = """#!/bin/sh
echo "pyenv: $(basename $0): command not found" >&2
echo "The command exists in these Python versions:" >&2
exit 127
"""


@pytest.fixture
def setup(tmp_path):
    """Return a function that runs make in a copy, with only the shell's tools and the given Pythons on PATH."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("make", "sh", "awk", "head", "cat", "rm", "mkdir", "cp", "touch", "basename", "test"):
        (tools / tool).symlink_to(shutil.which(tool))  # pyright: ignore[reportArgumentType]
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)

    def run(pythons: dict[str, str], *words: str, goal: str = "setup") -> tuple[int, str, list[str]]:
        """Return make's exit code, its errors, and the logged calls of the Pythons."""
        for name, text in pythons.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        (tmp_path / "log").write_text("")
        environment = {"PATH": str(tools), "HOME": os.environ.get("HOME", "/")}
        done = subprocess.run(
            ["make", goal, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr, (tmp_path / "log").read_text().split("\n")[:-1]

    return run


def stub(version: str, suits: str = "suits", installs: str = "installs") -> str:
    return STUB.format(version, suits, installs)


def test_the_newest_python_that_runs_is_taken(setup):
    pythons = {"python3": stub("3.8", "no"), "python3.11": stub("3.11"), "python3.12": stub("3.12"), "python3.13": SHIM}
    assert setup(pythons) == (0, "", ["venv 3.12", "pip 3.12"])
    assert setup({}) == (0, "", [])  # nothing is left to do


def test_an_unsuitable_python_is_named_with_the_reason(setup, tmp_path):
    code, errors, log = setup({"python3.9": SHIM, "python3.12": stub("3.12")}, "PYTHON=python3.9")
    assert code == 2 and log == [] and not (tmp_path / ".venv").exists()
    reason = "python3.9: pyenv: python3.9: command not found"
    assert f"error: no Python 3.11 or later runs here ({reason}); make setup PYTHON=... names one" in errors


def test_an_environment_of_an_old_or_other_python_is_recreated(setup, tmp_path):
    failing = {"python3.11": stub("3.11", installs="no")}
    assert setup(failing)[0] != 0
    assert setup({"python3.12": stub("3.12")}, "PYTHON=python3.12") == (0, "", ["venv 3.12", "pip 3.12"])
    (tmp_path / ".venv/bin/python").write_text(stub("3.10", "no"))
    for stamp in (tmp_path / ".venv").glob("installed-*"):
        stamp.unlink()
    assert setup({}) == (0, "", ["venv 3.12", "pip 3.12"])


@pytest.mark.parametrize(
    ("gpu", "words", "stamp", "message"),
    [
        ("580.65.06, 7.5", (), "dev-cuda", ""),
        ("580.65.06, 7.0", (), "dev-cuda12", ""),  # a V100
        ("535.183.01, 8.0", ("EXTRA=",), "dev", ""),
        ("535.183.01, 8.0", ("EXTRA=gcs,cuda",), None, "take EXTRA=cuda12 here"),
        ("470.256.02, 8.0", (), "dev", "no GPU with driver 525 or later: this set-up is for the CPU"),
    ],
)
def test_the_driver_and_the_gpu_choose_the_cuda(setup, tmp_path, gpu, words, stamp, message):
    pythons = {"python3.12": stub("3.12"), "nvidia-smi": f"#!/bin/sh\necho '{gpu}'\n"}
    code, errors, _ = setup(pythons, *words)
    assert (code == 0, bool(errors)) == (stamp is not None, bool(message)) and message in errors
    assert [path.name for path in tmp_path.glob(".venv/installed-*")] == [f"installed-{stamp}"] * (stamp is not None)


def test_an_environment_gets_no_second_cuda(setup, tmp_path):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "installed-dev-cuda-gcs").touch()
    code, errors, _ = setup({"python3.12": stub("3.12")}, "EXTRA=gcs,cuda12")
    assert code == 2 and ".venv has another CUDA" in errors and "rm -r .venv" in errors


def test_uv_makes_it_with_the_same_python(setup, tmp_path):
    uv = '#!/bin/sh\necho "uv $*" >> log\n[ $1 = pip ] || mkdir -p .venv/bin\n'
    code, errors, log = setup({"uv": uv, "python3.11": stub("3.11")})
    assert (code, errors) == (0, "")
    assert log[0] == f"uv venv --quiet --python {tmp_path}/tools/python3.11 .venv" and log[1].startswith("uv pip")


def test_chat_trains_the_small_run_unless_it_is_complete_and_fine_tunes_it(setup, tmp_path):
    tune = ["train.py --config=configs/chat.py --init_from=runs/small", "chat.py --run_dir=runs/chat"]
    log = setup({"python3.12": stub("3.12")}, goal="chat")[2]
    assert log == ["venv 3.12", "pip 3.12", "train.py --config=configs/small.py", *tune]
    (tmp_path / "runs/small").mkdir(parents=True)
    (tmp_path / "runs/small/summary.json").write_text("{}")
    assert setup({}, "ARGS=--steps=9", goal="chat")[2] == [f"{tune[0]} --steps=9", tune[1]]
    for name, folder in ("--name=mine", "runs/mine"), ("--run_dir=here", "here"):
        log = setup({}, f"ARGS={name} --steps=9", goal="chat")[2]
        assert log == [f"{tune[0]} {name} --steps=9", f"chat.py --run_dir={folder}"]
