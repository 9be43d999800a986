"""Test the commands of the program for a day with an accelerator, and that it ends what it started."""

import importlib
import shlex
import sys

import bench.chaos
import train
from bench import accelerator
from configs.command_line import parse, parse_arguments


def test_every_part_is_a_command_that_parses(monkeypatch, tmp_path):
    parts = accelerator.parts_of(accelerator.Arguments(out=str(tmp_path), options="--mesh.fsdp=2"))
    assert [part.name for part in parts[:2]] == ["plain d12", "full d12"]
    assert {part.name for part in parts} >= {"full d20", "kill and resume", "train.py", "plain d12, 8 rows"}
    for part in parts:
        if part.name in ("reference", "kill and resume"):
            continue
        _, *program, config = part.command[: [word[:9] for word in part.command].index("--config=") + 1]
        module = importlib.import_module(program[-1].removesuffix(".py"))
        words = part.command[part.command.index(config) :]
        assert parse(None, module.Arguments, words)[0].mesh.fsdp == 2, part.name
    chaos = next(part.command for part in parts if part.name == "kill and resume")
    monkeypatch.setattr(sys, "argv", chaos[2:])
    arguments = parse_arguments(None, bench.chaos.Arguments)
    config, _ = parse(None, train.Arguments, [f"--config={arguments.config}", *shlex.split(arguments.options)])
    assert config.mesh.fsdp == 2 and config.model.depth == 4 and config.batch.tokens_per_step == 65536
