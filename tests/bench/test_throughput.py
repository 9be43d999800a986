"""Test the line that the throughput program prints, not its figures."""

import json
import sys
from dataclasses import replace

import jax
import pytest

from bench import collectives, throughput
from bench.throughput import Sizes, sized
from configs.plain import get_config
from configs.schema import MeshConfig, UserError
from training.build import build


def test_it_prints_one_json_line(monkeypatch, capsys):
    """Count the rows of a micro-batch per replica: the devices along `tensor` share them."""
    arguments = "--config=configs/plain.py --model.depth=1 --model.width=64 --batch.sequence_length=32 --timed_steps=1"
    arguments += " --model.heads=2 --model.kv_heads=2 --model.vocab_size=4096"
    words = f"{arguments} --mesh.tensor=2 --mesh.fsdp=2 --rows=3 --micro_batches=2"
    monkeypatch.setattr(sys, "argv", ["throughput", *words.split()])
    assert throughput.main() == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["depth"], line["rows"], line["micro_batches"], line["devices"]) == (1, 3, 2, 8)
    assert line["tokens_per_second"] == pytest.approx(2 * 3 * 4 * 32 / line["step_seconds"], rel=0.05)
    assert line["parameters"] > 2 * 4096 * 64 and line["peak_gib"] > 0


@pytest.mark.medium
@pytest.mark.parametrize(("program", "tokens"), [("measuring_step", 128), ("evaluation", 128), ("sampling", 16 * 63)])
def test_other_programs_take_the_step_s_place(monkeypatch, capsys, program, tokens):
    arguments = f"--config=configs/plain.py --depth=1 --rows=1 --micro_batches=2 --timed_steps=1 --program={program}"
    monkeypatch.setattr(sys, "argv", ["throughput", *arguments.split(), "--batch.sequence_length=64"])
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    assert throughput.main() == 0
    line = json.loads(capsys.readouterr().out)
    assert line["tokens_per_second"] == pytest.approx(tokens / line["step_seconds"], rel=0.05)


def test_sizes():
    config = sized(get_config(), Sizes(depth=20), devices=4)
    assert (config.model.depth, config.model.width, config.model.heads) == (20, 1280, 20)
    batch = replace(config.batch, sequence_length=32, tokens_per_step=768)
    config = sized(replace(config, batch=batch, mesh=MeshConfig(tensor=2, fsdp=2)), Sizes(rows=2), devices=8)
    assert (config.batch.rows_per_device, config.batch.tokens_per_step) == (2, 3 * 2 * 4 * 32)
    config = sized(replace(get_config(), mesh=MeshConfig(tensor=4)), Sizes(rows=1), devices=2)
    with pytest.raises(UserError, match="does not fit the 2"):
        build(config, jax.devices()[:2])


@pytest.mark.parametrize(("program", "word"), [(throughput, "--timed_steps=0"), (collectives, "--rows=0")])
def test_sizes_below_one_are_refused(monkeypatch, program, word):
    monkeypatch.setattr(sys, "argv", ["bench", "--config=configs/plain.py", word])
    with pytest.raises(UserError, match=word.split("=")[0]):
        program.main()
