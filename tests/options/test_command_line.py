import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import pytest

import chat
import evaluate
import sample
import train
from interchange import convert
from options.arguments import StartArguments
from options.command_line import parse, parse_arguments, parse_own
from options.files import config_from_json, load_config
from options.schema import Config, EvalConfig, Role, hints, options
from options.validation import validate
from system.errors import UserError
from tools import inspect

ROOT = Path(__file__).parents[2]
SMALL = str(ROOT / "configs/small.py")
LADDER = sorted(
    path for path in (ROOT / "configs").glob("*.py") if re.search("^def get_config", path.read_text(), re.M)
)


FINE = "from configs.schema import Config\ndef get_config(): return Config(name='x')\n"


@dataclass(frozen=True)
class Extra:
    """Options of one command only."""

    accept_changes: bool = False
    """Continue all the same."""


def words_of(error: pytest.CaptureFixture) -> str:
    """Return what was printed, without tyro's boxes and line breaks."""
    out = error.readouterr()
    return " ".join(re.sub("[│╭╮╰╯─]", " ", out.out + out.err).split())


@pytest.mark.parametrize("path", LADDER, ids=lambda path: path.stem)
def test_every_config_of_the_ladder_is_valid_and_named_as_its_file(path):
    config = load_config(str(path))[0]
    validate(config)
    assert config.name == path.stem


@pytest.mark.parametrize("name", ["small", "few-data", "nanochat"])
def test_a_length_in_epochs_replaces_the_steps_and_the_other_way_round(name):
    length = lambda *words: attrgetter("steps", "epochs")(parse("", argv=[f"--config=configs/{name}.py", *words])[0])
    assert length("--epochs=2.5") == length("--epochs=2.5", "--steps=0") == (0, 2.5)
    assert length("--steps=9")[0] == 9
    with pytest.raises(UserError, match="--epochs and --steps both give the length of the run: leave one out"):
        length("--epochs=2", "--steps=9")


@pytest.mark.parametrize(("before", "after"), [([f"--config={SMALL}"], []), ([], ["--config", SMALL])])
def test_overrides_change_single_options(before, after):
    words = ["--steps=7", "--batch.rows_per_device", "16", "--optimizer.schedule.kind=constant"]
    words += ["--eval.prompts", "one", "two words", "--model.dropout=0.5"]
    config, _ = parse("", argv=[*before, *words, *after])
    base = options(load_config(SMALL)[0])
    changes = {name: value for name, value in options(config).items() if value != base[name]}
    assert changes == {
        "steps": 7,
        "batch.rows_per_device": 16,
        "optimizer.schedule.kind": "constant",
        "eval.prompts": ("one", "two words"),
        "model.dropout": 0.5,
        "run_dir": "runs/small",
        "model.short_window": 128,
    }


def test_a_switch_takes_true_and_false_and_a_command_has_options_of_its_own(monkeypatch):
    words = [f"--config={SMALL}", "--deterministic=False", "--model.smear=False", "--model.backout=True"]
    config, extra = parse(None, Extra, [*words, "--accept_changes=True", "--name=True", "--eval.prompts", "f(x=True"])
    assert (config.deterministic, config.model.smear, config.model.backout) == (False, False, True)
    assert (config.name, config.run_dir, config.eval.prompts) == ("True", "runs/True", ("f(x=True",))
    assert extra == Extra(accept_changes=True)
    words = [f"--config={SMALL}", "--deterministic", "False", "--accept-changes", "--run_dir=/x/y", "--model.smear"]
    config, extra = parse(None, Extra, words)
    assert (config.deterministic, config.model.smear, config.run_dir) == (False, True, "/x/y")
    assert extra == Extra(accept_changes=True)
    assert parse(None, Extra, [f"--config={SMALL}"])[1] == Extra(accept_changes=False)
    monkeypatch.setattr(sys, "argv", ["command", "--accept_changes=True"])
    assert parse_arguments(None, Extra).accept_changes
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "argv", ["sample", "--run_dir=~/x", "--tokens=3"])
    assert parse_arguments("", sample.Arguments) == sample.Arguments(run_dir="/home/me/x", tokens=3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run_dir=x", "--temperature=nan"], "--temperature=nan cannot work: expected `float` >= 0"),
        (["--run_dir=x", "--prompt", "\udcff"], "it must be text in UTF-8"),
        (["--run_dir=~nobody-here/x"], "there is no such home folder"),
    ],
)
def test_a_command_without_config_refuses_values_of_wrong_types(words, message, monkeypatch):
    monkeypatch.setattr("sys.argv", ["sample", *words])
    with pytest.raises(UserError, match=re.escape(message)):
        parse_arguments("", sample.Arguments)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--steps=1.5", "1.5"),
        ("--deterministic=no", "Expected one of ('True', 'False')"),
        ("stray", "stray"),
    ],
)
def test_wrong_values_exit_with_code_2_and_are_named(word, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse("", argv=[f"--config={SMALL}", word])
    assert exit_info.value.code == 2
    assert message in words_of(capsys)


def test_a_missing_config_file_is_refused_with_the_existing_ones_or_the_place_to_look(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(ROOT / "configs"))
    assert parse("", argv=["--config=~/small.py"])[0].name == "small"
    known = ", ".join(str(path.relative_to(ROOT)) for path in LADDER)
    for folder, here in (ROOT, known), (tmp_path, "none; run it in the repository"):
        monkeypatch.chdir(folder)
        with pytest.raises(UserError, match=r"--config=nowhere\.py: no such file") as error:
            parse("", argv=["--config=nowhere.py"])
        assert str(error.value).split("configs here: ")[1] == here


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.py", "x = 1", "must define get_config"),
        ("c.py", "def get_config(:", "SyntaxError"),
        ("c.py", "import sys; sys.exit(0)", "SystemExit: 0"),  # it must not look like a complete run
        ("c.py", "import nonexistent_module", "ModuleNotFoundError.*nonexistent_module"),
        ("c.py", FINE + "def derive(config, given): return 1 / 0", "ZeroDivisionError"),
        ("c.py", FINE + "def derive(config, given): pass", r"must define derive\(\)"),
        ("c.yaml", "steps: 3", r"ends in \.py"),
    ],
)
def test_a_config_file_without_a_config_is_refused_with_the_reason(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as error:
        parse("", argv=[f"--config={tmp_path / name}"])
    assert str(error.value).startswith(f"--config={tmp_path / name}: ")


@pytest.mark.parametrize("words", [["-h"], [f"--config={SMALL}", "--help"]])
def test_help_exits_with_0_and_explains_every_option(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit_info:
        parse("What it does.", Extra, words)
    assert exit_info.value.code == 0
    output = words_of(capsys)
    with pytest.raises(SystemExit):
        parse(None, Extra, words)  # with `python -OO` there are no docstrings
    assert "None" not in words_of(capsys).split("--config FILE")[0]
    shown = {name for name in hints(Config) if f"--{name} " in output or f"--{name}, " in output}
    assert shown == {name for name, kind in hints(Config).items() if Role.FILE not in getattr(kind, "__metadata__", ())}
    for text in ("What it does.", "--config FILE", "--accept_changes", "Continue all the same."):
        assert text in output
    assert "Rows of a micro-batch on one device. It never changes the result. `auto`: as many as fit" in output


@pytest.mark.parametrize(
    "config",
    [
        *(load_config(str(path))[0] for path in LADDER),
        Config(name="x", eval=EvalConfig(prompts=("é\n", "two", "")), steps=3),
    ],
)
def test_config_survives_json(config):
    back = config_from_json(json.dumps(dataclasses.asdict(config)))
    assert back == config
    assert hash(back) == hash(config)


@pytest.mark.parametrize(
    ("command", "word", "meant"),
    [
        (sample, "--max_tokens=5", "--tokens"),
        (sample, "--temp=1", "--temperature"),
        (evaluate, "--task=core", "--tasks"),
        (train, "--depth=3", "--model.depth"),
        (train, "--batch.rows_per_devices=4", "--batch.rows_per_device"),
        (train, "--seq_len=3", "--batch.sequence_length"),
        (train, "--accept_change", "--accept_changes"),
        (train, "--no_deterministic", "--deterministic"),
    ],
)
def test_a_mistyped_option_is_answered_with_the_nearest(command, word, meant, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["command", word])
    with pytest.raises(
        UserError, match=rf"^{word.partition('=')[0]}: there is no such option.*; did you mean {meant}\?$"
    ):
        parse_own(None, StartArguments) if command is train else parse_arguments(None, command.Arguments)


@pytest.mark.parametrize(
    "command, words, message",
    [
        (chat, [], r"--run_dir is missing. Talk to .*: python chat.py --run_dir=runs/chat.$"),
        (chat, ["--serve"], r"--run_dir is missing"),
        (convert, ["--source", "x"], r"--out is missing"),
        (convert, [], r"--out and --source are missing"),
        (inspect, [], r"RUN_DIR is missing. .*: python -m tools.inspect RUN.$"),
    ],
)
def test_a_command_without_what_it_needs_says_in_a_line_what_to_type(command, words, message):
    with pytest.raises(UserError, match=f"^{message}") as refused:
        parse_arguments(command.__doc__, command.Arguments, words)
    assert "\n" not in str(refused.value)


def test_a_name_like_no_other_and_an_option_of_config_files_have_their_own_answers():
    with pytest.raises(UserError, match=r"^--lr: there is no such option \(--help lists all\)$"):
        parse(None, argv=[f"--config={SMALL}", "--lr=1"])
    with pytest.raises(UserError, match=r"^--data.workers: only a config file sets this option$"):
        parse(None, argv=[f"--config={SMALL}", "--data.workers=1"])


@pytest.mark.parametrize(
    "module",
    [
        *("chat", "evaluate", "export", "interchange.convert", "reinforce", "sample"),
        *("tools.dataset", "tools.inspect", "tools.plan", "tools.tune", "train"),
    ],
)
def test_mistakes_are_refused_before_slow_imports(module):
    """Run the command without the modules that take seconds to import."""
    slow = ("jax", "flax", "optax", "grain", "orbax", "numpy", "pyarrow")
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({slow})); sys.argv = ['{module}', '--mistyped=1']; "
        f"runpy.run_module('{module}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: --mistyped: there is no such option"), done.stderr
    assert done.stderr.count("\n") == 1
