"""Muon (kellerjordan.github.io/posts/muon) for matrices [inputs, outputs], as nanochat runs it in mid 2026.

    momentum           Nesterov's, with a schedule
    orthogonalise      outputs brought to one norm (arXiv:2603.28254), then Polar Express (arXiv:2505.16932), then the
                       Frobenius norm of an orthogonal matrix (arXiv:2602.21545)
    even out           by a running second moment of each row or column (NorMuon, arXiv:2510.05491)
    decay              where it and the update agree (arXiv:2411.16085)

optax.contrib.muon has no second moment, no agreement of decay and update, and no schedule that is a function of the
step; and it would orthogonalise every matrix on every device. Here matrices of one shape are stacked, and the stack is
divided over all devices: each matrix is orthogonalised by one of them.
"""

import math
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

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


class MuonState(NamedTuple):
    """What Muon remembers, float32."""

    mu: Any
    """First moments, of the matrices' shapes."""
    nu: Any
    """Second moments of the orthogonalised updates: a number for each row or column, along the longer side."""


def muon(config: MuonConfig, rate: Schedule, steps: int, mesh: Mesh | None) -> optax.GradientTransformationExtraArgs:
    """The updates of a tree of matrices, rate and decay included. `mesh`: the devices that share the work."""

    def init(params: optax.Params) -> MuonState:
        second = lambda p: jnp.zeros((1, p.shape[1]) if p.shape[1] >= p.shape[0] else (p.shape[0], 1), jnp.float32)
        return MuonState(jax.tree.map(jnp.zeros_like, params), jax.tree.map(second, params))

    def update(
        updates: optax.Updates, state: MuonState, params: optax.Params | None = None, *, step: Int[Array, ""]
    ) -> tuple[optax.Updates, MuonState]:
        momentum = momentum_at(config, step, steps)
        mu = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state.mu, updates)
        ahead = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, mu, updates)
        leaves, structure = jax.tree.flatten(ahead)
        directions = structure.unflatten(orthogonalise_all(leaves, mesh))
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


def momentum_at(config: MuonConfig, step: Int[Array, ""] | int, steps: int) -> Float[Array, ""]:
    """Rises, stays, and falls while the rate does."""
    t = jnp.asarray(step, jnp.float32)
    rise = jnp.minimum(1.0, t / max(config.momentum_warmup_steps, 1))
    falls = config.schedule.warmdown * steps if config.schedule.kind == "warmup_constant_warmdown" else 0
    fall = jnp.clip((t - (steps - falls)) / max(falls, 1), 0, 1)
    risen = config.momentum_start + rise * (config.momentum - config.momentum_start)
    fallen = config.momentum + fall * (config.momentum_final - config.momentum)
    return jnp.where(rise < 1, risen, fallen)


def orthogonalise_all(matrices: list[Float[Array, "..."]], mesh: Mesh | None) -> list[Float[Array, "..."]]:
    """Each matrix's nearest orthogonal one, nearly; those of one shape as a stack that is divided over all devices."""
    stacks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        stacks[min(matrix.shape), max(matrix.shape)].append(i)
    results: list[Any] = [None] * len(matrices)
    for indices in stacks.values():
        tall = [matrices[i].shape[0] > matrices[i].shape[1] for i in indices]
        equal = [_equal_outputs(matrices[i]) for i in indices]
        stack = jnp.stack([matrix.T if turn else matrix for matrix, turn in zip(equal, tall)])
        if mesh is not None:
            stack = jnp.pad(stack, ((0, -len(indices) % mesh.size), (0, 0), (0, 0)))
            stack = jax.lax.with_sharding_constraint(stack, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
        for i, turn, result in zip(indices, tall, orthogonalise(stack)):
            results[i] = result.T if turn else result
    return results


def _equal_outputs(matrix: Float[Array, "inputs outputs"]) -> Float[Array, "inputs outputs"]:
    """Every output's column brought to the columns' root mean square norm."""
    norms = jnp.linalg.norm(matrix, axis=0, keepdims=True)
    return matrix * (jnp.linalg.norm(matrix) / math.sqrt(matrix.shape[1]) / jnp.maximum(norms, 1e-6))


def orthogonalise(x: Float[Array, "count short long"]) -> Float[Array, "count short long"]:
    """Singular values brought near 1, by Polar Express, then the Frobenius norm to that of singular values of 1."""
    norm = lambda x: jnp.linalg.norm(x, axis=(1, 2), keepdims=True)
    x = x / (1.01 * norm(x) + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
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
