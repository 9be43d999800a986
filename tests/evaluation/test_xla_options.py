"""Test that every program whose results a run records is compiled with `training.mesh.xla_options`."""

import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from evaluation.scorer import make_score
from generation.engine import Engine
from run.network import Network
from tests.generation.networks import TOKENIZER
from tests.helpers import tiny_config
from training.build import build


def compile_all(config) -> list:
    """Return functions that compile the step, the evaluation, a sample and scores."""
    built = build(config)
    params, batch, rows = built.abstract_state.params, built.abstract_batch(), built.batch_shape[1]
    numbers = lambda *shape: np.ones(shape, np.int32)
    score = numbers(rows, 0), numbers(rows, 2, 5), numbers(rows, 2), numbers(rows, 2) + 1, numbers()
    return [
        lambda: built.train_step.lower(built.abstract_state, batch).compile(),
        lambda: built.measuring_step.lower(built.abstract_state, batch).compile(),
        lambda: built.eval_step.lower(params, batch).compile(),
        lambda: Engine(Network(config, TOKENIZER, built.create_state().params, built.network)).compile(),
        lambda: make_score(built.network, 8)(built.create_state().params, *score),
    ]


@pytest.mark.medium
def test_programs_that_a_run_records_take_the_options(monkeypatch):
    """On an H100, the evaluation of equal runs differed in its last bits without them."""
    for module in ("training.step", "generation.engine", "evaluation.scorer"):
        monkeypatch.setattr(f"{module}.xla_options", lambda *_: {"xla_no_such_option": True})
    for compile_one in compile_all(tiny_config()):
        with pytest.raises(JaxRuntimeError, match="xla_no_such_option"):
            compile_one()
