"""Test that notebooks/quickstart.ipynb runs from top to bottom, stops at a failure, and is stored without outputs."""

import glob
import json
import re
import subprocess
from copy import deepcopy
from fnmatch import fnmatch
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell

from options.command_line import parse
from tests.repository import ROOT, copy_checkout
from training.dtype import compute_dtype

TEXT = (ROOT / "notebooks/quickstart.ipynb").read_text()
NOTEBOOK = nbformat.reads(TEXT, as_version=4)
SOURCES = {cell.id: cell.source for cell in NOTEBOOK.cells}
TINY = """
--data.source=configs --model.depth=1 --model.width=32 --model.head_dim=8 --model.vocab_size=512
--batch.sequence_length=64 --batch.tokens_per_step=512 --eval.tokens=1024 --steps=4
"""


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """Return a copy of the checkout, set up with this Python. Nothing can be installed."""
    monkeypatch.chdir(ROOT)
    copy_checkout(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_OFFLINE", "1")
    return tmp_path


def executed(folder: Path, last: str, **parameters: object) -> dict[str, list]:
    """Return the outputs of each code cell, run in `folder` up to the cell `last`, with other parameters. By default
    nothing is installed."""
    notebook = deepcopy(NOTEBOOK)
    ids = list(SOURCES)
    notebook.cells = notebook.cells[: ids.index(last) + 1]
    assert NOTEBOOK.cells[ids.index("parameters")].metadata.tags == ["parameters"]
    values = "\n".join(f"{name} = {value!r}" for name, value in {"install": False, **parameters}.items())
    notebook.cells.insert(ids.index("parameters") + 1, new_code_cell(values, id="values"))
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    return {cell.id: cell.get("outputs") for cell in notebook.cells}


@pytest.mark.slow
def test_every_cell_runs(copy):
    sizes = {"sizes": " ".join(TINY.split()), "chat_sizes": "--steps=4 --eval.tokens=1024"}
    outputs = executed(copy / "notebooks", "chat", **sizes)  # Jupyter starts it there
    for name in "quickstart", "quickstart-chat":
        assert json.loads((copy / "runs" / name / "summary.json").read_text())["steps"] == 4
    shown = {kind: data for output in outputs["report"] for kind, data in output.get("data", {}).items()}
    assert shown["image/png"] and "&lt;html" in shown["text/html"]
    assert "quickstart: 4 steps, " in "".join(output.text for output in outputs["train"])
    assert "".join(output.text for output in outputs["chat"]).strip()


@pytest.mark.medium
def test_a_command_that_fails_stops_the_notebook(copy):
    with pytest.raises(CellExecutionError, match=r"--steps=-1 cannot work(.|\n)*exit code 2: \S+ train\.py"):
        executed(copy, "report", sizes="--steps=-1")
    assert not (copy / "runs").exists()


def test_outside_a_checkout_it_clones_one_and_installs_what_that_needs(tmp_path, monkeypatch):
    """With a stand-in for pip, which keeps its arguments."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__init__.py").touch()
    (tmp_path / "pip/__main__.py").write_text("import sys\nopen('asked', 'w').write(' '.join(sys.argv[1:]))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "there").mkdir()
    (tmp_path / "there/train.py").touch()
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b"]
    for words in ["init", "-q"], ["add", "."], ["commit", "-qm", "All"]:
        subprocess.run([*git, *words], cwd=tmp_path / "there", check=True)
    executed(tmp_path, "setup", repository=f"file://{tmp_path}/there", extra="[tpu]", install=True)
    asked = (tmp_path / "tokensum/asked").read_text()
    assert asked == "install --quiet --constraint=constraints.txt --editable=.[tpu]"
    (tmp_path / "pip/__main__.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(CellExecutionError, match="exit code 3"):
        executed(tmp_path, "setup", install=True)


def test_the_badge_opens_this_notebook_of_the_repository_that_is_cloned():
    given: dict = {}
    exec(SOURCES["parameters"], given)
    owner_and_name = given["repository"].removeprefix("https://github.com/")
    path = f"/github/{owner_and_name}/blob/main/notebooks/quickstart.ipynb"
    assert f"(https://colab.research.google.com{path})" in SOURCES["intro"]


def test_no_cell_needs_make():
    assert not [name for name, source in SOURCES.items() if re.search(r"^\s*[!%]\s*make\b", source, re.M)]


@pytest.mark.parametrize(("smi", "devices", "extra"), [(0, [], "[cuda12]"), (9, ["/dev/vfio/0"], "[tpu]")])
def test_the_sizes_for_each_device_are_options_and_a_t4_computes_in_float32(monkeypatch, tmp_path, smi, devices, extra):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nexit {smi}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(glob, "glob", lambda pattern: [name for name in devices if fnmatch(name, pattern)])
    chosen = {}
    exec(SOURCES["parameters"], chosen)
    assert chosen["extra"] == extra and chosen["sizes"]
    config, _ = parse(None, argv=[f"--config={ROOT}/configs/small.py", *chosen["sizes"].split()])
    assert config.model.heads * config.model.head_dim == config.model.width
    for capability, dtype in (7.5, "float32"), (8.0, "bfloat16"):
        monkeypatch.setattr("training.dtype.compute_capability", lambda capability=capability: capability)
        assert compute_dtype(config.model, "gpu").name == dtype
