"""Run reinforce.py on a tiny network: complete, killed and resumed, on other meshes, and with mistakes."""

import json
from pathlib import Path

import pytest

import reinforce
from reinforcement.tasks import Sums
from run.record import read_metrics
from tests.run.test_continuing import CONFIG
from tests.test_train import COMMANDS, ROOT, assert_as_untouched, killed_after, run, summary, write_folder

COMMANDS["reinforce"] = reinforce.main
BASE = CONFIG.replace("kv_heads=1", "kv_heads=2").replace("sequence_length=32", "sequence_length=128")
RECIPE = """
from dataclasses import replace
from configs.reinforce import derive, get_config as recipe
from configs.schema import *

def get_config():
    few = ReinforceConfig(samples=4, prompts=4, held_out=6, difficulty=1)
    model = replace(recipe().model, dtype="float32")
    return replace(recipe(), steps=6, reinforce=few, model=model, checkpoint=CheckpointConfig(every_steps=2))
"""
OFTEN = ("--config=few.py", "--init_from=base", "--eval.every_steps=3", "--model.dtype=float32")


def length_is_even(self, problem, text):
    """Reward what an untrained network does in about half of its answers."""
    return float(len(text) % 2 == 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a run, and a run of reinforcement on it."""
    folder = write_folder(tmp_path_factory.mktemp("user"), BASE)
    (folder / "few.py").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sums, "reward", length_is_even)
        patch.chdir(folder)
        assert run("train", patch, "--config=tiny.py", "--run_dir=base", devices=1) == 0
        assert run("reinforce", patch, *OFTEN, "--run_dir=whole", devices=1) == 0
    return folder


@pytest.mark.medium
def test_a_run_writes_what_it_promises(folder):
    lines = read_metrics(folder / "whole")
    logged, evaluated = ([line for line in lines if name in line] for name in ("reward", "pass_at_1"))
    assert [line["step"] for line in logged] == [1, 2, 3, 4, 5, 6]
    print(json.dumps(logged[0]), json.dumps(evaluated[0]))
