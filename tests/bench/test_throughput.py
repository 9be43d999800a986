"""Test the line that the throughput program prints, not its figures."""

import json
import sys

import pytest

from bench import throughput


@pytest.mark.medium
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
