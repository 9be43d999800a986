"""Test the training of nanochat's network on our batches: its schedules, its evaluation, and a run of its own code."""

import json
import math
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench import nanochat
from bench.nanochat import Schedules, scaled, summed
from configs.schema import UserError
from data.loader import StepBatches
from evaluation.evaluator import evaluate
from model.loss import softcap
from run.session import open_training
from tests.helpers import tiny_config
from tests.nanochat_checkout import import_nanochat
from tests.test_train import write_folder
from training.build import build
from training.state import split_model

WORDS = ["--config=tiny.py", "--out=out", "--compile=False"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return the current folder, with a config and text to train on. JAX has one device, as in the command."""
    monkeypatch.chdir(write_folder(tmp_path))
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    return tmp_path


def trained(monkeypatch, *words: str) -> int:
    """Return the exit code of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["bench.nanochat", *WORDS, *words])
    return nanochat.main()


def test_schedules_have_the_values_worked_out_by_hand():
    """Expect a warmdown of 650 steps after 350, which the warmup of the momentum outlasts by 50."""
    of = Schedules(1000)
    assert [of.rate(step) for step in (0, 19, 39, 40, 350)] == pytest.approx([0.025, 0.5, 1, 1, 1])
    assert [of.rate(step) for step in (675, 1000)] == pytest.approx([0.525, 0.05])
    assert [of.momentum(step) for step in (0, 200, 399)] == pytest.approx([0.85, 0.91, 0.9697])
    assert [of.momentum(step) for step in (415, 675, 1000)] == pytest.approx([0.963, 0.935, 0.9])
    assert [of.decay(step) for step in (0, 250, 500, 1000)] == pytest.approx([1, (2 + math.sqrt(2)) / 4, 0.5, 0])
    assert Schedules(30).rate(29) == pytest.approx(0.75)  # the warmup comes first


def test_rates_and_decay_scale_with_the_batch_and_the_network():
    """Take a batch of 1/64 of the reference's, and a twentieth of its parameters."""
    rates = {"unembedding_lr": 0.001, "embedding_lr": 0.0375, "scalar_lr": 0.0625, "matrix_lr": 0.0025}
    assert scaled(5, 100, 2**13) == pytest.approx(rates | {"weight_decay": 0.7})


def test_bits_per_byte_are_those_of_our_evaluation():
    torch = pytest.importorskip("torch")
    built = build(tiny_config(rows=6, rows_per_device=3), jax.devices()[:1])
    graphdef, _ = split_model(built.config.model, built.dtype)
    params, generator = built.create_state().params, np.random.default_rng(0)
    tokens = generator.integers(0, built.config.model.vocab_size, (2, *built.batch_shape), np.int32)
    weights = generator.integers(0, 2, built.batch_shape).astype(np.float32)
    batch = {"inputs": tokens[0], "targets": tokens[1], "weights": weights}

    def network(inputs, targets, loss_reduction):
        logits = softcap(nnx.merge(graphdef, params)(jnp.asarray(inputs.int().numpy()))[0], built.config.model.softcap)
        logits = torch.tensor(np.asarray(logits)).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction=loss_reduction)

    sizes = np.array([70, 50])
    theirs = evaluate(lambda _, batch: summed(network, batch, "cpu"), {}, [batch], sizes)
    ours = evaluate(built.eval_step, params, [jax.device_put(batch, built.batch_sharding)], sizes)
    assert theirs == pytest.approx(ours, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--steps=0", "--steps"),
        ("--out=old", "old/metrics.jsonl is of an earlier run"),
    ],
)
def test_mistakes_are_refused_before_any_work(folder, monkeypatch, words, reason):
    (folder / "old").mkdir()
    (folder / "old" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=reason):
        trained(monkeypatch, words)
    assert not (folder / "out").exists()


@pytest.mark.medium
def test_nanochat_learns_from_our_batches(folder, monkeypatch, capsys):
    """Expect the rows of train.py in its order, its evaluated steps, and a uniform prediction before step 0."""
    pytest.importorskip("torch")
    if "NANOCHAT_DIR" not in os.environ:
        pytest.skip("NANOCHAT_DIR names no checkout of nanochat")
    import_nanochat(monkeypatch, "gpt")
    words = ("--seed=3", "--steps=60", "--eval.every_steps=20")
    seen, step = [], nanochat.Trainer.step

    def recorded(trainer, number, batch):
        begins = trainer.network.lm_head.weight.tolist() if len(seen) < 3 else [], len(trainer.optimizer.state)
        seen.append((number, batch, begins))
        step(trainer, number, batch)

    monkeypatch.setattr(nanochat.Trainer, "step", recorded)
    assert trained(monkeypatch, *words) == 0
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["tokens"]) for line in lines] == [(n, 512 * n) for n in (0, 20, 40, 60)]
    assert lines[0]["seconds"] < lines[1]["seconds"] < lines[2]["seconds"] < lines[3]["seconds"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]).items() >= lines[-1].items()

    config, _ = nanochat.parse(None, nanochat.Arguments, [*WORDS, *words])
    (built,), text, evaluator = open_training(config)
    tokens = sum(float(batch["weights"].sum()) for batch in evaluator.batches)
    bits = [line["val_bpb"] for line in lines]
    assert bits[0] == pytest.approx(math.log2(300) * tokens / evaluator.text_bytes.sum(), rel=1e-4)
    assert bits[0] > bits[1] > bits[2] > bits[3]

    expected = StepBatches(text.train, text.mixture, 3, built.batch_shape, np.arange(2))
    numbers, batches, begins = zip(*seen)
    assert numbers == (0, *range(60)) and begins[0] == begins[1] != begins[2]  # the first one compiles, and is undone
    for i, batch in enumerate(batches[1:]):
        np.testing.assert_array_equal(batch["inputs"], expected[i]["inputs"])
        np.testing.assert_array_equal(batch["targets"], expected[i]["targets"])
