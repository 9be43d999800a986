import errno
import json
import os
import string
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from unittest.mock import Mock

import jax
import pytest

from hosts.runtime import versions
from options.files import config_from_json
from options.schema import BatchConfig, Config, EvalConfig, ModelConfig, hints, options, with_options
from run.folder import RunFolder
from run.lock import RunLock
from run.status import claim_folder, write_start_record
from system.errors import StorageLost, UserError
from tests.run.checkpoints import restored_newest, saved, state_on
from tests.run.claims import claim, text_of

FREE = {
    *("name", "ratio", "deterministic", "profile.steps", "batch.rows_per_device", "model.remat", "model.loss_chunks"),
    *(f"checkpoint.{name}" for name in ("every_steps", "keep", "keep_every")),
    *(f"data.{name}" for name in ("source", "tokenizer", "workers")),
    *(f"eval.{name}" for name in ("every_steps", "prompts", "sample_tokens", "tokens", "tasks", "bundle", "items")),
    *("diagnostics.every_steps", "eval.run_code", "hang.io_seconds", "hang.seconds", "optimizer.batch_factor"),
    *("log.every_steps", "log.on_event", "log.wandb", "mesh.data", "mesh.fsdp", "mesh.tensor"),
}


def open_run(config: Config, fingerprint: str, accept_changes: bool) -> list[str]:
    """Open the run like a command that ends after a saved step."""
    with RunLock(RunFolder(config.run_dir)):
        folder = RunFolder(config.run_dir)
        changes = claim(config, fingerprint, accept_changes)
        write_start_record(folder, config, text_of(fingerprint), changes, 0, 0)
        folder.events.add("saved", 1)
        facts = folder.local / "checkpoints/1/facts/metadata"
        facts.parent.mkdir(parents=True, exist_ok=True)
        facts.touch()
        return changes


OTHERS = sorted(options(Config(name="x")).keys() - FREE - {"run_dir"})


def other(config: Any, name: str) -> Any:
    """Return `config` with another value of the option `name`."""
    value, hint = options(config)[name], hints()[name]
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    choices = get_args(kind) if get_origin(kind) is Literal else (True, False) if kind is bool else ()
    added = "x" if isinstance(value, str) else ("x",) if value == () else 1
    others = [choice for choice in choices if choice != value] or [1 if value is None else value + added]
    return with_options(config, {name: others[0]})


@pytest.fixture
def config(tmp_path: Path) -> Config:
    model = ModelConfig(dtype="float32")  # a run records its type
    batch, run_dir = BatchConfig(rows_per_device=32), str(tmp_path / "runs/run")
    return Config(name="run", run_dir=run_dir, steps=10, model=model, batch=batch, eval=EvalConfig(prompts=()))


def recorded(config: Config) -> dict:
    return json.loads((Path(config.run_dir) / "config.json").read_text())


def differences(error: pytest.ExceptionInfo) -> list[str]:
    """Return the indented lines of a refusal."""
    return [line.strip() for line in str(error.value).splitlines() if line.startswith("  ")]


def test_first_start_writes_the_config_and_what_it_ran_on_and_the_same_config_changes_nothing(config):
    assert open_run(config, "print", accept_changes=False) == []
    record = recorded(config)
    assert config_from_json(json.dumps(record["config"])) == config
    assert record["dataset"] == "print" and record["changes"] == []
    assert record["versions"] == versions() and record["versions"]["jax"] == jax.__version__
    assert record["devices"] == {"kind": jax.devices()[0].device_kind, "count": 8, "processes": 1, "slices": 1}
    made = {path.name for path in Path(config.run_dir).iterdir()}
    assert made == {"checkpoints", "config.json", "events.jsonl", "lock"}
    for accept_changes in (False, True):
        assert open_run(config, "print", accept_changes) == [] and recorded(config) == record


def test_a_moved_run_continues_with_other_options_of_speed_and_reporting(config, tmp_path):
    open_run(config, "print", accept_changes=False)
    config = replace(config, run_dir=str(Path(config.run_dir).rename(tmp_path / "elsewhere")))
    for name in FREE:
        assert open_run(other(config, name), "print", accept_changes=False) == [], name


def test_every_other_difference_is_refused_and_listed(config):
    open_run(config, "print", accept_changes=False)
    before = recorded(config)
    for name in OTHERS:
        now = other(config, name)
        with pytest.raises(UserError, match="holds a run") as error:
            open_run(now, "print", accept_changes=False)
        assert differences(error) == [f"{name}: {options(config)[name]} -> {options(now)[name]}"]
    with pytest.raises(UserError) as error:
        open_run(with_options(config, {"steps": 20, "model.depth": 3, "mesh.data": 2}), "another", False)
    assert differences(error) == ["steps: 10 -> 20", "model.depth: 12 -> 3", "dataset: print -> another"]
    assert recorded(config) == before


def test_accepted_changes_are_recorded_and_from_then_on_the_runs_own(config):
    open_run(config, "print", accept_changes=False)
    longer, longest = replace(config, steps=20), replace(config, steps=30)
    assert open_run(longer, "print", accept_changes=True) == ["steps: 10 -> 20"]
    assert open_run(longer, "print", accept_changes=False) == []
    assert open_run(longest, "another", accept_changes=True) == ["steps: 20 -> 30", "dataset: print -> another"]
    record = recorded(config)
    assert record["changes"] == [["steps: 10 -> 20"], ["steps: 20 -> 30", "dataset: print -> another"]]
    assert (record["config"]["steps"], record["dataset"]) == (30, "another")
    with pytest.raises(UserError, match="steps: 30 -> 10"):
        open_run(config, "another", accept_changes=False)


def test_a_run_whose_rows_had_another_order_is_refused_whatever_is_accepted(config):
    open_run(config, "print", accept_changes=False)
    before = recorded(config)
    del before["row_order"]  # as of a version without numbers
    record = Path(config.run_dir) / "config.json"
    record.write_text(json.dumps(before))
    for accept_changes in (False, True):
        with pytest.raises(UserError, match="did not read its rows in this version's order") as error:
            open_run(config, "print", accept_changes)
        assert f"--init_from={config.run_dir} and another --name" in str(error.value)
    assert recorded(config) == before
    answers = text_of("print", row_order=0)  # reinforcement has no rows of a text
    assert claim_folder(RunFolder(record.parent), config, answers, False).has_steps


def test_a_folder_of_something_else_is_refused_and_stays_unchanged(config):
    folder = Path(config.run_dir)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(theirs := '{"model_type": "nanochat"}')
    with pytest.raises(UserError, match=r"not empty and holds no run") as error:
        open_run(config, "print", accept_changes=True)
    assert str(folder) in str(error.value)
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("config.json", theirs)]


def test_a_run_without_a_step_accepts_any_config(config):
    """The corrected command needs no --accept_changes, whatever a killed start has left."""
    with RunLock(RunFolder(config.run_dir)):
        claim(config, "print", False)
        RunFolder(config.run_dir).events.add("fitted", 0)
    corrected = replace(config, seed=7)
    assert open_run(corrected, "another", accept_changes=False) == []
    assert recorded(config)["config"]["seed"] == 7 and recorded(config)["dataset"] == "another"
    with pytest.raises(UserError, match="seed: 7 -> 8"):
        open_run(replace(config, seed=8), "another", accept_changes=False)


def test_a_refused_start_leaves_nothing_and_nothing_of_others_is_deleted(config):
    folder = Path(config.run_dir)
    with pytest.raises(UserError, match="refused"), RunLock(RunFolder(folder)):
        claim(config, "print", False)
        (folder / "checkpoints").mkdir()
        raise UserError("refused")
    assert not folder.exists()
    open_run(config, "print", False)
    kept = sorted(path.name for path in folder.iterdir())
    with pytest.raises(UserError, match="seed: 0 -> 7"):
        open_run(replace(config, seed=7), "print", False)
    assert sorted(path.name for path in folder.iterdir()) == kept


def test_a_path_with_a_backslash_is_refused_and_every_other_printable_character_works(tmp_path):
    """Tensorstore takes a backslash for a slash."""
    run_dir = tmp_path / "".join(c for c in string.printable if c not in "/\\")
    with RunLock(RunFolder(run_dir)):
        saved(run_dir)
    assert restored_newest(run_dir, state_on(1)[1])
    with pytest.raises(UserError, match="without a backslash"), RunLock(RunFolder(tmp_path / "a\\b")):
        pass


def test_a_mistake_after_the_first_step_deletes_no_record_and_that_step_fixes_the_config(config):
    folder = Path(config.run_dir)
    with pytest.raises(UserError, match="a shard has changed"), RunLock(RunFolder(folder)):
        claim(config, "print", False)
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0, "time": 1.0}\n')
        raise UserError("a shard has changed")
    assert {path.name for path in folder.iterdir()} >= {"config.json", "metrics.jsonl"}
    with pytest.raises(UserError, match="seed: 0 -> 7"):
        open_run(replace(config, seed=7), "print", False)


def test_a_start_killed_while_it_claimed_the_folder_can_be_repeated(config, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", Mock(side_effect=KeyboardInterrupt))
        open_run(config, "print", False)
    (Path(config.run_dir) / ".preflight-0").touch()  # left by a killed preflight
    (Path(config.run_dir) / "traceback-1.txt").touch()  # left by a process whose peer was killed
    assert open_run(config, "print", False) == [] and recorded(config)["dataset"] == "print"


def test_one_process_uses_a_run_at_a_time(config):
    with RunLock(RunFolder(config.run_dir)):
        claim(config, "print", False)
        with pytest.raises(UserError, match=rf"another process \(process {os.getpid()} on "):
            open_run(config, "print", False)
    open_run(config, "print", False)


WITHOUT_LOCKS = [(errno.ENOSYS, True), (errno.EOPNOTSUPP, True), (errno.ENOLCK, True), (errno.EIO, False)]


@pytest.mark.parametrize(("number", "taken"), WITHOUT_LOCKS)
def test_a_disk_without_locks_is_reported_and_failing_locks_are_no_user_error(
    tmp_path, monkeypatch, messages, number, taken
):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr("system.files.RETRY_SECONDS", 0)
    if taken:
        with RunLock(RunFolder(tmp_path)) as lock:
            assert lock.file and "without locks" in messages[0]
    else:
        with pytest.raises(StorageLost), RunLock(RunFolder(tmp_path)):
            pass


def test_a_lock_of_a_lost_machine_is_waited_for_but_not_one_of_this_machine(tmp_path, monkeypatch):
    """An NFS server keeps a lost machine's lock for 90 seconds."""
    pauses = []
    monkeypatch.setattr("tenacity.nap.time.sleep", pauses.append)
    answers = [BlockingIOError(errno.EAGAIN, "locked")] * 3

    def flock(*_):
        if answers:
            raise answers.pop()

    another = pytest.raises(UserError, match=f"another process .process {os.getpid()} on ")
    with RunLock(RunFolder(tmp_path)), another, RunLock(RunFolder(tmp_path)):
        pass
    assert not pauses
    (tmp_path / "lock").write_text("process 7 on gpu-3, since then\n")
    monkeypatch.setattr("fcntl.flock", flock)
    with RunLock(RunFolder(tmp_path)):
        assert len(pauses) == 3
