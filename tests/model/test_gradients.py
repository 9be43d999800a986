"""Compare each hand-written backward pass with the gradients of the plain expression that it replaces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import ModelConfig
from model.attention import Places, attention_in_blocks, plain_attention
from model.gpt import widened
from model.layers import embed, matmul, relu_squared, rms_norm
from model.loss import head_loss
from model.rotary import rotary_angles, rotate_and_norm

GENERATOR = np.random.default_rng(0)
AXES, FLOAT32 = ("fsdp", "tensor"), jnp.dtype("float32")


def random(*shape: int) -> jax.Array:
    return jnp.asarray(GENERATOR.standard_normal(shape), jnp.float32)


X, TOKENS = random(2, 8, 4, 16), jnp.asarray(GENERATOR.integers(0, 5, (2, 8)), jnp.int32)
PLACES = Places(jnp.arange(8), jnp.sort(TOKENS))
LOSS = (TOKENS[0], jnp.asarray([0, 1, 0.5, 1, 1, 0, 1, 1]), AXES, ModelConfig(z_loss=0.01, loss_chunks=2))
CASES = {
    "widened": (lambda x: widened(x, x), lambda x: x, (X,)),
    "rms_norm": (rms_norm, rms_norm.fun, (X,)),
    "relu_squared": (relu_squared, relu_squared.fun, (X,)),
    "matmul": (*(lambda x, k, f=f: f(x, k, AXES, (None, None)) for f in (matmul, matmul.fun)), (X, random(16, 6))),
    "matmul of heads": (*(lambda x, k, f=f: f(x, k, AXES, (16, 2)) for f in (matmul, matmul.fun)), (X, random(64, 6))),
    "embed": (*(lambda t, f=f: f(TOKENS, t, AXES, FLOAT32) for f in (embed, embed.fun)), (random(5, 6),)),
    "rotate_and_norm": (
        *(
            lambda x, f=f: f(x, rotary_angles(jnp.arange(8), 16, 1e5), 1.2)
            for f in (rotate_and_norm, rotate_and_norm.fun)
        ),
        (X,),
    ),
    "plain_attention": (
        *(lambda *qkv, f=f: f(*qkv, PLACES.see(PLACES, 5)) for f in (plain_attention, plain_attention.fun)),
        (X, random(2, 8, 2, 16), random(2, 8, 2, 16)),
    ),
    "attention_in_blocks": (
        lambda *qkv: attention_in_blocks(*qkv, PLACES, 5),
        lambda *qkv: plain_attention.fun(*qkv, PLACES.see(PLACES, 5)),
        (X, random(2, 8, 2, 16), random(2, 8, 2, 16)),
    ),
    "head_loss": (
        *(lambda x, k, f=f: f(x, k, *LOSS)[0] for f in (head_loss, head_loss.fun)),
        (random(8, 6), random(6, 5)),
    ),
}
"""The function, the plain expression, and the arrays that both are differentiated by."""


@pytest.mark.parametrize("case", CASES)
def test_a_backward_pass_equals_its_plain_expression_s(case):
    function, plain, arrays = CASES[case]
    (y, backward), (plain_y, plain_backward) = (jax.vjp(f, *arrays) for f in (function, plain))
    np.testing.assert_allclose(y, plain_y, rtol=1e-6, atol=1e-6)
    dy = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    for gradient, expected in zip(backward(dy), plain_backward(dy), strict=True):
        assert np.any(expected)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5 if "attention" in case else 1e-6)
