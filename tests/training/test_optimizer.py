"""Test parameter groups: their members, rates and weight decay."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from options.schema import GroupConfig, MatricesConfig, OptimizerConfig, ScheduleConfig
from system.errors import UserError
from tests.helpers import TINY, sharded
from training.optimizer import make_optimizer, scale_by_adam
from training.sharded import split_model

CONSTANT = ScheduleConfig("constant")
SHAPES = split_model(TINY, jnp.dtype("float32"))[1]


def random_tree(seed):
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(generator.standard_normal(p.shape), jnp.float32), SHAPES)


def test_an_unknown_group_is_refused_with_its_parameter(monkeypatch):
    monkeypatch.setattr("training.optimizer.parameter_groups", lambda model: {"blocks": {0: {"gate": "gates"}}})
    with pytest.raises(UserError, match=r"blocks\.0\.gate declares the optimizer group 'gates', but .* embed,"):
        make_optimizer(OptimizerConfig(), sharded(TINY), 100)


def test_each_group_is_optax_adamw_with_its_own_options():
    groups = {
        "embed": GroupConfig(0.1, beta1=0.7, beta2=0.9, eps=1e-6),
        "matrices": MatricesConfig(0.02, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.3),
        "lm_head": GroupConfig(0.003, beta1=0.5, beta2=0.8, eps=1e-4),
    }
    config = replace(OptimizerConfig(), **groups, schedule=CONSTANT)
    optimizer, _ = make_optimizer(config, sharded(replace(TINY, width=768)), 100)
    params, state = random_tree(0), optimizer.init(random_tree(0))
    for step in range(3):
        updates, state = optimizer.update(random_tree(step + 1), state, params, step=jnp.array(step))
        params = optax.apply_updates(params, updates)
    for name, part in (("embed", "embed"), ("matrices", "blocks"), ("lm_head", "lm_head")):
        g = groups[name]
        plain = optax.adamw(g.peak_rate, g.beta1, g.beta2, g.eps, weight_decay=g.weight_decay)
        expected = random_tree(0)[part]
        plain_state = plain.init(expected)
        for step in range(3):
            updates, plain_state = plain.update(random_tree(step + 1)[part], plain_state, expected)
            expected = optax.apply_updates(expected, updates)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params[part], expected)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_factor_and_a_warmup_hold_for_every_group(kind):
    plain = replace(OptimizerConfig(), matrices=replace(OptimizerConfig().matrices, kind=kind))
    gentle = replace(plain, rate_factor=0.1, schedule=ScheduleConfig(warmup_steps=4))
    (_, full), (_, rates) = (
        make_optimizer(config, sharded(replace(TINY, smear=True, width=32)), 100) for config in (plain, gentle)
    )
    for group, rate in rates.items():
        for step, share in [(0, 0.25), (3, 1), (50, 1)]:
            assert float(rate(step)) == pytest.approx(0.1 * share * float(full[group](step)))
    longer = replace(gentle, x0_lambdas=replace(gentle.x0_lambdas, warmup_steps=8))
    _, later = make_optimizer(longer, sharded(replace(TINY, x0_lambdas=True)), 100)
    assert float(later["x0_lambdas"](3)) == pytest.approx(0.05 * longer.x0_lambdas.peak_rate)
    assert float(later["lm_head"](3)) == float(rates["lm_head"](3))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_matrices_fall_over_a_share_of_their_own(kind):
    """Rate and momentum: an update of the matrices is that of a run in which all groups fall over this share."""

    def updates(schedule: ScheduleConfig) -> dict:
        config = OptimizerConfig(matrices=replace(OptimizerConfig().matrices, kind=kind), schedule=schedule)
        optimizer, _ = make_optimizer(config, sharded(TINY), 100)
        params, step = random_tree(0), jnp.array(55)
        state = optimizer.init(params)
        _, state = optimizer.update(random_tree(1), state, params, step=step)
        return optimizer.update(random_tree(2), state, params, step=step + 1)[0]

    both = updates(ScheduleConfig(warmdown=0.4, matrices_warmdown=0.8))
    equal = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
    of_matrices = updates(ScheduleConfig(warmdown=0.8))
    of_others = updates(ScheduleConfig(warmdown=0.4))
    equal(both["blocks"], of_matrices["blocks"])
    equal(both["lm_head"], of_others["lm_head"])
    for group in ("blocks", "lm_head"):
        with pytest.raises(AssertionError):
            equal(of_matrices[group], of_others[group])


def test_moments_stay_unbiased_if_beta2_changes():
    """After any number of updates by one gradient, Adam's direction has size 1."""
    gradient = jnp.asarray([0.5, -2.0, 3.0])
    state = scale_by_adam(0.9, 0.95, 0.0).init(gradient)
    for beta2 in (0.95, 0.95, 0.999, 0.5):
        direction, state = scale_by_adam(0.9, beta2, 0.0).update(gradient, state)
        np.testing.assert_allclose(direction, jnp.sign(gradient), rtol=1e-5)
