"""Test the choices of kernels that a run stores. XLA makes none on a CPU, so the tests invent their files."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from configs.schema import BatchConfig, Config, UserError
from run.goodput import Times
from run.kernels import CHOICES, keep_choices, use_choices
from run.record import KERNELS, Record
from run.stages import compile_stages


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENSUM_CACHE", str(tmp_path / "cache"))
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def start(run_dir, chosen: dict[str, str]) -> dict[str, str]:
    """Return the stored choices after a start for which XLA would choose `chosen`. XLA keeps choices that it finds."""
    use_choices(run_dir)
    choose(run_dir, chosen)
    keep_choices(run_dir)
    return {path.name: path.read_text() for path in (run_dir / "compiled" / CHOICES).iterdir() if path.is_file()}


def choose(run_dir, chosen: dict[str, str]) -> None:
    """Write choices as XLA does: in a folder `tmp`, which stays, and then renamed."""
    folder = run_dir / "compiled" / CHOICES
    (folder / "tmp").mkdir(exist_ok=True)
    for name, choice in chosen.items():
        if not (folder / name).exists():
            (folder / "tmp" / name).write_text(choice)
            (folder / "tmp" / name).rename(folder / name)


def test_a_run_keeps_its_choices_without_the_cache_or_its_folder(tmp_path, cache):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    assert start(run, {"a": "1", "b": "1"}) == {"a": "1", "b": "1"}
    shutil.rmtree(cache)
    assert start(run, {"a": "2", "c": "2"}) == {"a": "1", "b": "1", "c": "2"}
    Record(run, str(elsewhere)).copy()  # a machine without the folder has the copy
    shutil.rmtree(cache)
    assert start(elsewhere, {"a": "3", "d": "3"}) == {"a": "1", "b": "1", "c": "2", "d": "3"}


def test_a_new_run_starts_with_the_choices_of_others_and_changes_none(tmp_path):
    start(tmp_path / "first", {"a": "1"})
    assert start(tmp_path / "second", {"a": "2", "b": "2"}) == {"a": "1", "b": "2"}
    assert start(tmp_path / "third", {"a": "3", "b": "3"}) == {"a": "1", "b": "2"}
    assert start(tmp_path / "first", {"b": "4"}) == {"a": "1", "b": "4"}  # it had started without the choice
    assert start(tmp_path / "fourth", {}) == {"a": "1", "b": "2"}


def test_a_choice_is_complete_in_the_cache_or_missing(tmp_path, monkeypatch):
    """Other processes may copy the cache while a run that is killed writes to it."""
    use_choices(tmp_path / "run")
    choose(tmp_path / "run", {"a": "1"})

    def killed(path, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        keep_choices(tmp_path / "run")
    assert start(tmp_path / "second", {}) == {}
    assert start(tmp_path / "run", {}) == {"a": "1"} and start(tmp_path / "third", {}) == {"a": "1"}


def test_a_run_may_have_nothing_to_choose(tmp_path):
    assert start(tmp_path / "run", {}) == {}
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "run" / KERNELS, tmp_path / "elsewhere")
    assert start(tmp_path / "elsewhere", {}) == {}


def test_an_archive_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / KERNELS).write_bytes(b"PK half of it")
    with pytest.raises(UserError, match=f"{KERNELS} cannot be read"):
        use_choices(tmp_path / "run")


def test_choices_of_later_compilations_are_stored_too(tmp_path):
    """Compile an earlier stage, as when the newest checkpoint is damaged."""
    run_dir = tmp_path / "run"
    config = Config("run", str(run_dir), steps=8, batch=BatchConfig(2, rows_per_device=1, ramp="0:2,8:4"))

    class Step:
        def __init__(self, name: str):
            self.name = name

        def lower(self, *_: object) -> "Step":
            return self

        def compile(self) -> "Step":
            choose(run_dir, {self.name: "1"})
            return self

    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    stage = lambda name, rows: SimpleNamespace(
        config=config,
        mesh=mesh,
        batch_shape=(rows, 1, 2),
        train_step=Step(name),
        measuring_step=None,
        abstract_state=None,
        abstract_batch=lambda: None,
    )
    programs, builds = [], [stage("first", 1), stage("second", 2)]
    for newest, kept in ((6, ["second"]), (2, ["first", "second"])):
        compile_stages(programs, builds, newest, Times())  # pyright: ignore
        assert sorted(ZipFile(run_dir / KERNELS).namelist()) == kept


def test_programs_are_compiled_into_the_runs_folder(tmp_path):
    use_choices(tmp_path / "run")
    jax.jit(lambda x: 3 * x)(1.5)
    assert [path for path in (tmp_path / "run" / "compiled").iterdir() if path.is_file()]
