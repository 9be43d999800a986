"""Random keys."""

import jax
from jaxtyping import Array, Key


def random_key(seed: int | Array) -> Key[Array, ""]:
    """Return the key of a seed. It names its generator, so that JAX_DEFAULT_PRNG_IMPL cannot choose another one, whose
    numbers would also depend on how an array is divided over devices (`rbg`)."""
    return jax.random.key(seed, impl="threefry2x32")
