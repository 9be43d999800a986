"""Run the commands as a user does: to the end, killed, interrupted, resumed, and with mistakes.

Commands run in this process on two of its devices, and load programs from the session's cache. Those that are killed
get a process of their own. (With eight devices on two cores, threads would wait for each other in every collective.)
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import export
from data.prepare.selection import train_tokenizer
from run.folder import RunFolder
from run.record import ACTIVITIES
from run.saver import Saver
from system.errors import Exit, UserError
from tests.commands import PREEMPTED, ROOT, assert_as_untouched, killed_after, lines_of, run, summary, write_folder
from tests.hosts.processes import environment_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a config and text to train on."""
    return write_folder(tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="module")
def untouched(folder):
    """Return the folder of an uninterrupted run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run("train", patch, "--config=tiny.py", "--run_dir=untouched") == 0
    return folder / "untouched"


def start(folder, *arguments):
    command = [sys.executable, ROOT / "train.py", "--config=tiny.py", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment_of(2), stdout=pipe, stderr=subprocess.STDOUT)


def finish(process) -> str:
    output = process.communicate()[0].decode()
    assert process.returncode == 0, output
    return output


def wait_until(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()[0].decode()
        time.sleep(0.01)


def test_a_run_writes_what_it_promises(untouched):
    lines = RunFolder(untouched).metrics()
    logged = [line for line in lines if "loss" in line]
    assert [line["step"] for line in logged] == list(range(4, 121, 4))
    names = {"tokens", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "data_wait", "seconds"}
    assert names <= logged[0].keys()
    assert [line["step"] for line in lines if "val_bpb" in line] == [0, 40, 80, 120]
    assert logged[-1]["loss"] < logged[0]["loss"] - 0.5
    names = {"steps", "tokens", "seconds", "tokens_per_second", "loss", "val_loss", "val_bpb", "val_bpb_stderr"}
    assert summary(untouched).keys() == names | {"skipped_steps", "params_sha256", "seconds_by_activity"}
    assert summary(untouched)["tokens"] == 120 * 512 and summary(untouched)["seconds_by_activity"]["restore"] == 0
    assert (untouched / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(int(path.name) for path in (untouched / "checkpoints").iterdir()) == [100, 120]
    assert (untouched / "tokenizer" / "tokenizer.json").is_file()
    assert json.loads((untouched / "config.json").read_text())["config"]["model"]["width"] == 32


@pytest.mark.medium
def test_a_folder_whose_owner_has_no_name_here_is_read_and_continued(folder, untouched, monkeypatch, capsys):
    """As with `docker --user`, OpenShift and NFS."""
    monkeypatch.chdir(folder)
    killed_after(100, untouched, "nameless")
    for name in ("pwd.getpwuid", "grp.getgrgid"):
        monkeypatch.setattr(name, Mock(side_effect=KeyError("uid not found")))
    assert run("train", monkeypatch, "--config=tiny.py", "--run_dir=nameless") == 0
    assert_as_untouched(folder / "nameless", untouched)
    capsys.readouterr()
    assert run("evaluate", monkeypatch, "--run_dir=nameless", "--json") == 0
    val_bpb = json.loads(capsys.readouterr().out.splitlines()[-1])["val_bpb"]
    assert val_bpb == pytest.approx(summary(untouched)["val_bpb"], rel=1e-5)
    assert run("inspect_run", monkeypatch, "nameless") == 0 and "verified" in capsys.readouterr().out


def series_of(run_dir: Path) -> list[list[tuple[int, float]]]:
    """Return what TensorBoard shows."""
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return [[(e.step, e.value) for e in events.Scalars(tag)] for tag in ("loss", "val_bpb")]


@pytest.mark.slow
def test_a_run_with_diagnostics_ends_like_one_without(folder, monkeypatch):
    """Require equal bits, compiled as for users."""
    monkeypatch.setenv("XLA_FLAGS", "")
    options = ("--steps=24", "--log.every_steps=2", "--eval.every_steps=900", "--eval.prompts=", "--model.depth=1")
    measured = ("--run_dir=measured", "--diagnostics.every_steps=2")
    for started in [start(folder, *options, *more) for more in (["--run_dir=plain"], measured)]:
        finish(started)
    logged = lambda name: [line for line in lines_of(folder / name) if "loss" in line]
    assert len(logged("measured")) == 12 and logged("measured") == logged("plain")
    assert summary(folder / "measured")["params_sha256"] == summary(folder / "plain")["params_sha256"]
    measurements = [line for line in lines_of(folder / "measured") if "diagnostics" in line]
    assert [line["step"] for line in measurements] == list(range(2, 25, 2))
    last = measurements[-1]["diagnostics"]
    assert last["noise"]["all"] > 0 and last["groups"].keys() == {"embed", "matrices", "lm_head"}
    assert 0 < last["groups"]["matrices"]["update_norm"] < last["groups"]["matrices"]["parameter_norm"]


@pytest.mark.medium
def test_a_run_killed_interrupted_and_preempted_ends_like_an_undisturbed_one(folder, untouched, monkeypatch, capfd):
    """Send SIGKILL after the first checkpoint, then Ctrl-C, then SIGTERM, and repeat the command each time. A second
    process is refused while one writes to the run."""
    monkeypatch.chdir(folder)
    run_dir = folder / "killed twice"
    process = start(folder, "--run_dir=killed twice")
    wait_until((run_dir / "checkpoints" / "20").exists, process)
    process.send_signal(signal.SIGSTOP)
    assert run("train", monkeypatch, "--config=tiny.py", "--run_dir=killed twice") == 2
    assert f"is being written to by another process (process {process.pid} on " in capfd.readouterr().err
    process.kill()
    process.communicate()
    for sign, code in ((signal.SIGINT, 130), (signal.SIGTERM, PREEMPTED)):
        began, process = time.time(), start(folder, "--run_dir=killed twice")
        wait_until(lambda began=began: RunFolder(run_dir).metrics()[-1]["time"] > began, process)
        process.send_signal(sign)
        output = process.communicate()[0].decode()
        assert process.returncode == code and "the same command continues it" in output, output
        assert not (run_dir / "summary.json").exists()
        saved = max(int(path.name) for path in (run_dir / "checkpoints").iterdir())
        assert f"stopped after step {saved} of 120" in output
    assert run("train", monkeypatch, "--config=tiny.py", "--run_dir=killed twice") == 0
    assert "python sample.py --run_dir='killed twice' --prompt=" in capfd.readouterr().out
    assert_as_untouched(run_dir, untouched)
    assert series_of(run_dir) == series_of(untouched) and len(series_of(untouched)[0]) == 30


@pytest.mark.medium
def test_an_exported_and_converted_network_is_evaluated_like_its_run(folder, untouched, monkeypatch, capsys):
    """Export in transformers' format, as nanochats are published."""
    # A folder does not record its compute type. Some versions of JAX would choose bfloat16 here.
    monkeypatch.setattr("run.network.compute_dtype", lambda *of: jnp.dtype("float32"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["export", "--run_dir=untouched", "--out=published"])
    assert export.main() == 0
    for command in "sample", "evaluate":
        assert run(command, monkeypatch, "--run_dir=published") == 2
        assert "python -m interchange.convert --out=runs/NAME --source=published" in capsys.readouterr().err
    assert run("convert", monkeypatch, "--source=published", "--out=converted") == 0
    results = []
    for of in "untouched", "converted":
        capsys.readouterr()
        bits = ("--source=text", "--documents=5", "--against=untouched")
        assert run("evaluate", monkeypatch, f"--run_dir={of}", *bits, "--json") == 0
        results.append(json.loads(capsys.readouterr().out))
    ours, theirs = results
    assert theirs["run_dir"] == "converted" and theirs["step"] == 1
    assert ours["bits_per_byte"] == pytest.approx(theirs["bits_per_byte"], rel=1e-6)
    assert abs(theirs["against"]["difference"]) < 1e-6
    assert all(low < 1e-6 and high > -1e-6 for low, high in (of["against"]["interval"] for of in (ours, theirs)))
    assert run("evaluate", monkeypatch, "--run_dir=converted") == 2
    assert "converted has no text of its own" in capsys.readouterr().err
    assert run("export", monkeypatch, "--run_dir=converted", "--out=published again") == 0
    assert "| training text | not known |" in (folder / "published again/README.md").read_text()
    (folder / "words").mkdir()
    (folder / "words/tokenizer.json").write_text(train_tokenizer([(ROOT / "tests/words.txt").read_text()], 320).json)
    for words, says in (
        (("--source=published", "--out=converted"), "converted exists already"),
        (("--source=untouched", "--out=more"), "untouched holds no network"),
        (("--source=published", "--tokenizer=words", "--out=more"), "tokens, and the network 300"),
    ):
        assert run("convert", monkeypatch, *words) == 2 and says in capsys.readouterr().err


def test_a_step_that_does_not_fit_names_the_planning_command(folder, monkeypatch, capfd):
    used = "RESOURCE_EXHAUSTED: Used 20.3G of 15.7G hbm."
    compiling = Mock(side_effect=jax.errors.JaxRuntimeError(f"{used}\nand a page more"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr("run.fitting.compile_train_steps", compiling)
    assert run("train", monkeypatch, "--config=tiny.py", "--run_dir=large", devices=8) == 2
    log = capfd.readouterr().err
    assert "python -m tools.plan --config=tiny.py --run_dir=large --topology=DEVICE:8" in log
    assert log.strip().endswith(used)
    by_a_device = Mock(side_effect=compiling.side_effect)
    monkeypatch.setattr("run.session.Session.evaluate_first", by_a_device)
    compiling.side_effect = None
    compiling.return_value = (None, None)
    assert run("train", monkeypatch, "--config=tiny.py", "--run_dir=large") == 1
    assert "tools.plan" in capfd.readouterr().err
    compiling.side_effect = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nand more")
    assert run("train", monkeypatch, "--config=tiny.py", "--run_dir=large") == 2
    log = capfd.readouterr().err
    assert "vector memory" in log and "model.head_dim" in log and "tools.plan" not in log


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("train", ["--config=tiny.py", "--batch.rows_per_devise=4"], "rows_per_device"),
        ("train", ["--config=text/0.txt"], "text/0.txt"),
        ("train", ["--config=tiny.py", "--data.source=empty"], "empty"),
        ("train", ["--config=tiny.py", "--run_dir=untouched", "--model.depth=3", "--seed=1"], "model.depth: 2 -> 3"),
        ("sample", ["--run_dir=untouched", "--prompt", "import " * 40], "at most 31"),
        ("sample", ["--run_dir=untouched", "--prompt=the", "--tokens=1000"], "the longest prompt leaves room for "),
        ("sample", ["--run_dir=nothing"], "nothing"),
        (
            "prepare",
            ["--source=text", "--out=nothing", "--tokenizer=untouched/tokenizer", "--vocab_size=400"],
            "--vocab_size is for a tokenizer that is trained here",
        ),
        (
            "evaluate",
            ["--run_dir=untouched", "--tasks=core,mmlu", "--bundle=text"],
            "is not one of core, chatcore, chatcore4",
        ),
        ("evaluate", ["--run_dir=text", "--tasks=core", "--bundle=x"], "text holds no run"),
        ("evaluate", ["--run_dir=untouched", "--tasks=core"], "needs --bundle=DIR"),
        ("evaluate", ["--run_dir=untouched", "--tasks=core", "--bundle=x", "--source=text"], "--tasks: not an option"),
        ("evaluate", ["--run_dir=untouched", "--tasks=core", "--bundle=text"], "text/core.yaml cannot be read"),
        ("train", ["--config=tiny.py", "--init_from=text"], "text holds no run"),
    ],
)
def test_a_mistake_is_one_message_and_code_2(folder, untouched, monkeypatch, capfd, command, arguments, says):
    monkeypatch.chdir(folder)
    (folder / "empty").mkdir(exist_ok=True)
    files = [*untouched.rglob("*"), *(folder / "text").rglob("*")]
    before = {path: path.stat().st_mtime_ns for path in files if path.name != "lock"}
    assert run(command, monkeypatch, *arguments) == 2
    output = "".join(capfd.readouterr())
    assert says in output and "Traceback" not in output
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert not (folder / "nothing").exists() and not (folder / "runs").exists()


def test_docs_explain_every_key_of_a_run(untouched):
    page = (ROOT / "docs/checkpoints.md").read_text()
    files = [untouched / name for name in ("metrics.jsonl", "events.jsonl")]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    keys = {key for line in [*lines, json.loads((untouched / "summary.json").read_text())] for key in line}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == [] and len(keys) >= 30


# Failures of a run.
def damage(path: Path) -> None:
    """Turn a bit in every 256 bytes of a checkpoint's arrays. Some bytes of these files belong to no array."""
    for file in path.rglob("d/*"):
        content = bytearray(file.read_bytes())
        for at in range(0, len(content), 256):
            content[at] ^= 1
        file.write_bytes(content)


@pytest.mark.medium
def test_a_run_in_a_bucket_needs_no_machine(folder, untouched, gcs, monkeypatch, capsys):
    """The bucket has the complete record at the end and after an error. Commands read it, and a run starts from it."""
    monkeypatch.chdir(folder)
    there = "gs://bucket/runs/far"
    command, folders = ("--config=tiny.py", f"--run_dir={there}"), []
    monkeypatch.setattr("train.RunFolder", lambda name: folders.append(RunFolder(name)) or folders[-1])

    def then(step):
        if step == 60:
            raise RuntimeError("a defect")

    with saving(then):
        assert run("train", monkeypatch, *command) == 1
    names = lambda: {name.removeprefix("runs/far/").split("/")[0].split(".tf")[0] for name in gcs.objects}
    assert gcs.objects["runs/far/traceback-0.txt"][1].endswith(b"RuntimeError: a defect\n")
    record = {"config.json", "metrics.jsonl", "events.jsonl", "tokenizer", "tensorboard"}
    assert names() == record | {"checkpoints", "traceback-0.txt"}
    shutil.rmtree(folders[0].local)  # on another machine
    assert run("train", monkeypatch, *command) == 0
    local = folders[1].local
    assert names() >= record | {"summary.json", "loss.png"}
    for name in ("summary.json", "events.jsonl", "metrics.jsonl", "tokenizer/tokenizer.json"):
        assert gcs.objects[f"runs/far/{name}"][1] == (local / name).read_bytes()
    assert_as_untouched(local, untouched)
    written = sorted(path.relative_to(local) for path in (local / "tensorboard").rglob("*.*"))
    assert sorted(name for name in gcs.objects if "/tensorboard/" in name) == [f"runs/far/{path}" for path in written]

    shutil.rmtree(local)
    draw = ("--prompt=import", "--samples=1", "--tokens=8")
    printed = []
    for of in (there, "untouched"):
        capsys.readouterr()
        assert run("sample", monkeypatch, f"--run_dir={of}", *draw) == 0
        printed.append(capsys.readouterr().out.replace(of, ""))
    assert printed[0] == printed[1]
    assert run("inspect_run", monkeypatch, there) == 0
    assert re.search(r"verified(.|\n)*restore +[\d.]+ s\n", capsys.readouterr().out)
    assert run("train", monkeypatch, "--config=tiny.py", f"--init_from={there}", "--steps=1", "--run_dir=further") == 0
    assert not any(path.name.startswith("gs:") for path in folder.iterdir())


@contextmanager
def saving(then):
    """Call `then(step)` after each save starts."""
    save = Saver.save

    def save_then(self, step, *rest):
        save(self, step, *rest)
        then(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "save", save_then)
        yield


def test_a_start_reports_what_is_less_than_requested(folder, untouched, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    options = ("--eval.tokens=1_000_000", "--model.window_pattern=SSSL", "--model.vocab_size=320", "--steps=2")
    text = ("--data.source=text", "--data.tokenizer=untouched/tokenizer")
    monkeypatch.setattr("run.fitting.compile_train_steps", Mock(side_effect=UserError("stop here")))
    assert run("train", monkeypatch, "--config=tiny.py", "--run_dir=less", *options, *text) == 2
    output = capfd.readouterr().out
    assert ": fewer than --eval.tokens=1,000,000, of " in output and "document(s): too few" in output
    assert "has 300 of --model.vocab_size=320 tokens: the others are never seen" in output
    assert "window of each block: SL (S short, L long)\n" in output


def test_training_a_network_further_needs_its_tokenizer(folder, untouched, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    Path("new text").mkdir()
    Path("new text/a.txt").write_text("another text " * 5_000)
    command = ("--config=tiny.py", "--init_from=untouched", "--data.source=new text", "--run_dir=on new", "--steps=40")
    assert run("train", monkeypatch, *command) == 2
    log = capfd.readouterr().err
    assert "give --data.tokenizer=untouched/tokenizer" in log and "preparing" not in log
    assert not Path("on new").exists()


@pytest.mark.medium
def test_a_damaged_checkpoint_is_named_set_aside_and_replaced_and_without_a_sound_one_nothing_starts(
    folder, untouched, monkeypatch, capfd
):
    monkeypatch.chdir(folder)
    subprocess.run(["cp", "-r", "untouched", "half"], check=True)
    listed = lambda: {line.split()[0]: line for line in capfd.readouterr().out.splitlines()}
    assert run("inspect_run", monkeypatch, "half") == 0
    lines = listed()
    assert lines.keys() == {"step", "100", "120", *ACTIVITIES}
    assert "verified" in lines["120"] and f"{summary(untouched)['val_bpb']:.4f}" in lines["120"]
    assert lines["100"].split()[2] == "-"  # not evaluated
    damage(folder / "half" / "checkpoints" / "120")
    assert run("inspect_run", monkeypatch, "half") == Exit.UNREADABLE
    lines = listed()
    assert "verified" in lines["100"] and "DAMAGED" in lines["120"]
    options = {"sample": ["--tokens=4"], "evaluate": ["--json"], "export": [f"--out={folder}/exported-half"]}
    for command, words in options.items():
        assert run(command, monkeypatch, "--run_dir=half", *words) == Exit.UNREADABLE
        log = capfd.readouterr().err
        assert "checkpoint 120 in" in log and "is damaged" in log and "the others: --step=100" in log
    assert run("export", monkeypatch, "--run_dir=half", *options["export"], "--step=90") == Exit.MISTAKE
    assert "--step=90: " in (log := capfd.readouterr().err) and log.strip().endswith("holds 100, 120")
    assert not (folder / "exported-half").exists()
    assert run("evaluate", monkeypatch, "--run_dir=half", "--json", "--step=100") == 0
    assert json.loads(capfd.readouterr().out)["step"] == 100
    (folder / "half" / "summary.json").unlink()
    assert run("train", monkeypatch, "--config=tiny.py", "--run_dir=half") == 0
    output = capfd.readouterr().out
    assert "checkpoint 120 cannot be read" in output and "continuing after step 100" in output
    assert len(list((folder / "half" / "bad-checkpoints").glob("120-*"))) == 1
    assert_as_untouched(folder / "half", untouched)

    for step in ("100", "120"):
        damage(folder / "half" / "checkpoints" / step)
    assert run("sample", monkeypatch, "--run_dir=half") == Exit.UNREADABLE
    assert "is damaged" in capfd.readouterr().err
    (folder / "half" / "summary.json").unlink()
    before = lines_of(folder / "half")
    assert run("train", monkeypatch, "--config=tiny.py", "--run_dir=half") == Exit.UNREADABLE
    assert "none of the checkpoints in" in capfd.readouterr().err
    assert lines_of(folder / "half") == before  # nothing restarts, and nothing is deleted
    assert {path.name for path in (folder / "half" / "checkpoints").iterdir()} == {"100", "120"}
