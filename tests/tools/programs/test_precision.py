"""Test that float32 means float32: by default, products round inputs to bfloat16 on a TPU, to TF32 on a GPU."""

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import pytest

from generation.engine import LONG, Engine
from run.network import Network
from tests.generation.networks import TOKENIZER
from tests.helpers import tiny_config
from training.build import build


def products(jaxpr: Any) -> Counter:
    """Return for each product in a program, kernels' included, its input type and its precision."""
    counts = Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            kinds, precision = {x.aval.dtype.name for x in equation.invars}, equation.params["precision"]
            counts[max(kinds, key=len), str(precision and precision[0])] += 1
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                counts += products(getattr(value, "jaxpr", value))
    return counts


def traced(monkeypatch, platform: str, dtype: str) -> dict[str, Counter]:
    """Return the products of the step with Muon, of evaluation and of generation."""
    for module in ("attention", "layers", "rotary"):
        monkeypatch.setattr(f"model.{module}.platform", lambda: platform)
    config = tiny_config(length=128, rows=2, depth=1, width=256, heads=2, kv_heads=2, head_dim=128, dtype=dtype)
    matrices = replace(config.optimizer.matrices, kind="muon")
    config = replace(config, optimizer=replace(config.optimizer, matrices=matrices))
    built = build(config, jax.devices()[:1])
    state, batch = built.abstract_state, built.abstract_batch()
    engine = Engine(Network(config, TOKENIZER, {}, built.network))
    cache = jax.eval_shape(engine._empty, state.params)
    programs = {
        "step": built.train_step.trace(state, batch),
        "evaluation": built.eval_step.trace(state.params, batch),
        "generation": engine._read.trace(state.params, cache, engine.parts({}, 1, LONG)),
    }
    return {name: products(program.jaxpr) for name, program in programs.items()}


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_float32_network_s_products_take_the_highest_precision(monkeypatch, platform):
    for name, types in traced(monkeypatch, platform, "float32").items():
        assert set(types) == {("float32", "HIGHEST")}, name
        assert sum(types.values()) >= 9  # six per block, the head's, and two in attention


def test_a_bfloat16_network_s_products_take_no_more_than_one_pass_and_muon_s_are_float32(monkeypatch):
    types = traced(monkeypatch, "cpu", "bfloat16")["step"]
    assert types["bfloat16", "None"] >= 3 * 9 and set(types) == {("bfloat16", "None"), ("float32", "HIGHEST")}
    assert types["float32", "HIGHEST"] == 2 * 3  # two stacks of matrices, each in a scan of five iterations
