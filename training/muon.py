"""Muon (kellerjordan.github.io/posts/muon) for matrices [inputs, outputs], as nanochat runs it in mid 2026.

    momentum           Nesterov's, with a schedule
    orthogonalise      outputs brought to one norm (arXiv:2603.28254), then Polar Express (arXiv:2505.16932), then the
                       Frobenius norm of an orthogonal matrix (arXiv:2602.21545)
    even out           by a running second moment of each row or column (NorMuon, arXiv:2510.05491)
    decay              where it and the update agree (arXiv:2411.16085)

optax.contrib.muon has no second moment, no agreement of decay and update, and no schedule that is a function of the
step; and it would orthogonalise every matrix on every device. Here matrices of one shape are stacked, and the stack is
dealt out to all devices by all-to-alls: each matrix is whole on one of them, which orthogonalises it.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Num

from configs.schema import MuonConfig
from training.schedule import Schedule

# For five iterations, a safety factor of 2e-2 and a cushion of 2; from the paper.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


Spec = tuple[tuple[str, ...], ...]
"""For each dimension of a matrix, the mesh axes that divide it, the major one first."""


class MuonState(NamedTuple):
    """What Muon remembers, float32."""

    mu: Any
    """First moments, of the matrices' shapes."""
    nu: Any
    """Second moments of the orthogonalised updates: a number for each row or column, along the longer side."""


def muon(
    config: MuonConfig, rate: Schedule, steps: int | float, shardings: Sequence[NamedSharding] | None
) -> optax.GradientTransformationExtraArgs:
    """The updates of a tree of matrices, rate and decay included. `shardings`: where its leaves lie, on the
    devices that share the work; None: all on one."""

    def init(params: optax.Params) -> MuonState:
        second = lambda p: jnp.zeros((1, p.shape[1]) if p.shape[1] >= p.shape[0] else (p.shape[0], 1), jnp.float32)
        return MuonState(jax.tree.map(jnp.zeros_like, params), jax.tree.map(second, params))

    def update(
        updates: optax.Updates, state: MuonState, params: optax.Params | None = None, *, step: Num[Array, ""]
    ) -> tuple[optax.Updates, MuonState]:
        momentum = momentum_at(config, step, steps)
        mu = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state.mu, updates)
        ahead = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, mu, updates)
        leaves, structure = jax.tree.flatten(ahead)
        directions = structure.unflatten(orthogonalise_all(leaves, shardings))
        nu = jax.tree.map(
            lambda n, d: config.beta2 * n + (1 - config.beta2) * _along_short_side(d), state.nu, directions
        )
        decay = config.weight_decay * 0.5 * (1 + jnp.cos(jnp.pi * step / steps))
        now = rate(step)

        def move(direction: Array, second: Array, param: Array) -> Array:
            direction = evened_out(direction, second)
            agree = direction * param >= 0
            matrix_rate = now * max(1.0, param.shape[1] / param.shape[0]) ** 0.5
            return -matrix_rate * (direction + decay * jnp.where(agree, param, 0))

        return jax.tree.map(move, directions, nu, params), MuonState(mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


def momentum_at(config: MuonConfig, step: Num[Array, ""] | int, steps: int | float) -> Float[Array, ""]:
    """Rises, stays, and falls while the rate does."""
    t = jnp.asarray(step, jnp.float32)
    rise = jnp.minimum(1.0, t / max(config.momentum_warmup_steps, 1))
    falls = config.schedule.warmdown * steps if config.schedule.kind == "warmup_constant_warmdown" else 0
    fall = jnp.clip((t - (steps - falls)) / max(falls, 1), 0, 1)
    risen = config.momentum_start + rise * (config.momentum - config.momentum_start)
    fallen = config.momentum + fall * (config.momentum_final - config.momentum)
    return jnp.where(rise < 1, risen, fallen)


def orthogonalise_all(
    matrices: list[Float[Array, "..."]], shardings: Sequence[NamedSharding] | None
) -> list[Float[Array, "..."]]:
    """Each matrix's nearest orthogonal one, nearly. Those that lie alike once the tall ones are turned make a stack, so
    that stacking sends nothing, and the stack is divided over all devices."""
    stacks: dict[tuple, list[int]] = defaultdict(list)
    tall = [matrix.shape[0] > matrix.shape[1] for matrix in matrices]
    for i, matrix in enumerate(matrices):
        spec = _divided(shardings[i]) if shardings else ((), ())
        stacks[min(matrix.shape), max(matrix.shape), spec[:: -1 if tall[i] else 1]].append(i)
    results: list[Any] = [None] * len(matrices)
    for (_, _, spec), indices in stacks.items():
        equal = [_equal_outputs(matrices[i]) for i in indices]
        stack = jnp.stack([matrix.T if tall[i] else matrix for i, matrix in zip(indices, equal)])
        if shardings and shardings[0].mesh.size > 1:
            mesh, lies = shardings[0].mesh, PartitionSpec(None, *spec)
            stack = jnp.pad(stack, ((0, -len(indices) % mesh.size), (0, 0), (0, 0)))
            dealt = partial(orthogonalise_dealt, spec=spec, axes=mesh.axis_names)
            stack = jax.shard_map(dealt, mesh=mesh, in_specs=lies, out_specs=lies)(stack)
        else:
            stack = orthogonalise(stack)
        for i, result in zip(indices, stack):
            results[i] = result.T if tall[i] else result
    return results


def _divided(sharding: NamedSharding) -> Spec:
    """For each dimension, the mesh axes that divide it."""
    wide = {axis for axis, size in sharding.mesh.shape.items() if size > 1}
    named = [(names,) if isinstance(names, str) else names or () for names in sharding.spec]
    return tuple(tuple(axis for axis in names if axis in wide) for names in named)


def orthogonalise_dealt(
    x: Float[Array, "count short_share long_share"], spec: Spec, axes: Sequence[str]
) -> Float[Array, "count short_share long_share"]:
    """For one device: its shares of all matrices to some whole ones, these orthogonalised, and back.

    An all-to-all over each mesh axis that divides the matrices (the minor one of a dimension first), of this device's
    share of the stack, there and back; what an axis does not divide is cut, and all-gathered: gates, which are small.
    """
    moves = [(axis, dimension) for dimension, names in enumerate(spec, start=1) for axis in reversed(names)]
    whole = [axis for axis in axes if axis not in [axis for axis, _ in moves]]
    for axis, dimension in moves:
        x = jax.lax.all_to_all(x, axis, 0, dimension, tiled=True)
    for axis in whole:
        size = x.shape[0] // jax.lax.axis_size(axis)
        x = jax.lax.dynamic_slice_in_dim(x, size * jax.lax.axis_index(axis), size)
    x = orthogonalise(x)
    for axis in reversed(whole):
        x = jax.lax.all_gather(x, axis, tiled=True, to="invarying")
    for axis, dimension in reversed(moves):
        x = jax.lax.all_to_all(x, axis, dimension, 0, tiled=True)
    return x


def _equal_outputs(matrix: Float[Array, "inputs outputs"]) -> Float[Array, "inputs outputs"]:
    """Every output's column brought to the columns' root mean square norm."""
    norms = jnp.linalg.norm(matrix, axis=0, keepdims=True)
    return matrix * (jnp.linalg.norm(matrix) / math.sqrt(matrix.shape[1]) / jnp.maximum(norms, 1e-6))


def orthogonalise(x: Float[Array, "count short long"]) -> Float[Array, "count short long"]:
    """Singular values brought near 1, by Polar Express, then the Frobenius norm to that of singular values of 1. In
    float32 on every platform; nanochat has bfloat16."""
    norm = lambda x: jnp.linalg.norm(x, axis=(1, 2), keepdims=True)
    x = x / (1.01 * norm(x) + 1e-6)
    # Five iterations amplify rounding: bfloat16 makes of gradients that differ by 1e-6 updates that differ by 3%.
    product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    for a, b, c in POLAR_EXPRESS:
        gram = product(x, x.mT)
        x = a * x + product(b * gram + product(c * gram, gram), x)
    return x * (math.sqrt(x.shape[1]) / jnp.maximum(norm(x), 1e-6))


def _along_short_side(direction: Float[Array, "inputs outputs"]) -> Float[Array, "..."]:
    """Mean square along the shorter side."""
    return jnp.mean(direction**2, axis=0 if direction.shape[1] >= direction.shape[0] else 1, keepdims=True)


def evened_out(
    direction: Float[Array, "inputs outputs"], second: Float[Array, "..."]
) -> Float[Array, "inputs outputs"]:
    """Each row or column over the root of its second moment; the norm of the whole stays."""
    scaled = direction * jax.lax.rsqrt(jnp.maximum(second, 1e-10))
    return scaled * (jnp.linalg.norm(direction) / jnp.maximum(jnp.linalg.norm(scaled), 1e-10))
