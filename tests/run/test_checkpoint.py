"""Test that checkpoints restore exactly, complete or in part, on any mesh, and that damage is detected."""

import errno
import json
import resource
import shutil
import threading
from dataclasses import replace
from functools import cache
from unittest.mock import Mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from model.gpt import parameter_shapes
from options.schema import CheckpointConfig, MatricesConfig
from run import saver
from run.checkpoint import Checkpoints, checksums
from run.folder import RunFolder
from system.errors import Damaged, NoCheckpoint, StorageLost, UserError
from tests.helpers import ALL_FEATURES, sharded, tiny_config
from tests.run.checkpoints import (
    FACTS,
    KEEP_ALL,
    assert_equal,
    changed,
    close,
    names,
    opened,
    restored_newest,
    saved,
    state_on,
)
from training.optimizer import make_optimizer
from training.state import abstract_state, params_sha256, stored_as

OTHER = tiny_config(heads=8, kv_heads=8, head_dim=8, **ALL_FEATURES)


@cache
def abstract_on(sizes):
    """Return the state of a network with every feature and Muon. Three and five devices divide few of its sizes."""
    network, options = sharded(OTHER.model, sizes), replace(OTHER.optimizer, matrices=MatricesConfig(0.01, kind="muon"))
    optimizer, _ = make_optimizer(options, network, 8)
    return abstract_state(network, optimizer)


@pytest.mark.medium
@pytest.mark.parametrize(("source", "other"), [((2, 2, 2), (3, 2, 1)), ((5, 1, 1), (1, 1, 4))], ids=str)
def test_any_mesh_s_checkpoint_restores_on_any_other(tmp_path, source, other):
    """Restore the state on the next mesh, and the parameters alone."""
    generator = np.random.default_rng(0)
    draw = lambda leaf: np.asarray(generator.integers(1, 9, leaf.shape), leaf.dtype)
    whole = jax.device_put(jax.tree.map(draw, abstract_on((1, 1, 1))))
    checkpoints = opened(tmp_path, KEEP_ALL)
    checkpoints.save(5, stored_as(whole, abstract_on(source)), {"shapes": parameter_shapes(OTHER.model)})
    close(checkpoints)
    abstract = abstract_on(other)
    restored, _ = Checkpoints(RunFolder(tmp_path)).restore(5, abstract)
    assert_equal(restored, stored_as(whole._replace(step=np.int32(5)), abstract))  # the padding is zero again
    jax.tree.map(lambda leaf, shape: np.testing.assert_equal(leaf.sharding, shape.sharding), restored, abstract)
    params, _ = Checkpoints(RunFolder(tmp_path)).restore_params(abstract.params)
    assert params_sha256(params, OTHER.model) == params_sha256(whole.params, OTHER.model)


def test_a_checkpoint_has_its_step_s_state_although_the_next_step_reuses_the_memory(tmp_path):
    state = changed(state_on(8)[0])
    expected = jax.device_get(state)
    checkpoints = opened(tmp_path, KEEP_ALL)
    checkpoints.save(3, state, FACTS | {"seconds": 1.5})
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0, state), donate_argnums=0)
    for _ in range(3):
        state = step(state)
    close(checkpoints)
    restored, facts = Checkpoints(RunFolder(tmp_path)).restore(3, state_on(1)[1])
    assert_equal(restored, expected)
    assert (facts["step"], facts["seconds"]) == (3, 1.5)


BITS = {10: 2.0, 20: 1.0, 30: 1.5, 40: None, 50: None, 60: 1.2}


@pytest.mark.parametrize(
    ("config", "bits", "kept"),
    [
        (CheckpointConfig(keep=2), BITS, [20, 50, 60]),
        (CheckpointConfig(keep=1, keep_every=30), BITS, [20, 30, 60]),
        (CheckpointConfig(keep=9), BITS, [10, 20, 30, 40, 50, 60]),
        (CheckpointConfig(keep=1), BITS | {30: float("nan")}, [20, 60]),
        (CheckpointConfig(keep=1), BITS | {30: 1.0}, [30, 60]),
    ],
)
def test_keeps_the_newest_every_nth_and_the_best(tmp_path, config, bits, kept):
    scores = {step: score for step, score in bits.items() if score is not None}
    checkpoints = opened(tmp_path, config, scores)
    checkpoints.steps = [*bits]
    for step in bits:
        (tmp_path / "checkpoints" / str(step)).mkdir()
    close(checkpoints)
    assert checkpoints.steps == kept and names(tmp_path) == [*map(str, kept)]


def test_an_old_checkpoint_is_deleted_only_after_a_newer_one_is_complete(tmp_path):
    with pytest.raises(UserError, match="no checkpoint yet"):
        Checkpoints(RunFolder(tmp_path)).restore_params(state_on(1)[1].params)
    saved(tmp_path, (1,))
    for leftover in ("7.orbax-checkpoint-tmp", "2.deleted"):
        (tmp_path / "checkpoints" / leftover / "params").mkdir(parents=True)
    reader = Checkpoints(RunFolder(tmp_path))
    assert reader.restore_params(state_on(1)[1].params)[1] == 1
    assert names(tmp_path) == ["1", "2.deleted", "7.orbax-checkpoint-tmp"]  # reading deletes nothing
    checkpoints = opened(tmp_path, CheckpointConfig(keep=1))
    assert names(tmp_path) == ["1"]
    for step in (2, 3):
        checkpoints.save(step, state_on(1)[0], FACTS)
        assert str(step - 1) in names(tmp_path)
    close(checkpoints)
    assert names(tmp_path) == ["3"]
    with pytest.raises(StorageLost, match="1 was deleted while it was read"):
        reader.restore_params(state_on(1)[1].params)


def test_the_layout_on_the_disk_and_orbax_alone_reads_it(tmp_path, monkeypatch):
    """Require the names that others rely on. Other programs need only Orbax to read the arrays."""
    whole, seen = saver.Saving._complete, []
    look = lambda self: (seen.extend(names(tmp_path)), whole(self))
    monkeypatch.setattr(saver.Saving, "_complete", look)
    state = saved(tmp_path)[3]
    assert seen == ["3.orbax-checkpoint-tmp"] and names(tmp_path) == ["3"]
    folder = tmp_path / "checkpoints" / "3"
    assert sorted(path.name for path in folder.iterdir()) == ["facts", "params", "rest"]
    restored = ocp.StandardCheckpointer().restore(folder / "params", state_on(1)[1].params)
    assert_equal(restored, state.params)
    facts = json.loads((folder / "facts" / "metadata").read_text())
    (folder / "facts" / "metadata").write_text(json.dumps({**facts, "step": 4}))
    with pytest.raises(ValueError, match="differs from what was saved"):
        Checkpoints(RunFolder(tmp_path)).facts(3)


# Damage.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int32"])
def test_checksums_tell_every_element_and_every_bit(dtype):
    leaf = np.arange(1, 13).reshape(3, 4).astype(dtype)
    whole = checksums({"a": jax.numpy.asarray(leaf)})
    for bit in range(8 * leaf.nbytes):
        other = leaf.copy()
        other.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
        assert checksums({"a": jax.numpy.asarray(other)}) != whole
    assert checksums({"a": jax.numpy.asarray(leaf[:, ::-1])}) != whole


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


DAMAGE = [flip, lambda content: content[: len(content) // 2], None, lambda _: b""]  # flipped, cut, lost, empty


@pytest.mark.medium
def test_damage_to_any_file_is_harmless_or_detected_and_the_previous_checkpoint_is_used(tmp_path, messages):
    """Flip a bit of each file of a checkpoint in turn, and damage each in one more way. The newest state is restored,
    or, with a warning, the one before."""
    source = tmp_path / "pristine"
    states, noticed = saved(source, (4, 8)), set()
    files = sorted(path for path in (source / "checkpoints" / "8").rglob("*") if path.is_file())
    for i, path in enumerate(files * 2):
        folder = shutil.copytree(source, tmp_path / str(i))
        victim = folder / path.relative_to(source)
        change = DAMAGE[0 if i < len(files) else 1 + i % 3]
        victim.unlink() if change is None else victim.write_bytes(change(path.read_bytes()))
        messages.clear()
        restored = restored_newest(folder, state_on(1)[1])
        assert restored
        step = restored[1]["step"]
        assert_equal(restored[0], states[step]._replace(step=step))
        assert step == (4 if messages else 8)
        if messages:
            assert all("checkpoint 8 cannot be read" in text for text in messages)
            assert all("bound method" not in text and "event loop" not in text for text in messages)
            assert names(folder) == ["4"] and len(list((folder / "bad-checkpoints").iterdir())) == 1
            noticed.add(path.parent.name if path.parent.name == "d" else path.name)
    assert {"d", "metadata"} <= noticed  # the arrays' files and the facts


def test_the_file_that_a_checkpoint_lacks_is_named(tmp_path):
    saved(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "3" / "rest")
    with pytest.raises(Damaged, match=r"does not exist at .*/3/rest"):
        Checkpoints(RunFolder(tmp_path)).restore(3, state_on(1)[1])
    (tmp_path / "checkpoints" / "3" / "params" / "manifest.ocdbt").unlink()
    with pytest.raises(NoCheckpoint, match=r"Error opening .*/3/params"):
        Checkpoints(RunFolder(tmp_path)).restore_params(state_on(1)[1].params)


def test_an_error_of_our_own_is_no_damage(tmp_path, monkeypatch):
    saved(tmp_path, (4, 8))
    monkeypatch.setattr("run.checkpoint.read_arrays", Mock(side_effect=TypeError("a defect")))
    with pytest.raises(TypeError, match="a defect"):
        restored_newest(tmp_path, state_on(1)[1])
    assert names(tmp_path) == ["4", "8"]


def test_another_network_or_optimizer_is_refused_with_what_differs(tmp_path):
    saved(tmp_path)
    config, abstract = tiny_config(), state_on(1)[1]
    wider = sharded(replace(config.model, width=48))
    optimizer, _ = make_optimizer(config.optimizer, wider, 8)
    wide = abstract_state(wider, optimizer)
    message = r"checkpoint 3 in .* is of another network:(.|\n)*embed\.table: \[272, 32\], not \[272, 48\]"
    with pytest.raises(UserError, match=message):
        restored_newest(tmp_path, wide)
    with pytest.raises(UserError, match=message):
        Checkpoints(RunFolder(tmp_path)).restore_params(wide.params)
    moments = {"mu": abstract.params["embed"]}
    with pytest.raises(UserError, match=r"was made with another optimizer: .*and others are in only one of the two"):
        restored_newest(tmp_path, abstract._replace(opt_state=moments))
    assert names(tmp_path) == ["3"]


def test_a_folder_with_only_a_checkpoint_s_name_is_set_aside(tmp_path, messages):
    for name in ("3/facts/metadata", "99"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert Checkpoints(RunFolder(tmp_path)).newest == 3
    assert opened(tmp_path, KEEP_ALL).newest == 3 and names(tmp_path) == ["3"]
    assert len(list((tmp_path / "bad-checkpoints").iterdir())) == 1
    assert messages == ["checkpoint 99 cannot be read (it is incomplete); it is in bad-checkpoints"]


# A full disk: files may not grow beyond a few bytes.
class FullDisk:
    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_a_save_that_fails_is_counted_leaves_nothing_and_the_next_one_works(tmp_path, messages):
    config = CheckpointConfig(keep=1)
    states = saved(tmp_path, (1,), config)
    checkpoints = opened(tmp_path, config)
    with FullDisk():
        for failed in (1, 2, 3):
            checkpoints.save(failed + 1, state_on(1)[0], FACTS)
            if failed > 1:  # the next save, too, finds that the one before it failed
                checkpoints.wait()
                assert len(checkpoints.failures) == failed and checkpoints.steps == [1]
    assert [message.split(" save")[0] for message in messages] == ["1", "2", "3"]
    assert_equal(checkpoints.restore(1, state_on(1)[1])[0], states[1])
    checkpoints.save(5, changed(state_on(1)[0], 5), FACTS)
    close(checkpoints)
    assert names(tmp_path) == ["5"]


def test_a_disk_that_stays_away_ends_the_run_with_42(tmp_path, monkeypatch):
    checkpoints = opened(tmp_path, KEEP_ALL)
    away = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(saver, "is_there", Mock(side_effect=away))
    checkpoints.save(1, state_on(1)[0], FACTS)
    assert len(checkpoints.failures) == 1 and checkpoints.failures[-1].may_pass
    monkeypatch.setattr("system.files.RETRY_SECONDS", 0)
    checkpoints.save(2, state_on(1)[0], FACTS)
    with pytest.raises(StorageLost, match="Input/output error"):
        checkpoints.save(3, state_on(1)[0], FACTS)


def test_a_save_is_not_waited_for(tmp_path, monkeypatch):
    checkpoints, may_end = opened(tmp_path, KEEP_ALL), threading.Event()
    complete = saver.Saving._complete
    monkeypatch.setattr(saver.Saving, "_complete", lambda self: may_end.wait() and complete(self))
    checkpoints.save(1, state_on(1)[0], FACTS)
    checkpoints.poll()
    assert checkpoints.pending and not checkpoints.overdue
    may_end.set()
    close(checkpoints)
    assert checkpoints.steps == [1]
