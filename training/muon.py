"""Muon (kellerjordan.github.io/posts/muon) for matrices [inputs, outputs], as in nanochat of mid 2026.

    momentum           Nesterov's, with a schedule
    orthogonalise      outputs brought to one norm (arXiv:2603.28254), then Polar Express (arXiv:2505.16932), then the
                       Frobenius norm of an orthogonal matrix (arXiv:2602.21545)
    even out           by a running second moment of each row or column (NorMuon, arXiv:2510.05491)
    decay              for elements where it agrees with the update (arXiv:2411.16085)

optax.contrib.muon has no second moment, no agreement of decay and update, and no schedule as a function of the step. It
would also orthogonalise every matrix on every device. Here matrices of one shape are stacked, and an all-to-all
distributes the stack over all devices: each device orthogonalises complete matrices.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Num

from options.schema import MuonConfig, ScheduleConfig
from training.mesh import resized
from training.sharded import spec_of
from training.shares import STORED_ORDER, ShardLayout, joined, parted

# From the paper, for five iterations, a safety factor of 2e-2 and a cushion of 2.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

FEWER_PASSES: dict[str, Any] = {"gpu": jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3, "tpu": jax.lax.Precision.HIGH}
"""Precision of products with `products=fewer_passes`, by platform; float32 on others."""


class MuonState(NamedTuple):
    """Muon's state, float32."""

    mu: Any
    """First moments, in the matrices' shapes."""
    nu: Any
    """Second moments of the orthogonalised updates: a number for each row or column, along the longer side."""


def muon(
    config: MuonConfig,
    course: ScheduleConfig,
    rate: Callable[[Num[Array, ""] | int], Float[Array, ""]],
    steps: int | float,
    layouts: Sequence[ShardLayout],
    mesh: Mesh,
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation of a tree of matrices, rate and decay included. The momentum follows the `course` of
    `rate`. The devices of `mesh` share the work; `layouts` describes how it stores the leaves, padding included. `init`
    takes matrices without padding."""

    fewer = FEWER_PASSES.get(mesh.devices.flat[0].platform, jax.lax.Precision.HIGHEST)
    precision = fewer if config.products == "fewer_passes" else jax.lax.Precision.HIGHEST

    def init(params: optax.Params) -> MuonState:
        def second(p: Array) -> Array:
            return jnp.zeros((1, p.shape[1]) if p.shape[1] >= p.shape[0] else (p.shape[0], 1), jnp.float32)

        return MuonState(jax.tree.map(jnp.zeros_like, params), jax.tree.map(second, params))

    def update(
        updates: optax.Updates, state: MuonState, params: optax.Params | None = None, *, step: Num[Array, ""]
    ) -> tuple[optax.Updates, MuonState]:
        momentum = momentum_at(config, course, step, steps)
        mu = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state.mu, updates)
        ahead = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, mu, updates)
        leaves, structure = jax.tree.flatten(ahead)
        stored = structure.unflatten(layouts)
        directions = structure.unflatten(orthogonalise_all(leaves, layouts, mesh, precision))
        nu = jax.tree.map(
            lambda n, d, p: config.beta2 * n + (1 - config.beta2) * resized(_along_short_side(d, p.shape), n.shape),
            *(state.nu, directions, stored),
        )
        decay = config.weight_decay * 0.5 * (1 + jnp.cos(jnp.pi * step / steps))
        now = rate(step)

        def move(direction: Array, second: Array, param: Array, layout: ShardLayout) -> Array:
            direction = evened_out(direction, second)
            agree = direction * param >= 0
            matrix_rate = now * max(1.0, layout.shape[1] / layout.shape[0]) ** 0.5
            return -matrix_rate * (direction + decay * jnp.where(agree, param, 0))

        return jax.tree.map(move, directions, nu, params, stored), MuonState(mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


def momentum_at(
    config: MuonConfig, course: ScheduleConfig, step: Num[Array, ""] | int, steps: int | float
) -> Float[Array, ""]:
    """Return the momentum: it rises, stays, and falls with the rate. In a run too short for both, it falls from its
    current value."""
    t = jnp.asarray(step, jnp.float32)
    rise = jnp.minimum(1.0, t / max(config.momentum_warmup_steps, 1))
    falls = course.warmdown * steps if course.kind == "warmup_constant_warmdown" else 0
    fall = jnp.clip((t - (steps - falls)) / max(falls, 1), 0, 1)
    risen = config.momentum_start + rise * (config.momentum - config.momentum_start)
    return risen + fall * (config.momentum_final - risen)


def orthogonalise_all(
    matrices: list[Float[Array, "..."]],
    layouts: Sequence[ShardLayout],
    mesh: Mesh,
    precision: Any = jax.lax.Precision.HIGHEST,
) -> list[Float[Array, "..."]]:
    """Return an approximation of each matrix's nearest orthogonal one. Tall matrices are transposed. Those stored alike
    then make a stack, so stacking sends nothing, and all devices share the stack."""
    stacks: dict[tuple, list[int]] = defaultdict(list)
    turn = [slice(None, None, -1 if layout.shape[0] > layout.shape[1] else 1) for layout in layouts]
    for i, (layout, turned) in enumerate(zip(layouts, turn)):
        # Axes of one device divide nothing, and separate no stacks.
        spec = tuple(tuple(axis for axis in names if mesh.shape[axis] > 1) for names in layout.spec[turned])
        stacks[layout.shape[turned], layout.stored[turned], spec].append(i)
    results: list[Any] = [None] * len(matrices)
    for (shape, stored, spec), indices in stacks.items():
        equal = [_equal_outputs(matrices[i], layouts[i].shape) for i in indices]
        stack = jnp.stack([matrix.T if turn[i].step < 0 else matrix for i, matrix in zip(indices, equal)])
        if mesh.size > 1:
            stack = jnp.pad(stack, ((0, -len(indices) % mesh.size), (0, 0), (0, 0)))
            oriented = ShardLayout((0, *shape), (None,) * 3, (0, *stored), ((), *spec))
            dealt = partial(orthogonalise_dealt, layout=oriented, mesh=mesh, precision=precision)
            specs = spec_of(oriented)
            stack = jax.shard_map(dealt, mesh=mesh, in_specs=specs, out_specs=specs)(stack)
        else:
            stack = orthogonalise(stack, precision)
        for i, result in zip(indices, stack):
            results[i] = result.T if turn[i].step < 0 else result
    return results


def orthogonalise_dealt(
    x: Float[Array, "count short_share long_share"], layout: ShardLayout, mesh: Mesh, precision: Any
) -> Float[Array, "count short_share long_share"]:
    """Orthogonalise, on one device: turn its shares of all matrices into some complete ones, orthogonalise these
    without padding, and turn them back into shares.

    One all-to-all over all axes that divide the matrices sends this device's share of the stack, and another returns
    it. If an axis does not divide the stack, as for the small gates, the stack is cut and all-gathered.
    """
    named = {axis for names in layout.spec for axis in names}
    divided = tuple(axis for axis in STORED_ORDER if axis in named)
    undivided = [axis for axis in STORED_ORDER if axis not in named and mesh.shape[axis] > 1]
    factors = [(mesh.shape[axis], layout.dimension(axis) - 1) for axis in divided]
    if divided:
        parts = jax.lax.all_to_all(x, divided, 0, 0, tiled=True)
        parts = parts.reshape(jax.lax.axis_size(divided), -1, *x.shape[1:])
        x = jax.vmap(lambda parts: joined(parts, factors), 1)(parts)
    for axis in undivided:
        size = x.shape[0] // jax.lax.axis_size(axis)
        x = jax.lax.dynamic_slice_in_dim(x, size * jax.lax.axis_index(axis), size)
    x = orthogonalise(resized(x, (len(x), *layout.shape[1:])), precision)
    x = resized(x, (len(x), *layout.stored[1:]))
    for axis in reversed(undivided):
        x = jax.lax.all_gather(x, axis, tiled=True, to="invarying")
    if divided:
        parts = jax.vmap(lambda matrix: parted(matrix, factors), out_axes=1)(x)
        x = jax.lax.all_to_all(parts.reshape(-1, *parts.shape[2:]), divided, 0, 0, tiled=True)
    return x


def _equal_outputs(matrix: Float[Array, "inputs outputs"], shape: tuple[int, ...]) -> Float[Array, "inputs outputs"]:
    """Return the matrix with every output's column scaled to the root mean square norm of the columns, `shape[1]` of
    them without padding."""
    norms = jnp.linalg.norm(matrix, axis=0, keepdims=True)
    return matrix * (jnp.linalg.norm(matrix) / math.sqrt(shape[1]) / jnp.maximum(norms, 1e-6))


def orthogonalise(
    x: Float[Array, "count short long"], precision: Any = jax.lax.Precision.HIGHEST
) -> Float[Array, "count short long"]:
    """Bring singular values near 1 by Polar Express, then the Frobenius norm to the norm for singular values of 1.
    Compute in float32 on every platform, unless `precision` says otherwise; nanochat uses bfloat16."""
    norm = partial(jnp.linalg.norm, axis=(1, 2), keepdims=True)
    x = x / (1.01 * norm(x) + 1e-6)
    # Five iterations amplify rounding: in bfloat16, gradients that differ by 1e-6 give updates that differ by 3%.
    product = partial(jnp.matmul, precision=precision)

    def iterate(x: Array, coefficients: Array) -> tuple[Array, None]:
        a, b, c = coefficients
        gram = product(x, x.mT)
        return a * x + product(b * gram + product(c * gram, gram), x), None

    # A scan, since each product at this precision is six on a TPU, and five copies of them take long to compile.
    x, _ = jax.lax.scan(iterate, x, jnp.array(POLAR_EXPRESS, jnp.float32))
    return x * (math.sqrt(x.shape[1]) / jnp.maximum(norm(x), 1e-6))


def _along_short_side(direction: Float[Array, "inputs outputs"], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Return the mean square along the shorter side of a matrix with `shape` without padding."""
    return jnp.sum(direction**2, axis=0 if shape[1] >= shape[0] else 1, keepdims=True) / min(shape)


def evened_out(
    direction: Float[Array, "inputs outputs"], second: Float[Array, "..."]
) -> Float[Array, "inputs outputs"]:
    """Divide each row or column by the root of its second moment, and keep the norm of the matrix."""
    along = [1 if size == 1 else full for size, full in zip(second.shape, direction.shape)]
    scaled = direction * jax.lax.rsqrt(jnp.maximum(resized(second, along), 1e-10))
    return scaled * (jnp.linalg.norm(direction) / jnp.maximum(jnp.linalg.norm(scaled), 1e-10))
