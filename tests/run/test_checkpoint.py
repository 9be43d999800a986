"""Test that checkpoints restore exactly, complete or in part, on any mesh, and that damage is detected."""

import errno
import json
import resource
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs import retry
from configs.schema import CheckpointConfig, MatricesConfig, MeshConfig, UserError
from model.shapes import parameter_shapes
from run import orbax_calls
from run.checkpoint import Checkpoints
from tests.helpers import ALL_FEATURES, tiny_config
from tests.training.test_state import state_on
from training.mesh import make_mesh
from training.optimizer import make_optimizer
from training.state import abstract_state, params_sha256, stored_as

KEEP_ALL = CheckpointConfig(keep=99)
FACTS = {"shapes": parameter_shapes(tiny_config().model)}


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def changed(state, by=3):
    """Return a state that differs from a fresh one in every leaf."""
    return jax.tree.map(lambda leaf: leaf + by, state)


def saved(folder: Path, steps=(3,), config=KEEP_ALL, devices=1, **facts):
    """Save checkpoints with different states, and return the states."""
    checkpoints = Checkpoints(folder, config)
    states = {step: changed(state_on(devices)[0], step) for step in steps}
    for step, state in states.items():
        checkpoints.save(step, state, FACTS | {name: value[step] for name, value in facts.items() if name != "val_bpb"})
        if (bits := facts.get("val_bpb", {}).get(step)) is not None:
            checkpoints.score(step, bits)
    checkpoints.close()
    return states


@pytest.mark.parametrize(("saved_on", "restored_on"), [(8, 1), (1, 8)])
def test_round_trip(tmp_path, saved_on, restored_on):
    state = saved(tmp_path, devices=saved_on, seconds={3: 1.5})[3]
    _, abstract, _ = state_on(restored_on)
    restored, facts = Checkpoints(tmp_path).restore(3, abstract)
    assert_equal(restored, state._replace(step=3))
    assert (facts["step"], facts["seconds"]) == (3, 1.5)
    jax.tree.map(lambda leaf, shape: np.testing.assert_equal(leaf.sharding, shape.sharding), restored, abstract)
    params, step, _ = Checkpoints(tmp_path).restore_params(abstract.params)
    assert step == 3
    assert_equal(params, state.params)


MESHES = [(8, 1, 1), (1, 8, 1), (1, 1, 4), (2, 2, 2), (3, 1, 1), (3, 2, 1), (5, 1, 1)]
OTHER = tiny_config(heads=8, kv_heads=8, head_dim=8, **ALL_FEATURES)


def abstract_on(sizes):
    """Return the state of a network with every feature and Muon. Three and five devices divide few of its sizes."""
    mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])
    optimizer, _ = make_optimizer(replace(OTHER.optimizer, matrices=MatricesConfig(0.01, kind="muon")), OTHER.model, 8)
    return abstract_state(OTHER.model, optimizer, mesh, average=True)


@pytest.mark.medium
@pytest.mark.parametrize(("source", "other"), zip(MESHES, [*MESHES[1:], MESHES[0]]), ids=str)
def test_any_mesh_s_checkpoint_restores_on_any_other(tmp_path, source, other):
    """Restore the state on each mesh, and the parameters alone on one."""
    generator = np.random.default_rng(0)
    draw = lambda leaf: np.asarray(generator.integers(1, 9, leaf.shape), leaf.dtype)
    whole = jax.device_put(jax.tree.map(draw, abstract_on((1, 1, 1))))
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    checkpoints.save(5, stored_as(whole, abstract_on(source)), {"shapes": parameter_shapes(OTHER.model)})
    checkpoints.close()
    digests = {True: set(), False: set()}
    for target in MESHES:
        abstract = abstract_on(target)
        restored, _ = Checkpoints(tmp_path).restore(5, abstract)
        assert_equal(restored, stored_as(whole._replace(step=np.int32(5)), abstract))  # the padding is zero again
        digests[False].add(params_sha256(restored.params, OTHER.model))
        digests[True].add(params_sha256(restored.average, OTHER.model))
    for average, tree in ((True, whole.average), (False, whole.params)):
        params, *_ = Checkpoints(tmp_path).restore_params(abstract_on(other).params, average=average)
        assert digests[average] == {params_sha256(tree, OTHER.model) for tree in (params, tree)}


def test_a_checkpoint_has_its_step_s_state_although_the_next_step_reuses_the_memory(tmp_path):
    state = changed(state_on(8)[0])
    expected = jax.device_get(state)
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    checkpoints.save(3, state, FACTS)
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0, state), donate_argnums=0)
    for _ in range(3):
        state = step(state)
    checkpoints.close()
    assert_equal(Checkpoints(tmp_path).restore(3, state_on(8)[1])[0], expected)


def names(folder: Path) -> list[str]:
    return sorted((path.name for path in (folder / "checkpoints").iterdir()), key=lambda name: (len(name), name))


BITS = {10: 2.0, 20: 1.0, 30: 1.5, 40: None, 50: None, 60: 1.2}


@pytest.mark.parametrize(
    ("config", "bits", "kept"),
    [
        (CheckpointConfig(keep=2), BITS, ["20", "50", "60"]),
        (CheckpointConfig(keep=1, keep_every=30), BITS, ["20", "30", "60"]),
        (CheckpointConfig(keep=9), BITS, ["10", "20", "30", "40", "50", "60"]),
        (CheckpointConfig(keep=1), BITS | {30: float("nan")}, ["20", "60"]),
    ],
)
def test_keeps_the_newest_every_nth_and_the_best(tmp_path, config, bits, kept):
    saved(tmp_path, bits, config, val_bpb=bits)
    assert names(tmp_path) == kept
    assert [str(step) for step in Checkpoints(tmp_path).steps] == kept
    assert [facts["step"] for facts in map(Checkpoints(tmp_path).facts, map(int, kept))] == [int(s) for s in kept]


def test_scores_come_from_the_run_s_record(tmp_path):
    saved(tmp_path, (10, 20), KEEP_ALL)
    infos = Checkpoints(tmp_path, KEEP_ALL, scores={20: 1.5}).infos
    assert [info.metrics for info in infos] == [None, {"val_bpb": 1.5}]


def test_an_old_checkpoint_is_deleted_only_after_a_newer_one_is_complete(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    for step in (1, 2, 3):
        checkpoints.save(step, state_on(1)[0], FACTS)
        whole = [name for name in names(tmp_path) if name.isdigit()]
        assert step == 1 or str(step - 1) in whole
    checkpoints.close()
    assert names(tmp_path) == ["3"]


def test_reading_keeps_unfinished_writes_and_a_start_deletes_them(tmp_path):
    saved(tmp_path)
    for leftover in ("7.orbax-checkpoint-tmp", "2.deleted"):
        (tmp_path / "checkpoints" / leftover / "params").mkdir(parents=True)
    Checkpoints(tmp_path).restore_params(state_on(1)[1].params)
    assert names(tmp_path) == ["3", "2.deleted", "7.orbax-checkpoint-tmp"]
    Checkpoints(tmp_path, KEEP_ALL).close()
    assert names(tmp_path) == ["3"]


def test_the_layout_on_the_disk_and_orbax_alone_reads_it(tmp_path, monkeypatch):
    """Require the names that others rely on. Other programs need only Orbax to read the arrays."""
    whole, seen = orbax_calls.Saving._make_whole, []
    look = lambda self: (seen.extend(names(tmp_path)), whole(self))
    monkeypatch.setattr(orbax_calls.Saving, "_make_whole", look)
    state = saved(tmp_path)[3]
    assert seen == ["3.orbax-checkpoint-tmp"] and names(tmp_path) == ["3"]
    folder = tmp_path / "checkpoints" / "3"
    assert sorted(path.name for path in folder.iterdir()) == ["facts", "params", "rest"]
    assert json.loads((folder / "facts" / "metadata").read_text())["step"] == 3
    restored = ocp.StandardCheckpointer().restore(folder / "params", state_on(1)[1].params)
    assert_equal(restored, state.params)


def test_no_checkpoint(tmp_path):
    assert Checkpoints(tmp_path).steps == []
    assert Checkpoints(tmp_path, KEEP_ALL).restore_newest(state_on(1)[1]) is None
    with pytest.raises(UserError, match="no checkpoint"):
        Checkpoints(tmp_path).restore_params(state_on(1)[1].params)


# Damage.
def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


DAMAGE = {"flipped": flip, "cut": lambda content: content[: len(content) // 2], "lost": None, "empty": lambda _: b""}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine")
    return folder, saved(folder, (4, 8))


def files_of(folder: Path, step: int) -> list[Path]:
    return sorted(path for path in (folder / "checkpoints" / str(step)).rglob("*") if path.is_file())


@pytest.mark.medium
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_is_harmless_or_detected_and_the_previous_checkpoint_is_used(
    tmp_path, pristine, messages, damage
):
    """Damage every file of a checkpoint in turn. The newest state is restored, or, with a warning, the one before."""
    source, states = pristine
    noticed = set()
    for i, path in enumerate(files_of(source, 8)):
        folder = tmp_path / str(i)
        _copy(source, folder)
        victim = folder / path.relative_to(source)
        change = DAMAGE[damage]
        victim.unlink() if change is None else victim.write_bytes(change(path.read_bytes()))
        messages.clear()
        restored = Checkpoints(folder, KEEP_ALL).restore_newest(state_on(1)[1])
        assert restored
        step = restored[1]["step"]
        assert_equal(restored[0], states[step]._replace(step=step))
        assert step == (4 if messages else 8)
        if messages:
            assert "checkpoint 8 cannot be read" in messages[0] and len(messages) == 1
            assert "bound method" not in messages[0]
            assert names(folder) == ["4"] and len(list((folder / "bad-checkpoints").iterdir())) == 1
            noticed.add(path.parent.name if path.parent.name == "d" else path.name)
    assert {"d", "metadata"} <= noticed  # the arrays' files and the facts


def _copy(source: Path, to: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            (to / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (to / path.relative_to(source)).write_bytes(path.read_bytes())


def test_a_changed_fact_is_noticed(tmp_path):
    saved(tmp_path, seconds={3: 1.5})
    path = tmp_path / "checkpoints" / "3" / "facts" / "metadata"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "seconds": 2.5}))
    with pytest.raises(ValueError, match="differs from what was saved"):
        Checkpoints(tmp_path).facts(3)


def test_another_network_is_refused_with_the_sizes_that_differ(tmp_path):
    saved(tmp_path)
    config = tiny_config()
    wider = replace(config.model, width=48)
    optimizer, _ = make_optimizer(config.optimizer, wider, 8)
    abstract = abstract_state(wider, optimizer, make_mesh(MeshConfig(), jax.devices()[:1]))
    message = r"checkpoint 3 in .* is of another network:(.|\n)*embed\.table: \[272, 32\], not \[272, 48\]"
    with pytest.raises(UserError, match=message):
        Checkpoints(tmp_path, KEEP_ALL).restore_newest(abstract)
    with pytest.raises(UserError, match=message):
        Checkpoints(tmp_path).restore_params(abstract.params)
    assert names(tmp_path) == ["3"]


def test_another_optimizer_is_refused_by_name(tmp_path):
    saved(tmp_path)
    abstract = state_on(1)[1]
    moments = {"mu": abstract.params["embed"]}
    with pytest.raises(UserError, match=r"was made with another optimizer: .*and others are in only one of the two"):
        Checkpoints(tmp_path, KEEP_ALL).restore_newest(abstract._replace(opt_state=moments))
    assert names(tmp_path) == ["3"]


def test_a_folder_with_only_a_checkpoint_s_name_is_set_aside(tmp_path):
    saved(tmp_path)
    (tmp_path / "checkpoints" / "99").mkdir()
    assert Checkpoints(tmp_path).newest == 3
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    assert checkpoints.newest == 3 and names(tmp_path) == ["3"]
    assert len(list((tmp_path / "bad-checkpoints").iterdir())) == 1
    checkpoints.close()


def test_a_failed_deletion_is_reported_and_delays_no_save(tmp_path, monkeypatch, messages):
    seen: list[int] = []
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1), on_saved=seen.append)
    with monkeypatch.context() as patch:
        rename = type(checkpoints.folder).rename

        def forbidden(path, target):
            if str(target).endswith(".deleted"):
                raise PermissionError("Forbidden")
            return rename(path, target)

        patch.setattr(type(checkpoints.folder), "rename", forbidden)
        for step in (1, 2, 3):
            checkpoints.save(step, state_on(1)[0], FACTS)
            assert checkpoints.failing() == 0
        assert set(messages) == {f"checkpoint {step} could not be deleted: Forbidden" for step in (1, 2)}
    checkpoints.close()
    assert seen == [1, 2, 3] and names(tmp_path) == ["1", "2", "3"]
    Checkpoints(tmp_path, CheckpointConfig(keep=1)).close()
    assert names(tmp_path) == ["3"]  # an earlier start could not delete the others


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
    checkpoints = Checkpoints(tmp_path, config)
    with FullDisk():
        for failed in (1, 2, 3):
            checkpoints.save(failed + 1, state_on(1)[0], FACTS)
            assert checkpoints.failing() == failed
            assert checkpoints.failure and checkpoints.steps == [1]
    assert [message.split(" save")[0] for message in messages] == ["1", "2", "3"]
    assert_equal(checkpoints.restore(1, state_on(1)[1])[0], states[1])
    checkpoints.save(5, changed(state_on(1)[0], 5), FACTS)
    assert checkpoints.failing() == 0
    checkpoints.close()
    assert names(tmp_path) == ["5"]


def test_a_failure_found_by_the_next_save_is_recorded(tmp_path, messages):
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    with FullDisk():
        for step in (1, 2):
            checkpoints.save(step, state_on(1)[0], FACTS)
        assert checkpoints.failing() == 2
    assert [message.split(" save")[0] for message in messages] == ["1", "2"]


def test_a_disk_that_stays_away_ends_the_run_with_42(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    away = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(orbax_calls, "make_room", Mock(side_effect=away))
    checkpoints.save(1, state_on(1)[0], FACTS)
    assert checkpoints.failing() == 1 and checkpoints.passing
    monkeypatch.setattr(retry, "SECONDS", 0)
    with pytest.raises(retry.StorageLost, match="Input/output error"):
        checkpoints.save(2, state_on(1)[0], FACTS)


def test_listing_does_not_wait(tmp_path, monkeypatch):
    checkpoints, may_end = Checkpoints(tmp_path, KEEP_ALL), threading.Event()
    make_whole = orbax_calls.Saving._make_whole
    monkeypatch.setattr(orbax_calls.Saving, "_make_whole", lambda self: may_end.wait() and make_whole(self))
    checkpoints.save(1, state_on(1)[0], FACTS)
    assert checkpoints.failing(wait=False) == 0 and checkpoints.pending
    may_end.set()
    checkpoints.close()
    assert checkpoints.steps == [1]
