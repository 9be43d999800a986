"""The choices of kernels that a run keeps. On a CPU XLA makes none, so their files are made up here."""

import shutil

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from run.folder import record_files
from run.kernels import CHOICES, keep_choices, use_choices


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENSUM_CACHE", str(tmp_path / "cache"))
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def start(run_dir, chosen: dict[str, str]) -> dict[str, str]:
    """What a start of the run goes on with, where XLA would choose so: a choice that it finds is not made anew."""
    use_choices(run_dir)
    folder = run_dir / "compiled" / CHOICES
    for name, choice in chosen.items():
        if not (folder / name).exists():
            (folder / name).write_text(choice)
    keep_choices(run_dir)
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_run_goes_on_with_its_choices_whatever_becomes_of_the_cache_or_of_its_folder(tmp_path, cache):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    assert start(run, {"a": "1", "b": "1"}) == {"a": "1", "b": "1"}
    shutil.rmtree(cache)
    assert start(run, {"a": "2", "c": "2"}) == {"a": "1", "b": "1", "c": "2"}
    # A machine without the folder has what lies beside the checkpoints (run/folder.py).
    elsewhere.mkdir()
    for path in record_files(run):
        if path.exists():
            shutil.copy(path, elsewhere)
    shutil.rmtree(cache)
    assert start(elsewhere, {"a": "3", "d": "3"}) == {"a": "1", "b": "1", "c": "2", "d": "3"}


def test_a_new_run_begins_with_the_choices_of_others_and_changes_none(tmp_path):
    start(tmp_path / "first", {"a": "1"})
    assert start(tmp_path / "second", {"a": "2", "b": "2"}) == {"a": "1", "b": "2"}
    assert start(tmp_path / "third", {"a": "3", "b": "3"}) == {"a": "1", "b": "2"}
    assert start(tmp_path / "first", {"b": "4"}) == {"a": "1", "b": "4"}  # it had begun without
    assert start(tmp_path / "fourth", {}) == {"a": "1", "b": "2"}


def test_programs_are_compiled_into_the_runs_folder(tmp_path):
    use_choices(tmp_path / "run")
    jax.jit(lambda x: 3 * x)(1.5)
    assert [path for path in (tmp_path / "run" / "compiled").iterdir() if path.is_file()]
