"""Test the standard error of bits per byte, and the figures of each dataset."""

import math

import numpy as np
import pytest

from evaluation.evaluator import evaluate


def of_sums(losses: np.ndarray, counts: np.ndarray, text_bytes: np.ndarray, names: tuple[str, ...] = ()) -> dict:
    """Evaluate batches with these sums, by batch and micro-batch."""
    batches = [{"losses": of, "counts": by} for of, by in zip(losses, counts)]
    eval_step = lambda params, batch: (batch["losses"], batch["counts"])
    return evaluate(eval_step, {}, batches, np.atleast_2d(text_bytes), names=names)  # pyright: ignore


def test_the_error_is_the_standard_deviation_over_evaluations():
    """Compare it with the standard deviation over evaluations of five batches of ten micro-batches of unequal sizes."""
    random = np.random.default_rng(0)
    sizes = random.integers(100, 5000, (1000, 50))
    losses = sizes * 1.1 + random.standard_normal(sizes.shape) * np.sqrt(sizes) * 3
    results = [of_sums(of.reshape(5, 10), by.reshape(5, 10) // 4, by) for of, by in zip(losses, sizes)]
    values, errors = ([result[name] for result in results] for name in ("val_bpb", "val_bpb_stderr"))
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.05)


def test_a_single_micro_batch_has_no_error_and_empty_ones_do_not_count():
    result = of_sums(np.array([[5.0, 0.0]]), np.array([[4, 0]]), np.array([10, 0]))
    assert result["val_bpb_stderr"] is None and result["val_loss"] == 5 / 4


def test_the_variance_between_the_sources_of_a_mixture_is_no_error():
    losses, sizes = np.array([[6.0, 6.2, 13.0, 13.2]]), np.array([[10, 10, 0, 0], [0, 0, 10, 10]])
    result = of_sums(losses, np.full((1, 4), 4), sizes, ("low", "high"))
    assert result["val_bpb_stderr"] == pytest.approx(math.sqrt(0.08) / 40 / math.log(2))
    few = of_sums(losses[:, :3], np.full((1, 3), 4), sizes[:, :3], ("low", "high"))
    assert few["val_bpb_stderr"] is None  # nothing is known of the variance of `high`


def test_each_dataset_of_a_mixture_has_its_bits_per_byte():
    losses, sizes = np.array([[4.0, 6.0, 3.0, 0.0]]), np.array([[10, 20, 0, 0], [0, 0, 30, 0], [0, 0, 0, 0]])
    result = of_sums(losses, np.array([[4, 4, 4, 0]]), sizes, ("a", "b", "none"))
    assert result["val_bpb_of"] == pytest.approx({"a": 10 / 30 / math.log(2), "b": 0.1 / math.log(2), "none": None})
    assert result["val_bpb"] == pytest.approx(13 / 60 / math.log(2))
