"""Test a run with a growing batch: one program per stage, correct tokens, and exact resumes at stage borders."""

import logging

import jax
import pytest

from run.record import Events, batch_of
from tests.run.test_continuing import CONFIG
from tests.test_train import figures, killed_after, lines_of, run, write_folder

RAMP = "0:256,1e3:512,1e6:1024"  # the second stage starts after 4 steps of 256; the third is never reached
OPTIONS = (
    *("--config=tiny.py", "--steps=8", f"--batch.ramp={RAMP}", "--batch.tokens_per_step=512", "--eval.every_steps=4"),
    *("--batch.ramp_scaling=root", "--checkpoint.every_steps=1", "--checkpoint.keep=9"),
)


def trained(run_dir: str, *more: str, devices: int = 2) -> int:
    with pytest.MonkeyPatch.context() as patch:
        return run("train", patch, *OPTIONS, f"--run_dir={run_dir}", *more, devices=devices)


class Compilations(logging.Handler):
    """Record JAX's messages about compilations."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(scope="module")
def compilations():
    return Compilations()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, compilations):
    """Return a folder with a config, text, and in `whole` an uninterrupted run."""
    config = CONFIG.replace("GroupConfig(0.2)", "GroupConfig(0.2, beta2=0.9)").replace(
        "prompts=()", 'prompts=("the ",)'
    )
    folder = write_folder(tmp_path_factory.mktemp("user"), config)
    with pytest.MonkeyPatch.context() as patch, jax.log_compiles():
        patch.chdir(folder)
        logging.getLogger("jax").addHandler(compilations)
        assert trained("whole") == 0
        logging.getLogger("jax").removeHandler(compilations)
    return folder


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_each_stage_that_the_run_reaches_has_one_program_and_evaluations_have_one(compilations):
    compiled = lambda name: sum(f"Finished XLA compilation of jit({name})" in line for line in compilations.lines)
    assert [compiled(name) for name in ("train_step", "sums", "generate")] == [2, 1, 1]


def test_tokens_are_counted_by_stage(folder):
    logged = [line for line in lines_of(folder / "whole") if "loss" in line]
    assert [line["tokens"] for line in logged] == [256, 512, 768, 1024, 1536, 2048, 2560, 3072]
    assert [line["valid_tokens"] for line in logged] == [256] * 4 + [512] * 4
    assert figures(folder / "whole")["tokens"] == 3072
    # The embedding's rate is constant, defined for 512 tokens, and scales with the root of the batch.
    rates = [line["learning_rate"]["embed"] for line in logged]
    assert rates[3] == pytest.approx(rates[4] * 0.5**0.5) and rates[4] == rates[7]


@pytest.mark.medium
@pytest.mark.parametrize("saved", [3, 4])
def test_a_run_killed_around_a_border_ends_like_an_undisturbed_one(folder, saved):
    run_dir = killed_after(saved, folder / "whole", folder / f"killed-after-{saved}")
    assert trained(run_dir.name) == 0
    assert lines_of(run_dir) == lines_of(folder / "whole")
    assert figures(run_dir) == figures(folder / "whole")


@pytest.mark.slow
def test_other_micro_batches_and_another_mesh_give_the_same_run(folder):
    """K differs in each stage: 4 and 8 micro-batches of one row per device, instead of 1 and 2 of four rows."""
    assert trained("split", "--batch.rows_per_device=1", "--mesh.fsdp=2") == 0
    for ours, theirs in zip(lines_of(folder / "split"), lines_of(folder / "whole"), strict=True):
        for name in ours.keys() & {"loss", "val_loss", "grad_norm"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), (ours["step"], name)


def test_a_step_s_rows_are_found_again(folder, monkeypatch, capfd):
    assert batch_of(Events("whole").read(), 5, None) == (1536, 512)  # pyright: ignore
    assert run("inspect", monkeypatch, "whole", "--step=5", "--rows=1") == 0
    assert "step 5: 16 rows of 32 tokens" in capfd.readouterr().out


def test_another_ramp_is_refused_but_not_another_spelling(folder, capfd):
    assert trained("whole", "--batch.ramp=0:256,1000:512,1000000:1024") == 0
    assert "is complete" in capfd.readouterr().out
    assert trained("whole", "--batch.ramp=0:256,2e3:512") == 2
    assert "batch.ramp: 0:256,1000:512,1000000:1024 -> 0:256,2000:512" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("ramp", "says"),
    [
        ("0:256,1e3:544", "--batch.ramp=0:256,1000:544: 544 is 17 rows of 32 tokens, which 8 devices cannot share"),
        ("0:256,1e3:1280,1e9:1536", "rows_per_device that would work: [1, 5]"),
    ],
)
def test_a_stage_that_cannot_run_is_refused_before_anything_is_computed(folder, capfd, ramp, says):
    assert trained("refused", f"--batch.ramp={ramp}", devices=8) == 2
    assert says in "".join(capfd.readouterr()) and not (folder / "refused").exists()
