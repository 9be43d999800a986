"""Test the standard error of bits per byte."""

import numpy as np
import pytest

from evaluation.evaluator import evaluate


def of_sums(losses: np.ndarray, counts: np.ndarray, text_bytes: np.ndarray) -> dict:
    """Evaluate batches with these sums, by batch and micro-batch."""
    batches = [{"losses": of, "counts": by} for of, by in zip(losses, counts)]
    eval_step = lambda params, batch: (batch["losses"], batch["counts"])
    return evaluate(eval_step, {}, batches, text_bytes)  # pyright: ignore


def test_the_error_is_the_standard_deviation_over_evaluations():
    """Compare it with the standard deviation over evaluations of 25 batches of two micro-batches of unequal sizes."""
    random = np.random.default_rng(0)
    sizes = random.integers(100, 5000, (2000, 50))
    losses = sizes * 1.1 + random.standard_normal(sizes.shape) * np.sqrt(sizes) * 3
    results = [of_sums(of.reshape(25, 2), by.reshape(25, 2) // 4, by) for of, by in zip(losses, sizes)]
    values, errors = ([result[name] for result in results] for name in ("val_bpb", "val_bpb_stderr"))
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.05)


def test_a_single_micro_batch_has_no_error_and_empty_ones_do_not_count():
    result = of_sums(np.array([[5.0, 0.0]]), np.array([[4, 0]]), np.array([10, 0]))
    assert result["val_bpb_stderr"] is None and result["val_loss"] == 5 / 4
