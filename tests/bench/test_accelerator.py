"""Run the program for a day with an accelerator on a CPU: it resumes, records failures and stops in time."""

import importlib
import json
import shlex
import sys

import pytest

import bench.chaos
import train
from bench import accelerator
from configs.command_line import parse, parse_arguments
from configs.schema import UserError

OPTIONS = "--batch.sequence_length=32 --batch.tokens_per_step=128 --model.vocab_size=512 --model.head_dim=64"


def run(monkeypatch, out, *words):
    arguments = [f"--out={out}", "--plain=configs/plain.py", "--full=configs/small.py", "--depths", "2", "--rows", "2"]
    monkeypatch.setattr(sys, "argv", ["accelerator", *arguments, "--micro_batches=2", f"--options={OPTIONS}", *words])
    assert accelerator.main() == 0
    return json.loads((out / "accelerator.json").read_text())


@pytest.mark.slow
def test_it_resumes_and_reports_what_is_missing(monkeypatch, tmp_path, capsys):
    parts_of = accelerator.parts_of  # the limits are for accelerators
    monkeypatch.setattr(accelerator, "parts_of", lambda *a: [part._replace(limit=1800) for part in parts_of(*a)])
    with pytest.raises(UserError, match="nothing"):
        run(monkeypatch, tmp_path, "--parts", "nothing")
    none = run(monkeypatch, tmp_path, "--minutes=0.001")
    assert none["parts"] == {} and "plain d2" in none["no_time_for"]
    reference = "--reference=echo noise >&2; echo one; echo '{\"tokens_per_second\": 5}'"
    first = run(monkeypatch, tmp_path, "--minutes=99", reference, "--parts", "reference", "plain d2")
    assert first["parts"]["reference"]["result"] == {"tokens_per_second": 5}
    measured = first["parts"]["plain d2"]["result"]
    assert measured["depth"] == 2 and measured["rows"] == 2
    capsys.readouterr()
    again = run(
        monkeypatch, tmp_path, "--minutes=99", "--reference=echo broken >&2; exit 3", "--parts", "reference", "plain d2"
    )
    assert "plain d2 ..." not in capsys.readouterr().out  # it is not measured again
    failed = again["parts"]["reference"]
    assert failed["failed"] == "exit code 3" and failed["last_lines"] == ["broken"]
    summary = (tmp_path / "summary.md").read_text()
    assert "- reference failed: exit code 3" in summary and "| plain d2 | " in summary


def test_each_part_is_compared_with_the_one_that_it_varies():
    rates = {"plain d12": 100, "full d12": 90, "plain d12, windows": 110, "reference": 80, "train.py": 99}
    results = {name: {"tokens_per_second": rate, "seconds_of_a_save": 0.5} for name, rate in rates.items()}
    lines = "\n".join(accelerator.comparisons(results | {"kill and resume": {}}))
    figures = ("full d12: 0.900", "plain d12, windows: 1.100", "plain d12: 1.250", "full d12: 1.125", "train.py: 0.990")
    assert all(f"{figure} of the tokens a second of " in lines for figure in figures)


def test_a_part_is_ended_with_all_that_it_started(tmp_path):
    command = ["bash", "-c", "sleep 1000 & echo $! > pid; echo begun; wait"]
    command[2] = command[2].replace("pid", str(tmp_path / "pid"), 1)
    part = accelerator.Part("long", command, 1, accelerator.last_json)
    done = accelerator.carry_out(part, tmp_path / "log", 1)
    assert done["failed"] == "not done in 1 s" and done["last_lines"] == ["begun"]


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
