"""Test the commands of the program for a day with an accelerator, and that it ends what it started."""

import importlib
import json
import shlex
import sys

import bench.chaos
from bench import accelerator
from options.arguments import StartArguments
from options.command_line import parse, parse_arguments


def test_every_part_is_a_command_that_parses(monkeypatch, tmp_path):
    parts = accelerator.parts_of(accelerator.Arguments(out=str(tmp_path), options="--mesh.fsdp=2"))
    assert [part.name for part in parts[:4]] == ["full d12", "reference d12", "full d20", "reference d20"]
    tune, follow = (part.command for part in parts if "tuned" in part.name)
    require = " --xla_gpu_require_complete_aot_autotune_results=true"
    assert tune[1].replace("UPDATE", "READ") + require == follow[1] and str(tmp_path / "autotuning") in tune[1]
    assert "--deterministic=False" in tune and "--deterministic=True" in follow
    assert {part.name for part in parts} >= {"full d20", "kill and resume", "plain d12"}
    for part in parts:
        if part.name.startswith(("reference", "kill and resume")):
            continue
        _, *program, config = part.command[: [word[:9] for word in part.command].index("--config=") + 1]
        module = importlib.import_module(program[-1].removesuffix(".py"))
        words = part.command[part.command.index(config) :]
        assert parse(None, module.Arguments, words)[0].mesh.fsdp == 2, part.name
    chaos = next(part.command for part in parts if part.name == "kill and resume")
    monkeypatch.setattr(sys, "argv", chaos[2:])
    arguments = parse_arguments(None, bench.chaos.Arguments)
    config, _ = parse(None, StartArguments, [f"--config={arguments.config}", *shlex.split(arguments.options)])
    assert config.mesh.fsdp == 2 and config.model.depth == 4 and config.batch.tokens_per_step == 65536


def test_it_stops_at_its_limit_and_continues_to_the_end(monkeypatch, tmp_path, capsys):
    """Stand-ins print what the programs print. A part starts only if its own limit still fits."""
    real, out = accelerator.parts_of, str(tmp_path / "out")

    def stand_ins(arguments):
        result = {"tokens_per_second": 100, "loss": 7.0, "faults": 3}
        results = {part.name: dict(result) for part in real(arguments)}
        results["full d12, loss in 2 chunks"] |= {"tokens_per_second": 110, "loss": 8.0}
        results["reference d20, fp8"] |= {"attention": "FlashAttention 4"}
        parts = {part.name: part._replace(command=["echo", json.dumps(results[part.name])]) for part in real(arguments)}
        miss = ["sh", "-c", "echo JaxRuntimeError: no cached config >&2; echo more >&2; exit 1"]
        parts["full d12, deterministic as tuned"] = parts["full d12, deterministic as tuned"]._replace(command=miss)
        return list(parts.values())

    monkeypatch.setattr(accelerator, "parts_of", stand_ins)
    monkeypatch.setattr(accelerator, "DEVICE", 'print(\'{"device": "stand-in", "devices": 1, "jax": "0"}\')')
    words = ["accelerator", f"--out={out}", "--reference=true FP8"]
    monkeypatch.setattr(sys, "argv", [*words, "--minutes=3"])
    assert accelerator.main() == 0
    assert "no time yet for kill and resume" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", words)
    assert accelerator.main() == 0
    text = capsys.readouterr().out
    assert text.startswith("kill and resume ...\n") and "no time" not in text and text.count(" ...\n") == 2
    assert "full d12, loss in 2 chunks: 1.100 of the tokens a second of full d12" in text
    assert "loss in 2 chunks: its loss is 8.0, full d12's 7.0" in text
    assert "full d20: 1.000 of the tokens a second of reference d20, fp8 (FlashAttention 4)" in text
    assert "full d12, deterministic as tuned failed: exit code 1: JaxRuntimeError: no cached config\n" in text
    assert "| plain d20 | 100 |" in text and "reference d12, fp8" not in text
