"""Test the standard error of bits per byte."""

import numpy as np
import pytest

from evaluation.bits_per_byte import evaluate


def of_sums(losses: np.ndarray, counts: np.ndarray, text_bytes: np.ndarray) -> dict:
    """Evaluate batches with these sums, by batch and micro-batch."""
    batches = [{"losses": of, "counts": by} for of, by in zip(losses, counts)]
    eval_step = lambda params, batch: (batch["losses"], batch["counts"])
    return evaluate(eval_step, {}, batches, text_bytes)  # pyright: ignore


def test_the_error_is_the_standard_deviation_over_evaluations():
    """Compare it with the standard deviation over many evaluations of eight batches of two micro-batches."""
    generator = np.random.default_rng(0)
    values, errors = [], []
    for _ in range(2_000):
        text_bytes = generator.integers(800, 1_200, 16)
        losses = text_bytes * generator.normal(1.0, 0.1, 16)
        result = of_sums(losses.reshape(8, 2), text_bytes.reshape(8, 2) // 4, text_bytes)
        values.append(result["val_bpb"])
        errors.append(result["val_bpb_stderr"])
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.05)


def test_a_single_micro_batch_has_no_error_and_empty_ones_do_not_count():
    result = of_sums(np.array([[5.0, 0.0]]), np.array([[4, 0]]), np.array([10, 0]))
    assert result["val_bpb_stderr"] is None and result["val_loss"] == 5 / 4
