"""Test what `python -m tools.launch sky yaml` prints and a node runs. (SkyPilot 0.14.1 has accepted such a file.)"""

import os
import subprocess

import pytest
import yaml

from configs.schema import UserError
from tests.tools.launch.stand_in import BUCKET
from tools.launch.__main__ import main


def printed(capsys, *options: str) -> dict:
    assert main(["sky", "yaml", *options, "--", "--config=tiny.py", BUCKET]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_every_node_joins_the_others_and_exit_codes_decide(repository, capsys):
    task = printed(capsys, "--hardware=2x h200:8", "--spot", f"--setup={repository.setup}")
    recovery = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [42, 143]}
    assert task["resources"] == {"accelerators": "H200:8", "use_spot": True, "job_recovery": recovery}
    assert task["num_nodes"] == 2
    repository.plan([0, 0])
    subprocess.run(["bash", "-c", task["setup"]], check=True)
    for rank in range(2):
        node = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(rank)}
        subprocess.run(["bash", "-c", task["run"]], env=os.environ | node, check=True)
        (start,) = repository.starts(rank)
        assert start["arguments"] == ["--config=tiny.py", BUCKET]
        own = {name: start[name] for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")}
        assert list(own.values()) == ["10.0.0.1:8476", "2", str(rank)]


def test_a_slice_is_named_as_skypilot_does_and_its_hosts_find_each_other(repository, capsys):
    task = printed(capsys, "--hardware=v5p:2x2x2")
    assert task["resources"]["accelerators"] == "tpu-v5p-16" and task["num_nodes"] == 1
    assert task["resources"]["accelerator_args"] == {"runtime_version": "v2-alpha-tpuv5"}
    assert "JAX_" not in task["run"] and task["setup"] == "make setup EXTRA=tpu,gcs"


def test_variables_are_asked_for_by_skypilot_and_their_values_are_not_in_the_task(repository, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    words = ["--hardware=v5e:1x1", "--secret", "WANDB_API_KEY", "--env", "WANDB_PROJECT"]
    assert main(["sky", "yaml", *words, "--", "--config=tiny.py", BUCKET]) == 0
    text = capsys.readouterr().out
    task = yaml.safe_load(text)
    assert task["secrets"] == {"WANDB_API_KEY": None} and task["envs"] == {"WANDB_PROJECT": None}
    assert "s3cret" not in text and "sky jobs launch tiny.yaml --env=WANDB_PROJECT --secret=WANDB_API_KEY" in text


def test_a_mistake_is_one_message(repository):
    for words, message in (
        (["--hardware=2x v5e:4x4", "--", "--config=tiny.py", BUCKET], "no job of several slices"),
        (["--hardware=2x cpu:1", "--", "--config=tiny.py", BUCKET], "no SkyPilot name for cpu"),
        (["--hardware=2x h200:8", "--", "--config=tiny.py"], "checkpoint.folder=gs://BUCKET/FOLDER is missing"),
    ):
        with pytest.raises(UserError, match=message):
            main(["sky", "yaml", *words])
