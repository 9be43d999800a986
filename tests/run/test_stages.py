"""A run whose batch grows: a program a stage, tokens that are right, and an end that no kill at a border changes."""

import json
import logging
import shutil
import sys
from pathlib import Path

import jax
import pytest

import tools.dataset.__main__
import train
from hosts.runtime import run_command
from run.events import Events, batch_of
from run.lines import read_metrics
from tests.run.test_continuing import CONFIG

RAMP = "0:256,1e3:512,1e6:1024"  # the second stage begins after 4 steps and 1,024 tokens; the run ends before the third
OPTIONS = (
    *("--config=tiny.py", "--steps=8", f"--batch.ramp={RAMP}", "--batch.tokens_per_step=512", "--eval.every_steps=4"),
    *("--batch.ramp_scaling=root", "--checkpoint.every_steps=1", "--checkpoint.keep=9"),
)
CLOCKS = {"seconds", "tokens_per_second", "data_wait", "time", "goodput", "peak_memory_bytes", "hosts"}


def command(main, *words: str, devices: int = 2) -> int:
    """The exit code of a command run in this process, on so many of its devices."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        some = jax.devices()[:devices]
        patch.setattr(jax, "devices", lambda *_: some)
        patch.setattr(sys, "argv", ["command", *words])
        run_command(main)
    return ended.value.code or 0


def trained(run_dir: str, *more: str, devices: int = 2) -> int:
    return command(train.main, *OPTIONS, f"--run_dir={run_dir}", *more, devices=devices)


def lines(run_dir: Path) -> list[dict]:
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in read_metrics(run_dir)]


def summary(run_dir: Path) -> dict:
    found = json.loads((run_dir / "summary.json").read_text())
    return {name: value for name, value in found.items() if name not in CLOCKS}


class Compilations(logging.Handler):
    """What JAX says that it compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture(scope="module")
def compilations():
    return Compilations()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, compilations):
    """A folder with a config, text, and in `whole` a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "tiny.py").write_text(CONFIG.replace("GroupConfig(0.2)", "GroupConfig(0.2, beta2=0.9)"))
    (folder / "text").mkdir()
    words = (Path(train.__file__).parent / "tests" / "words.txt").read_text().split()
    for i in range(30):
        (folder / "text" / f"{i}.txt").write_text(" ".join(words[i:] + words[:i]))
    with pytest.MonkeyPatch.context() as patch, jax.log_compiles():
        patch.chdir(folder)
        logging.getLogger("jax").addHandler(compilations)
        assert trained("whole") == 0
        logging.getLogger("jax").removeHandler(compilations)
    return folder


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_there_are_as_many_programs_as_stages_that_the_run_comes_to(compilations):
    of_the_step = [said for said in compilations.said if "Finished XLA compilation of jit(train_step)" in said]
    assert len(of_the_step) == 2


def test_tokens_are_counted_by_stage(folder):
    logged = [line for line in lines(folder / "whole") if "loss" in line]
    assert [line["tokens"] for line in logged] == [256, 512, 768, 1024, 1536, 2048, 2560, 3072]
    assert [line["valid_tokens"] for line in logged] == [256] * 4 + [512] * 4
    assert summary(folder / "whole")["tokens"] == 3072
    # The embedding's rate is constant, given for 512 tokens, and follows the root of the batch.
    rates = [line["learning_rate"]["embed"] for line in logged]
    assert rates[3] == pytest.approx(rates[4] * 0.5**0.5) and rates[4] == rates[7]


@pytest.mark.medium
@pytest.mark.parametrize("saved", [3, 4, 5])
def test_killed_around_a_border_it_ends_as_the_untouched_one(folder, saved):
    run_dir = folder / f"killed-after-{saved}"
    shutil.copytree("whole", run_dir)
    (run_dir / "summary.json").unlink()
    for step in range(saved + 1, 9):
        shutil.rmtree(run_dir / "checkpoints" / str(step))
    assert trained(run_dir.name) == 0
    assert lines(run_dir) == lines(folder / "whole")
    assert summary(run_dir) == summary(folder / "whole")


@pytest.mark.slow
def test_other_micro_batches_and_another_mesh_give_the_same_run(folder):
    """K follows in each stage: 4 and 8 micro-batches of a row a device, in place of 1 and 2 of four rows."""
    assert trained("split", "--batch.rows_per_device=1", "--mesh.fsdp=2") == 0
    for ours, theirs in zip(lines(folder / "split"), lines(folder / "whole"), strict=True):
        for name in ours.keys() & {"loss", "val_loss", "grad_norm"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), (ours["step"], name)


def test_a_step_s_rows_are_found_again(folder, capfd):
    assert batch_of(Events("whole").read(), 5, None) == (1536, 512)  # pyright: ignore
    assert command(tools.dataset.__main__.main, "whole", "--step=5", "--rows=1") == 0
    assert "step 5: 16 rows of 32 tokens" in capfd.readouterr().out


def test_another_ramp_is_refused_and_another_spelling_is_none(folder, capfd):
    assert trained("whole", "--batch.ramp=0:256,1000:512,1000000:1024") == 0
    assert "is complete" in capfd.readouterr().out
    assert trained("whole", "--batch.ramp=0:256,2e3:512") == 2
    assert "batch.ramp: 0:256,1000:512,1000000:1024 -> 0:256,2000:512" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("ramp", "says"),
    [
        ("0:256,1e3:544", "--batch.ramp=0:256,1000:544: 544 is 17 rows of 32 tokens, which 8 devices cannot share"),
        ("0:128,1e3:512", "nearest that would work: 256"),
        ("0:256,1e3:1280,1e9:1536", "rows_per_device that would work: [1, 5]"),
        ("0:256,1e3:100", "must grow"),
    ],
)
def test_a_stage_that_cannot_run_is_refused_before_anything_is_computed(folder, capfd, ramp, says):
    assert trained("refused", f"--batch.ramp={ramp}", devices=8) == 2
    assert says in "".join(capfd.readouterr()) and not (folder / "refused").exists()
