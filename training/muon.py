"""Muon (kellerjordan.github.io/posts/muon) for matrices [inputs, outputs], as in nanochat of mid 2026.

    momentum           Nesterov's, with a schedule
    orthogonalise      outputs brought to one norm (arXiv:2603.28254), then Polar Express (arXiv:2505.16932), then the
                       Frobenius norm of an orthogonal matrix (arXiv:2602.21545)
    even out           by a running second moment of each row or column (NorMuon, arXiv:2510.05491)
    decay              for elements where it agrees with the update (arXiv:2411.16085)

optax.contrib.muon has no second moment, no agreement of decay and update, and no schedule as a function of the step. It
would also orthogonalise every matrix on every device. Here matrices of one shape are stacked, and dealt to the devices
(training/deal.py): what needs a complete matrix happens where it is complete, and nothing else crosses the mesh.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Num, Shaped

from options.schema import MuonConfig, ScheduleConfig
from training.deal import Dimensions, collect, deal_out, own_flags
from training.mesh import resized
from training.shares import STORED_ORDER, ShardLayout, padded

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
    `rate`. `layouts` describes how `mesh` stores the leaves. `init` takes complete matrices without padding; `update`
    is for one device, and takes its shares."""

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
        on_complete = partial(complete_directions, beta2=config.beta2, precision=precision)
        directions, seconds = directions_of(leaves, structure.flatten_up_to(state.nu), layouts, mesh, on_complete)
        decay = config.weight_decay * 0.5 * (1 + jnp.cos(jnp.pi * step / steps))
        now = rate(step)

        def move(direction: Array, param: Array, layout: ShardLayout) -> Array:
            agree = direction * param >= 0
            matrix_rate = now * max(1.0, layout.shape[1] / layout.shape[0]) ** 0.5
            return -matrix_rate * (direction + decay * jnp.where(agree, param, 0))

        moved = map(move, directions, structure.flatten_up_to(params), layouts)
        return structure.unflatten(moved), MuonState(mu, structure.unflatten(seconds))

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


class Stack(NamedTuple):
    """Matrices of one shape, stored alike when the tall ones are transposed, so that stacking them sends nothing."""

    indices: list[int]
    """Their positions among all matrices."""
    shape: tuple[int, ...]
    """[short, long], without padding."""
    dimensions: Dimensions


def stacks_of(layouts: Sequence[ShardLayout], mesh: Mesh) -> list[Stack]:
    """Return the stacks of the matrices with these layouts."""
    stacks: dict[tuple, Stack] = {}
    for i, layout in enumerate(layouts):
        turned = slice(None, None, -1 if is_tall(layout) else 1)
        shape, stored, spec = layout.shape[turned], layout.stored[turned], layout.spec[turned]
        # Axes of one device divide nothing, and separate no stacks.
        place = {axis: at for at, names in enumerate(spec) for axis in names if mesh.shape[axis] > 1}
        dimensions = {axis: place[axis] for axis in STORED_ORDER if axis in place}
        # But JAX tells an array that varies over such an axis from one that does not.
        varying = frozenset(axis for names in spec for axis in names)
        key = shape, stored, tuple(dimensions.items()), varying
        stacks.setdefault(key, Stack([], shape, dimensions)).indices.append(i)
    return list(stacks.values())


def is_tall(layout: ShardLayout) -> bool:
    """Return whether a matrix has more inputs than outputs."""
    return layout.shape[0] > layout.shape[1]


def directions_of(
    matrices: Sequence[Float[Array, "..."]],
    seconds: Sequence[Float[Array, "..."]],
    layouts: Sequence[ShardLayout],
    mesh: Mesh,
    on_complete: Callable,
) -> tuple[list[Float[Array, "..."]], list[Float[Array, "..."]]]:
    """Return, for one device, its shares of the directions and of the new second moments, from its shares of the
    matrices and of their second moments. `on_complete` is `complete_directions`. The devices of `mesh` share the work:
    each gets some complete matrices of each stack."""
    directions: list[Any] = [None] * len(matrices)
    new_seconds: list[Any] = [None] * len(matrices)
    for indices, shape, dimensions in stacks_of(layouts, mesh):
        tall = [is_tall(layouts[i]) for i in indices]
        stack = jnp.stack([matrices[i].T if turned else matrices[i] for i, turned in zip(indices, tall)])
        # All axes that divide a matrix divide its second moments' one dimension.
        along = dict.fromkeys(dimensions, 0)
        second = jnp.stack([seconds[i].ravel() for i in indices])
        stack, second, flags = (filled(array, mesh.size) for array in (stack, second, jnp.array(tall)))
        direction, new_second = on_complete(
            deal_out(stack, dimensions, shape), deal_out(second, along, shape[1:]), own_flags(flags, dimensions)
        )
        direction = collect(direction, dimensions, stack.shape[1:])
        new_second = collect(new_second, along, second.shape[1:])
        for i, turned, of_matrix, of_second in zip(indices, tall, direction, new_second):
            directions[i] = of_matrix.T if turned else of_matrix
            new_seconds[i] = of_second.reshape(seconds[i].shape)
    return directions, new_seconds


def filled(stack: Shaped[Array, "..."], devices: int) -> Shaped[Array, "..."]:
    """Return a stack with as many arrays of zeros at its end as `devices` need to have equal parts."""
    return resized(stack, (padded(len(stack), devices), *stack.shape[1:]))


def complete_directions(
    x: Float[Array, "count short long"],
    second: Float[Array, "count long"],
    tall: Bool[Array, "count"],
    beta2: float,
    precision: Any = jax.lax.Precision.HIGHEST,
) -> tuple[Float[Array, "count short long"], Float[Array, "count long"]]:
    """Return the directions and the new second moments of complete matrices. The `tall` ones are transposed."""
    direction = orthogonalise(equal_outputs(x, tall), precision)
    second = beta2 * second + (1 - beta2) * jnp.mean(direction**2, axis=1)
    return evened_out(direction, second), second


def equal_outputs(x: Float[Array, "count short long"], tall: Bool[Array, "count"]) -> Float[Array, "count short long"]:
    """Return matrices with every output scaled to the root mean square norm of the outputs, which are the rows of the
    `tall` ones, since these are transposed, and the columns of others."""

    def factors(along: int) -> Array:
        norms = jnp.linalg.norm(x, axis=along, keepdims=True)
        return matrix_norm(x) / math.sqrt(norms.size // len(x)) / jnp.maximum(norms, 1e-6)

    return x * jnp.where(tall[:, None, None], factors(2), factors(1))


def matrix_norm(x: Float[Array, "count short long"]) -> Float[Array, "count 1 1"]:
    """Return each matrix's Frobenius norm."""
    return jnp.linalg.norm(x, axis=(1, 2), keepdims=True)


def orthogonalise(
    x: Float[Array, "count short long"], precision: Any = jax.lax.Precision.HIGHEST
) -> Float[Array, "count short long"]:
    """Bring singular values near 1 by Polar Express, then the Frobenius norm to the norm for singular values of 1.
    Compute in float32 on every platform, unless `precision` says otherwise; nanochat uses bfloat16."""
    x = x / (1.01 * matrix_norm(x) + 1e-6)
    # Five iterations amplify rounding: in bfloat16, gradients that differ by 1e-6 give updates that differ by 3%.
    product = partial(jnp.matmul, precision=precision)

    def iterate(x: Array, coefficients: Array) -> tuple[Array, None]:
        a, b, c = coefficients
        gram = product(x, x.mT)
        return a * x + product(b * gram + product(c * gram, gram), x), None

    # A scan, since each product at this precision is six on a TPU, and five copies of them take long to compile.
    x, _ = jax.lax.scan(iterate, x, jnp.array(POLAR_EXPRESS, jnp.float32))
    return x * (math.sqrt(x.shape[1]) / jnp.maximum(matrix_norm(x), 1e-6))


def evened_out(
    direction: Float[Array, "count short long"], second: Float[Array, "count long"]
) -> Float[Array, "count short long"]:
    """Divide each column by the root of its second moment, and keep the norm of each matrix."""
    scaled = direction * jax.lax.rsqrt(jnp.maximum(second, 1e-10))[:, None]
    return scaled * (matrix_norm(direction) / jnp.maximum(matrix_norm(scaled), 1e-10))
