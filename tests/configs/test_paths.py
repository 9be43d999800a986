"""Test every path option of every command: it accepts a URL, or refuses it before anything happens."""

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, get_args, get_origin

import pytest

from configs.schema import Config, Role, UserError, hints, roles

ROOT = Path(__file__).parents[2]
CONFIG = f"--config={ROOT}/configs/small.py"
# The required arguments of each command, without the path under test.
COMMANDS = {
    "train": [CONFIG],
    "sample": ["--run_dir=x"],
    "evaluate": [],
    "export": ["--run_dir=x", "--out=y"],
    "tools.report": ["x"],
    "tools.plan": [CONFIG],
    "tools.tune": [CONFIG],
    "data.prepare.__main__": ["--source=x", "--out=y"],
    "tools.dataset": ["x"],
    "tools.inspect": ["x"],
    "chat": [],
    "data.prepare.chats": ["mmlu", "--source=x"],
    "tools.doctor": [CONFIG],
    **{f"bench.{name}": [] for name in ("accelerator", "chaos", "compare", "exactness")},
}


def command_module(name: str) -> ModuleType:
    """Return the module that `python -m NAME` runs."""
    module = import_module(name)
    return module if hasattr(module, "main") else import_module(f"{name}.__main__")


TAKES_CONFIG = [name for name, words in COMMANDS.items() if CONFIG in words]
# Options of text that are no paths, or paths that fsspec opens.
OTHERS = """
    license text_extensions name prompt source tokenizer text_column tasks
    topology path system host options reference parts only configs splits recipes
    window_pattern prompts on_event wandb steps
"""


def sections() -> list[tuple[str, type]]:
    """Return every command with the class of its options."""
    modules = [(name, command_module(name)) for name in COMMANDS if name != "tools.doctor"]
    return [("config", Config), *((name, module.Arguments) for name, module in modules)]


def text_options(kind: type) -> list[str]:
    """Return the options of a section that accept any text."""
    plain = {name: get_args(hint)[0] if get_origin(hint) is Annotated else hint for name, hint in hints(kind).items()}
    return [name for name, hint in plain.items() if {str, tuple[str, ...]} & {hint, *get_args(hint)}]


def test_every_option_of_text_is_known_to_be_a_path_or_none():
    left = [
        (command, name)
        for command, kind in sections()
        for name in text_options(kind)
        if Role.PATH not in roles(kind)[name] and name.split(".")[-1] not in OTHERS.split()
    ]
    assert not left


def paths() -> list[tuple[str, list[str], str]]:
    """Return each command with its required arguments and one path option set to a URL that it must refuse."""
    cases = []
    for command, words in COMMANDS.items():
        kinds = [Config] if command in TAKES_CONFIG else []
        kinds += [] if command == "tools.doctor" else [command_module(command).Arguments]
        for name, of in ((name, of) for kind in kinds for name, of in roles(kind).items() if Role.PATH in of):
            url = "s3://bucket/x" if Role.STORE in of else "gs://bucket/x"
            name = {"from_": "from"}.get(name, name)
            if words == ["x"] and name in ("runs", "run_dir"):
                cases.append((command, [url], f"--{name}={url}"))
            else:
                kept = [word for word in words if not word.startswith(f"--{name}=")]
                cases.append((command, [*kept, f"--{name}={url}"], f"--{name}={url}"))
    return cases


@pytest.mark.parametrize(
    ("command", "words", "option"), paths(), ids=lambda part: part if isinstance(part, str) else ""
)
def test_an_unsuitable_url_is_refused_by_name(command, words, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [command, *words])
    with pytest.raises(UserError, match=f"^{re.escape(option)} cannot work: give a path on this machine"):
        command_module(command).main()
    assert not list(tmp_path.iterdir())
