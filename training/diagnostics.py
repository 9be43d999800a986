"""Diagnostics of a step: the noise of its gradient, the agreement of its micro-batches, and the size of the update.

A unit is one micro-batch of one replica: its gradient g_k is a sum over n_k valid tokens. S and N are the sums of all
units' g_k and n_k, Q is the sum of |g_k|^2, and M is the sum of n_k^2. For units of any sizes (after arXiv:1812.06162,
app. A):

    |G|^2    = (|S|^2 - Q) / (N^2 - M)     the squared norm of the true gradient of a token's mean loss, unbiased
    tr Sigma = |S|^2 / N - N |G|^2         the variance of one token's gradient, unbiased
    B        = tr Sigma / |G|^2            the gradient noise scale, in tokens

For each micro-batch, the scan of the measuring step keeps two sums of squares per parameter (`training.step.Squares`):
of its own gradient, and of the sum so far. They give the cosine between the two. Only these numbers cross the mesh,
after the scan.

Along `fsdp` a matrix's gradient is summed within a micro-batch, so a unit is the sum of all devices along it.
Parameters too small to divide over `fsdp` are summed after the scan. There each device has its own units, and the
formulas apply with other n_k. The cosine omits these parameters (a few hundred numbers).

metrics.jsonl keeps |G|^2 as `signal` and tr Sigma as `noise`. tools/noise.py averages them over a window of measured
steps, before the division.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from training.muon import MuonState
from training.optimizer import AdamState, parameter_groups
from training.sharded import ShardedNetwork
from training.state import TrainState
from training.step import Measure, Squares, StepSums, Update


class Leaves(NamedTuple):
    """Facts about the leaves of a tree of parameters, in the tree's order."""

    groups: list[str]
    blocks: list[str]
    """The transformer block's number; empty outside of blocks."""
    sizes: Float[np.ndarray, "leaves"]
    """Sizes without padding. Floats, since integers would be limited to 32 bits."""
    divided: Bool[np.ndarray, "leaves"]
    """True if `fsdp` divides the leaf: a unit is then a replica, not a device."""
    copied: Bool[np.ndarray, "leaves"]
    """True if the devices along `tensor` have the same gradient."""


def make_measure(network: ShardedNetwork) -> Measure:
    """Return `measure` for `training.step.make_train_step`, for this network on its mesh."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(network.layouts)]
    stored = jax.tree.leaves(network.layouts)
    leaves = Leaves(
        groups=jax.tree.leaves(parameter_groups(network.config)),
        blocks=[str(path[1].key) if path[0].key == "blocks" else "" for path in paths],
        sizes=np.array([float(prod(layout.shape)) for layout in stored]),
        divided=np.array(["fsdp" in layout.axes for layout in stored]),
        copied=np.array(["tensor" not in layout.axes for layout in stored]),
    )
    return partial(measure, leaves)


def measure(leaves: Leaves, state: TrainState, sums: StepSums, update: Update) -> dict[str, Any]:
    """Return scalars, by name. `state`: before the step. `sums`: with `squares`."""
    assert sums.squares is not None
    squares, opt_state = sum_over_tensor(sums.squares, leaves.copied), update.state.opt_state
    gradients, params, updates = (jax.tree.leaves(tree) for tree in (update.gradients, state.params, update.updates))
    square_norms = {"gradient_norm": gradients, "parameter_norm": params, "update_norm": updates}
    square_norms = {kind: [square_sum(leaf) for leaf in tree] for kind, tree in square_norms.items()}

    def norms(names: Sequence[str]) -> dict[str, dict[str, Array]]:
        return {
            kind: {name: jnp.sqrt(total) for name, total in sums_by(names, values).items()}
            for kind, values in square_norms.items()
        }

    def of_all(values: Array) -> dict[str, Array]:
        return {"all": jnp.sum(values), **sums_by(leaves.groups, values)}

    signal, noise = signal_and_noise(squares, sums.tokens, jnp.stack(square_norms["gradient_norm"]), leaves.divided)
    groups, sizes = norms(leaves.groups), sums_by(leaves.groups, leaves.sizes)
    # The updates of padding are zeros, too.
    unchanged = [
        jnp.sum(p + u == p, dtype=jnp.float32) - (p.size - n) for p, u, n in zip(params, updates, leaves.sizes)
    ]
    shares = {name: count / sizes[name] for name, count in sums_by(leaves.groups, unchanged).items()}
    clipped = {name: update.clip * norm for name, norm in groups["gradient_norm"].items()}
    return {
        "signal": of_all(signal),
        "noise": of_all(noise),
        "coherence_running": coherence(squares, leaves.divided),
        "clipped": (update.clip < 1).astype(jnp.float32),
        "groups": _by_name(groups | {"unchanged_share": shares, "snr": signal_over_noise(opt_state, clipped)}),
        "blocks": _by_name(norms(leaves.blocks)),
    }


def square_sum(leaf: Float[Array, "..."]) -> Float[Array, ""]:
    """Return the sum of the squares, in float32."""
    return jnp.sum(jnp.square(leaf.astype(jnp.float32)))


def sums_by(names: Sequence[str], values: Iterable[Any]) -> dict[str, Any]:
    """Return the sum of each name's values. An empty name is ignored."""
    sums: dict[str, Any] = {}
    for name, value in zip(names, values):
        if name:
            sums[name] = sums.get(name, 0) + value
    return sums


def sum_over_tensor(squares: Squares, copied: Bool[np.ndarray, "leaves"]) -> Squares:
    """Return the squares [data, fsdp, K], summed over `tensor`. Replicated parameters count once."""
    factor = jnp.where(copied, 1 / squares.own.shape[2], 1)
    return Squares(squares.tokens[:, :, 0], *(jnp.sum(s * factor, axis=2) for s in squares[1:]))


def signal_and_noise(
    squares: Squares, tokens: Int[Array, ""], mean_squares: Float[Array, "leaves"], divided: Bool[np.ndarray, "leaves"]
) -> tuple[Float[Array, "leaves"], Float[Array, "leaves"]]:
    """Return |G|^2 and tr Sigma of each leaf; nan for a single unit. `squares` are summed over `tensor`;
    `mean_squares` are |S|^2 / N^2."""
    count, of_devices = tokens.astype(jnp.float32), squares.tokens.astype(jnp.float32)
    token_squares = jnp.where(divided, jnp.sum(jnp.sum(of_devices, 1) ** 2), jnp.sum(of_devices**2))  # M
    pairs = 1 - token_squares / count**2
    signal = (mean_squares - jnp.sum(squares.own, (0, 1, 2)) / count**2) / jnp.where(pairs > 0, pairs, jnp.nan)
    return signal, count * (mean_squares - signal)


def coherence(squares: Squares, divided: Bool[np.ndarray, "leaves"]) -> Float[Array, ""]:
    """Return the mean cosine between a micro-batch's gradient and the sum before it; nan if K = 1."""
    own, running = (jnp.sum(s * divided, (1, 3)) for s in squares[1:])  # for each replica's micro-batches
    products = (jnp.diff(running) - own[:, 1:]) / 2  # |A + g|^2 = |A|^2 + |g|^2 + 2 A.g
    lengths = jnp.sqrt(running[:, :-1] * own[:, 1:])
    return jnp.mean(jnp.where(lengths > 0, products / jnp.where(lengths > 0, lengths, 1), 0))


def signal_over_noise(opt_state: Any, gradient_norms: dict[str, Float[Array, ""]]) -> dict[str, Float[Array, ""]]:
    """Return |m| / sqrt(v) of each group: the norm of the optimizer's first moments m over the size of one step's
    gradient. That is the root of the sum of AdamW's second moments v. Muon keeps no second moment of the gradient, so
    its size is the norm of this step's gradient, from `gradient_norms` (after the clip). The ratio is near 1 if
    gradients agree from step to step, and near sqrt((1 - beta1) / (1 + beta1)) if they are noise; beta1 is Muon's
    momentum."""
    snr = {}
    for name, state in _states_of(AdamState, opt_state):
        first, second = sum(map(square_sum, jax.tree.leaves(state.mu))), sum(map(jnp.sum, jax.tree.leaves(state.nu)))
        snr[name] = jnp.sqrt(first / jnp.maximum(second, 1e-30))
    for name, state in _states_of(MuonState, opt_state):
        norm = jnp.sqrt(sum(map(square_sum, jax.tree.leaves(state.mu))))
        snr[name] = norm / jnp.maximum(gradient_norms[name], 1e-30)
    return snr


def _states_of(kind: type, opt_state: Any) -> Iterator[tuple[str, Any]]:
    """Return the groups whose transformations (optax.partition's) keep such a state."""

    def is_one(node: Any) -> bool:
        return isinstance(node, kind)

    for name, of_group in opt_state.inner_states.items():
        yield from ((name, state) for state in filter(is_one, jax.tree.leaves(of_group, is_leaf=is_one)))


def _by_name(values: dict[str, dict[str, Array]]) -> dict[str, dict[str, Array]]:
    """Return {name: {quantity: value}} of {quantity: {name: value}}."""
    names = sorted({name for by_name in values.values() for name in by_name})
    return {name: {key: by_name[name] for key, by_name in values.items() if name in by_name} for name in names}
