"""Test what hosts must have in common. Errors name the host."""

import json
import platform
import shutil
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import pytest

from hosts import preflight as module
from hosts.preflight import Host, compare, preflight, require_right_sum
from hosts.runtime import code_digest
from options.arguments import StartArguments
from options.schema import MeshConfig
from run import start as start_module
from run.folder import RunFolder
from run.status import RunStatus
from system.errors import TrainingAborted, UserError
from tests.commands import write_folder
from tests.helpers import tiny_config
from tests.hosts.processes import finish, start
from training.mesh import make_mesh


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a config and text to train on."""
    return write_folder(tmp_path_factory.mktemp("user"))


SAME = {"code": "abc", "jax": "0.10.2", "data": "d", "devices": "8 x H200"}


def host(name: str, problems=(), **differs: str) -> Host:
    return Host(name, SAME | differs, list(problems))


@pytest.mark.parametrize(
    ("hosts", "wrong"),
    [
        ([host("a")], []),
        ([host("a"), host("b", jax="0.9")], ["process 1 (b) has jax 0.9, the others 0.10.2"]),
        ([host("a", code="x"), host("b"), host("c")], ["process 0 (a) has code x, the others abc"]),
        (
            [host("a"), host("b"), host("c", devices="7 x H200")],
            ["process 2 (c) has devices 7 x H200, the others 8 x H200"],
        ),
        (
            [host("a"), host("b", problems=["cannot write to /x: read-only"])],
            ["process 1 (b): cannot write to /x: read-only"],
        ),
    ],
)
def test_problems_are_named_by_host(hosts, wrong):
    assert compare(hosts) == wrong


def test_the_code_s_hash_covers_what_a_run_may_import(tmp_path):
    def change(path: str) -> bool:
        """Return whether a new file changes the hash."""
        before = code_digest(tmp_path)
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("code")
        return code_digest(tmp_path) != before

    assert change("train.py") and change("model/gpt.py") and change("run/log.py")
    assert not change("runs/x/metrics.jsonl") and not change("tools/plan.py")


def test_one_process_passes_and_makes_nothing(tmp_path, monkeypatch):
    exchanged = Mock(side_effect=lambda what, value: [value])
    monkeypatch.setattr(module, "exchange", exchanged)
    preflight(replace(tiny_config(), run_dir=str(tmp_path)), make_mesh(MeshConfig(fsdp=2, tensor=2)), "tokenizer")
    host = Host(*json.loads(exchanged.call_args_list[0].args[1]))
    assert host.same["devices"] == "8 x cpu" and host.same["jax"] == jax.__version__ and not host.problems
    assert not list(tmp_path.iterdir())


def test_an_unwritable_folder_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    config = replace(tiny_config(), run_dir=str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"process 0 .*: cannot write to .*/file"):
        preflight(config, make_mesh(MeshConfig()), "tokenizer")


@pytest.mark.parametrize("finished", [0, 10])
def test_a_full_disk_is_no_mistake_and_a_complete_run_needs_none(tmp_path, monkeypatch, finished):
    config = replace(tiny_config(), run_dir=str(tmp_path), steps=10)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    text = Mock(fingerprint="f")
    text.tokenizer.sha256 = "t"
    stage: Any = SimpleNamespace(open=lambda *_: (SimpleNamespace(config=config, mesh=None), text))
    monkeypatch.setattr(start_module, "claim_folder", lambda *_: RunStatus(True, [], finished, finished))
    monkeypatch.setattr(start_module, "preflight", lambda *_: None)
    full = pytest.raises(TrainingAborted, match=r"1e-06 GB are free at .* takes 0\.000\d+ GB")
    with nullcontext() if finished == 10 else full:
        start_module.prepare(config, StartArguments(), stage, RunFolder(tmp_path))


def test_a_host_that_never_answers_ends_the_start(tmp_path, monkeypatch):
    """Its disk does not answer, say, while JAX's heartbeat continues."""
    ended, reasons = threading.Event(), []
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr("hosts.watchdog.end_as_hung", lambda reason: (reasons.append(reason), ended.set()))
    monkeypatch.setattr(module, "exchange", lambda what, value: ended.wait(5) and [value])
    preflight(replace(tiny_config(), run_dir=str(tmp_path)), make_mesh(MeshConfig()), "tokenizer")
    assert reasons == ["the answers of all hosts take longer than 0.1 s"]


def test_a_wrong_sum_is_a_user_error(monkeypatch):
    monkeypatch.setattr("jax.numpy.sum", lambda x: x[0])
    with pytest.raises(UserError, match="the sum over all devices is 36, but process 0 found 1"):
        require_right_sum(make_mesh(MeshConfig()))


DIFFERENT = """
import os
os.environ.pop("XLA_FLAGS", None)  # with flags, a program of each process alone tries them
import jax
import hosts.preflight as preflight
preflight.VISIBLE_SECONDS = 5
if os.environ["JAX_PROCESS_ID"] == "1":
    preflight.versions = lambda: {"jax": "0.1"}
from train import main
from hosts.runtime import run_command

compiled, compare = [], preflight.compare
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
)
preflight.compare = lambda hosts: print("programs so far:", len(compiled)) or compare(hosts)
run_command(main)
"""


@pytest.mark.slow
def test_a_start_names_the_host_that_differs_before_any_program_runs(folder, tmp_path):
    """Give the second of two another package and its own folder. A program over devices that cannot cooperate would
    hang before the message."""
    shutil.copytree(folder, tmp_path / "other")
    words = ["-c", DIFFERENT, "--config=tiny.py"]
    first, second = finish(start(words, words, folders=[folder, tmp_path / "other"], devices=[4]), 2)
    assert "programs so far: 0\n" in first and "programs so far: 0\n" in second
    assert f"process 1 ({platform.node()}) has jax 0.1, the others" in first
    assert ": does not see runs/tiny of process 0" in first and "Traceback" not in first + second
    assert "process 0 of 2, with 4 of 8 cpu devices; mesh: " in first.splitlines()[0]
    assert not (folder / "runs" / "tiny").exists()
