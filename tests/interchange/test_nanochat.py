"""Compare our network with each of its options, and Muon, with nanochat's own modules from NANOCHAT_DIR."""

import os
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
NANOCHAT = os.environ.get("NANOCHAT_DIR")
pytestmark = pytest.mark.skipif(not NANOCHAT, reason="NANOCHAT_DIR names no checkout of nanochat")

from configs.schema import MeshConfig, MuonConfig, ScheduleConfig
from interchange.formats import turned
from model.gpt import GPT
from model.loss import loss_sums, softcap
from tests.evaluation import core_bundle
from tests.helpers import arrays_of, perturbed
from tests.nanochat_checkout import import_nanochat, their_name
from training.layout import shard_layout
from training.mesh import make_mesh
from training.muon import muon
from training.optimizer import path_name

LENGTH = 256  # a quarter of it, rounded up to 128, is a short window
CONFIG = replace(core_bundle.CONFIG, depth=4)
TOKENS = np.random.default_rng(0).integers(0, 320, (2, LENGTH + 1))


@pytest.fixture(scope="module")
def nanochat():
    """Return its modules, in float32 and without compilation."""
    with pytest.MonkeyPatch.context() as patch:
        yield import_nanochat(patch, "gpt", "optim")
        for name in [name for name in sys.modules if name.startswith("nanochat")]:
            del sys.modules[name]


@pytest.mark.parametrize("without", [None, "smear", "backout", "x0_lambdas", "resid_lambdas", "value_embeddings"])
def test_logits_and_gradients_are_equal(nanochat, without):
    """Compare with all features, and without each of ours. Neutral values of nanochat's parameters switch a feature off
    there."""
    config = replace(CONFIG, **({without: False} if without else {}))
    graphdef, state = nnx.split(GPT(config, jnp.dtype("float32"), rngs=nnx.Rngs(0)))
    params = perturbed(nnx.to_pure_dict(state))
    sizes = {"n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 64, "vocab_size": 320, "sequence_len": LENGTH}
    theirs = nanochat[0].GPT(nanochat[0].GPTConfig(**sizes, window_pattern="SSSL"))
    theirs.init_weights()
    by_name = dict(theirs.named_parameters())
    neutral = {"smear_lambda": 0, "backout_lambda": 0, "x0_lambdas": 0, "resid_lambdas": 1}
    with torch.no_grad():
        for name, parameter in by_name.items():
            parameter.fill_(neutral.get(name, 0))
        for name, leaf in arrays_of(params).items():
            by_name[their_name(name)].copy_(torch.tensor(turned(name, leaf)))
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    ours = softcap(nnx.merge(graphdef, params)(jnp.asarray(inputs))[0], config.softcap)
    with torch.no_grad():
        expected = theirs(torch.tensor(inputs)).numpy()
    np.testing.assert_allclose(ours, expected, atol=2e-4)

    def mean(params):
        model, weights = nnx.merge(graphdef, params), jnp.ones(inputs.shape)
        return loss_sums(model, jnp.asarray(inputs), jnp.asarray(targets), weights)[0] / inputs.size

    theirs(torch.tensor(inputs), torch.tensor(targets)).backward()
    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.grad(mean)(params)):
        name = path_name(path)
        expected = by_name[their_name(name)].grad.numpy()
        difference = np.linalg.norm(turned(name, np.asarray(gradient)) - expected) / np.linalg.norm(expected)
        assert difference < 1e-4, name


@pytest.mark.parametrize("shape", [(32, 32), (32, 96), (96, 32)])
def test_muon_s_updates_are_equal(nanochat, shape):
    """Take three steps on two matrices, with rate, momentum, decay and second moment."""
    steps, generator = 10, np.random.default_rng(0)
    config = MuonConfig(weight_decay=0.3)
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    layouts = [shard_layout(shape, (None, None), mesh.shape)] * 2
    transform = muon(config, ScheduleConfig("constant"), lambda step: jnp.float32(0.02), steps, layouts, mesh)
    random = lambda: {i: jnp.asarray(generator.standard_normal(shape), jnp.float32) for i in range(2)}
    params = random()
    theirs = [torch.nn.Parameter(torch.tensor(np.array(p.T))) for p in params.values()]
    group = {"kind": "muon", "params": theirs, "lr": 0.02, "momentum": 0.95, "ns_steps": 5, "beta2": 0.9}
    optimizer = nanochat[1].MuonAdamW([group | {"weight_decay": 0.3}])
    state = transform.init(params)
    for step in range(3):
        gradients = random()
        updates, state = transform.update(gradients, state, params, step=jnp.array(step))
        params = jax.tree.map(lambda p, u: p + u, params, updates)
        for parameter, gradient in zip(theirs, gradients.values()):
            parameter.grad = torch.tensor(np.array(gradient.T))
        for options in optimizer.param_groups:  # like its training script
            options["momentum"] = 0.85 + step / 400 * 0.12
            options["weight_decay"] = 0.3 * 0.5 * (1 + np.cos(np.pi * step / steps))
        optimizer.step()
    for ours, expected in zip(params.values(), theirs):
        np.testing.assert_allclose(ours, expected.detach().numpy().T, atol=2e-5)
