"""Sampling: one forward pass over the prompts, then one of a single position for each new token.

It is written for one device, as the step is. Each device has the cache of its own heads along `tensor`, for all rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.gpt import GPT
from model.loss import softcap
from model.parallel import all_gather_vocabulary, pmax_over_mesh
from model.sampling import Sampling, draw


def generate(
    model: GPT,
    prompts: Int[Array, "batch length"],
    prompt_lengths: Int[Array, "batch"],
    seeds: Int[Array, "batch"],
    *,
    prefill: int,
    temperature: float,
    top_k: int,
) -> Int[Array, "batch length"]:
    """Return `prompts` with each row continued from its own prompt's length.

    `prefill` is the shortest prompt's length (at least 1): that many positions are read in one pass. `temperature` 0
    takes the likeliest token; `top_k` draws from this many likeliest tokens, 0 from all. A row's tokens depend on its
    own seed and prompt, not on other rows.
    """
    batch, length = prompts.shape
    of_rows = lambda value: jnp.full(batch, value)
    sampling = Sampling(of_rows(temperature), of_rows(top_k), of_rows(1.0), seeds)

    def next_tokens(logits: Float[Array, "batch vocab_share"], position: Int[Array, ""]) -> Int[Array, "batch"]:
        """Return the token at `position`: the prompt's if it is that long, otherwise a sample."""
        sampled = draw(softcap(all_gather_vocabulary(logits), model.config.softcap), of_rows(position), sampling)
        return jnp.where(position < prompt_lengths, prompts[:, position], pmax_over_mesh(sampled.astype(prompts.dtype)))

    def decode(carry: tuple, position: Int[Array, ""]) -> tuple[tuple, Int[Array, "batch"]]:
        cache, tokens = carry
        logits, cache = model(tokens[:, None], cache, position)
        tokens = next_tokens(logits[:, 0], position + 1)
        return (cache, tokens), tokens

    x, cache = model.activations(prompts[:, :prefill], model.empty_cache(batch, length))
    first = next_tokens(model.lm_head(x[:, -1]), jnp.asarray(prefill))
    _, rest = jax.lax.scan(decode, (cache, first), jnp.arange(prefill, length - 1))
    return jnp.concatenate([prompts[:, :prefill], first[:, None], rest.T], axis=1)
