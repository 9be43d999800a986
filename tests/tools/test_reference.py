"""The reference has every command, and every option with its text."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from configs.command_line import parse, parse_arguments
from configs.schema import Role, hints, roles
from tests.house import python_files
from tools.reference import COMMANDS, pages

ENTRY = re.compile(r"^`(\S+)` · (.+)\n:   (.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def reference():
    return pages()


def test_every_option_of_a_run_has_its_entry(reference):
    entries = ENTRY.findall(reference["options.md"])
    names = {("" if Role.FILE in role else "--") + name for name, role in roles().items()}
    assert len(entries) == len(names) and {name for name, _, _ in entries} == names
    assert all(facts and text for _, facts, text in entries)


def test_an_entry_says_what_the_option_takes_and_whether_it_may_change(reference):
    facts = {name: facts for name, facts, _ in ENTRY.findall(reference["options.md"])}
    assert facts["--name"] == "text; required; may change on resume"
    assert facts["--mesh.data"] == "integer ≥ -1; default `-1`; may change on resume"
    assert facts["--model.dtype"] == "`auto`, `bfloat16`, `float32`; default `auto`"
    assert facts["optimizer.x0_lambdas.beta1"] == "number ≥ 0 and < 1; default `0.96`; in a config file only"


def test_every_command_is_there():
    users = [path for path in python_files() if not path.startswith(("bench/", "tests/"))]
    starts = {path for path in users if re.search(r"^    (run_command\(|sys.exit\(exit_code_of)", Path(path).read_text(), re.M)}
    assert starts - {"data/prepare/raw.py"} == {f"{name.replace('.', '/')}.py" for name in COMMANDS}


@pytest.mark.parametrize("name", [name for name in COMMANDS if hasattr(import_module(name), "Arguments")])
def test_every_option_that_help_prints_is_there(name, reference, capsys):
    module = import_module(name)
    with pytest.raises(SystemExit):
        (parse if hasattr(module, "parse") else parse_arguments)(None, module.Arguments, ["--help"])
    printed = set(re.findall(r"(?<=[│ ]) (--[a-z_.0-9]+)", capsys.readouterr().out))
    section = reference["commands.md"].partition(f"## python {name}")
