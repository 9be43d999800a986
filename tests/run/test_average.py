"""Test an average of parameters in a run: what evaluates it, what resumes it, and what reads it."""

import json

import jax
import numpy as np
import pytest

from configs.schema import MeshConfig
from evaluation.network import mesh_of_first
from run.record import read_metrics
from run.saved_run import load_run
from tests.run.test_continuing import CONFIG, start
from tests.test_train import figures, killed_after, lines_of, run, write_folder

AVERAGE = ("--optimizer.average=0.5", "--checkpoint.every_steps=1", "--checkpoint.keep=9", "--eval.every_steps=2")
AVERAGE += ("--model.dropout=0.1",)  # its masks resume, too


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a config, text, and in `whole` an uninterrupted run."""
    folder = write_folder(tmp_path_factory.mktemp("user"), CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        assert start(patch, folder, "--run_dir=whole", *AVERAGE) == 0
    return folder


def params(folder, step: int | None = None, average: bool = True) -> dict:
    return jax.device_get(load_run(folder / "whole", mesh_of_first(MeshConfig(data=1)), step, average).params)


def test_both_are_evaluated_once_there_are_two(folder):
    lines = {line["step"]: line for line in read_metrics(folder / "whole") if "val_bpb" in line}
    assert [step for step, line in lines.items() if "average_val_bpb" in line] == [4, 6]
    assert lines[6]["average_val_bpb"] != lines[6]["val_bpb"]
    summary = figures(folder / "whole")
    assert summary["average_val_loss"] == lines[6]["average_val_loss"]
    assert summary["average_sha256"] != summary["params_sha256"]


def test_the_average_that_commands_read_is_the_mean_of_the_checkpoints(folder):
    last = [params(folder, step, average=False) for step in (4, 5, 6)]
    mean = jax.tree.map(lambda *of: np.mean(of, axis=0, dtype=np.float64), *last)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), params(folder), mean)
    jax.tree.map(np.testing.assert_array_equal, params(folder, 2), params(folder, 2, average=False))


@pytest.mark.parametrize("newest", [2, 5])
def test_a_run_that_was_killed_ends_with_the_same_average(folder, monkeypatch, newest):
    """Resume before the first step that counts, and between two."""
    killed = killed_after(newest, folder / "whole", folder / f"killed-{newest}")
    assert start(monkeypatch, folder, f"--run_dir={killed}", *AVERAGE) == 0
    assert figures(killed) == figures(folder / "whole") and lines_of(killed) == lines_of(folder / "whole")


@pytest.mark.medium
def test_it_may_be_turned_off_and_on_but_not_once_its_first_steps_are_over(folder, monkeypatch, capsys):
    """Until an average begins, a checkpoint has none."""
    stopped = killed_after(2, folder / "whole", folder / "stopped")
    larger = ("--optimizer.average=0.8", "--accept_changes")
    assert start(monkeypatch, folder, f"--run_dir={stopped}", *AVERAGE, *larger) == 2
    assert "has come to step 2 without an average" in " ".join(capsys.readouterr().err.split())
    off = ("--run_dir=stopped", "--steps=3", "--accept_changes", *AVERAGE[1:])
    assert start(monkeypatch, folder, *off) == 0
    assert not [name for name in figures(stopped) if "average" in name]
    on = ("--run_dir=stopped", "--steps=5", "--accept_changes", "--optimizer.average=0.4", *AVERAGE[1:])
    assert start(monkeypatch, folder, *on) == 0
    assert figures(stopped)["average_val_bpb"] != figures(stopped)["val_bpb"]


def test_evaluate_and_export_take_the_average_unless_asked_not_to(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    summary = figures(folder / "whole")
    for name, options in {"average_val_bpb": (), "val_bpb": ("--average=False",)}.items():
        capsys.readouterr()
        assert run("evaluate", monkeypatch, "--run_dir=whole", "--json", *options, devices=1) == 0
        results = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert results["val_bpb"] == pytest.approx(summary[name], rel=1e-6) and ("average" in results) != bool(options)
        assert run("export", monkeypatch, "--run_dir=whole", f"--out={name}", *options, devices=1) == 0
        assert f"| bits per byte | {summary[name]:.4f} of held-out text |" in (folder / name / "README.md").read_text()
    assert (folder / "val_bpb" / "model.safetensors").read_bytes() != (
        folder / "average_val_bpb" / "model.safetensors"
    ).read_bytes()
    assert run("evaluate", monkeypatch, "--from=val_bpb", "--average=False", "--source=text", devices=1) == 2
    assert "--step and --average choose parameters of a run" in capsys.readouterr().err
