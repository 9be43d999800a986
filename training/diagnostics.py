"""What a step knows of its gradient: how noisy it is, whether its micro-batches agree, and how far the update moves.

A unit is one micro-batch of one replica: its gradient g_k is a sum over n_k valid tokens. With S and N the sums of all
units' g_k and n_k, Q the sum of |g_k|^2 and M that of n_k^2, for units of any sizes (after arXiv:1812.06162, app. A):

    |G|^2    = (|S|^2 - Q) / (N^2 - M)     the squared norm of the true gradient of a token's mean loss, unbiased
    tr Sigma = |S|^2 / N - N |G|^2         the variance of one token's gradient, unbiased
    B        = tr Sigma / |G|^2            the gradient noise scale, in tokens

The scan of the measuring step keeps, of each micro-batch, two sums of squares a parameter group: of its own gradient,
and of the sum so far, from which follows the cosine between the two. Only these numbers cross the mesh, after the scan.

Along `fsdp` a matrix's gradient is summed within a micro-batch, so a unit is that of all devices along it. What is too
small to be divided over `fsdp` is summed after the scan: there each device has units of its own, and the formulas hold
for its parameters with other n_k. The cosine leaves these out (a few hundred numbers).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from model.parallel import mark_varying, psum, tensor_size
from training.mesh import dimension_over

DIVIDED, UNDIVIDED = 0, 1  # over `fsdp`: whose units are those of a replica, or of a device


class Layout(NamedTuple):
    """Where the leaves of a tree of parameters belong, in the tree's order."""

    specs: list[PartitionSpec]
    groups: list[str]
    blocks: list[str]
    """The transformer block's number; empty for what is in none."""

    @classmethod
    def of(cls, specs: dict, groups: list[str]) -> "Layout":
        """Of a tree of specs, and its leaves' groups."""
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec)]
        blocks = [str(path[1].key) if path[0].key == "blocks" else "" for path in paths]
        return cls(jax.tree.leaves(specs, is_leaf=_is_spec), groups, blocks)

    @property
    def names(self) -> list[str]:
        """The groups there are."""
        return sorted(set(self.groups))

    @property
    def kinds(self) -> list[int]:
        """Of each leaf, DIVIDED or UNDIVIDED."""
        return [UNDIVIDED if dimension_over(spec, "fsdp") is None else DIVIDED for spec in self.specs]

    def by_group(self, tree: Any, function: Callable[[Array], Any]) -> dict[str, Any]:
        """The sums of `function(leaf)` over each group."""
        return _summed(self.groups, jax.tree.leaves(tree), function)

    def by_block(self, tree: Any, function: Callable[[Array], Any]) -> dict[str, Any]:
        """The sums of `function(leaf)` over each block."""
        return _summed(self.blocks, jax.tree.leaves(tree), function)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _summed(keys: Sequence[str], leaves: Sequence[Array], function: Callable[[Array], Any]) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for key, leaf in zip(keys, leaves):
        if key:
            sums[key] = sums.get(key, 0) + function(leaf)
    return sums


def square_sum(leaf: Float[Array, "..."]) -> Float[Array, ""]:
    """The sum of the squares, in float32."""
    return jnp.sum(jnp.square(leaf.astype(jnp.float32)))


class Units(NamedTuple):
    """What the scan keeps of each micro-batch on one device; axes after K: DIVIDED or UNDIVIDED, group."""

    tokens: Int[Array, "*K"]
    squares: Float[Array, "*K 2 groups"]
    """Its share of |g_k|^2."""
    running: Float[Array, "*K 2 groups"]
    """Its share of the squared norm of the sum so far, g_k included."""


class UnitSums(NamedTuple):
    """Of all units of the step; the same on every device."""

    token_squares: Float[Array, "2"]
    """M."""
    squares: Float[Array, "2 groups"]
    """Q."""
    coherence: Float[Array, ""]
    """The mean cosine between a micro-batch's gradient and the sum before it; nan where K = 1."""


def unit(tokens: Int[Array, ""], gradients: dict, sums: dict, layout: Layout) -> Units:
    """For one device: what is kept of a micro-batch with these `gradients`, after which the sums are `sums`."""
    return Units(tokens, _squares(gradients, layout), _squares(sums, layout))


def _squares(tree: dict, layout: Layout) -> Float[Array, "2 groups"]:
    zero = mark_varying(jnp.float32(0), ("data", "fsdp", "tensor"))
    totals = {(kind, name): zero for kind in (DIVIDED, UNDIVIDED) for name in layout.names}
    for leaf, spec, kind, group in zip(jax.tree.leaves(tree), layout.specs, layout.kinds, layout.groups):
        square = square_sum(leaf)
        if dimension_over(spec, "tensor") is None:  # every device along `tensor` has the same: each counts its part
            square = mark_varying(square / tensor_size(), ("tensor",))
        totals[kind, group] += square
    return jnp.stack(list(totals.values())).reshape(2, -1)


def sum_units(units: Units) -> UnitSums:
    """For one device: the sums over all units, from what the scan kept on each device. [K, ...] arrays of numbers cross
    the mesh, nothing else."""
    own_tokens = units.tokens.astype(jnp.float32)
    own_squares, running = psum((units.squares, units.running), ("tensor",))
    tokens, squares, running = psum((own_tokens, own_squares[:, DIVIDED], running[:, DIVIDED]), ("fsdp",))
    each, so_far = squares.sum(-1), running.sum(-1)  # over the groups
    dots = (jnp.diff(so_far) - each[1:]) / 2  # |A + g|^2 = |A|^2 + |g|^2 + 2 A.g
    lengths = jnp.sqrt(so_far[:-1] * each[1:])
    cosines = jnp.where(lengths > 0, dots / jnp.where(lengths > 0, lengths, 1), 0)
    replicas = psum(mark_varying(jnp.float32(1), ("data",)), ("data",))
    mean_cosine = jnp.mean(cosines) if cosines.size else jnp.nan * each.sum()
    return UnitSums(
        jnp.stack([psum(jnp.sum(tokens**2), ("data",)), psum(jnp.sum(own_tokens**2), ("data", "fsdp"))]),
        jnp.stack(
            [psum(jnp.sum(squares, 0), ("data",)), psum(jnp.sum(own_squares[:, UNDIVIDED], 0), ("data", "fsdp"))]
        ),
        psum(mean_cosine, ("data",)) / replicas,
    )


def signal_and_noise(
    gradients: dict, tokens: Int[Array, ""], sums: UnitSums, layout: Layout
) -> tuple[dict[str, Float[Array, ""]], dict[str, Float[Array, ""]]]:
    """|G|^2 and tr Sigma of each group, and of `all`; nan where there is one unit. `gradients`: S / N, not clipped."""
    count, pairs = tokens.astype(jnp.float32), 1 - sums.token_squares / tokens.astype(jnp.float32) ** 2
    signal: dict[str, Array] = {name: jnp.float32(0) for name in layout.names}
    noise = dict(signal)
    places = list(zip(layout.kinds, layout.groups))
    for kind, name in sorted(set(places)):
        of = [leaf for leaf, place in zip(jax.tree.leaves(gradients), places) if place == (kind, name)]
        mean_square = sum(square_sum(leaf) for leaf in of)  # |S|^2 / N^2
        squares = sums.squares[kind, layout.names.index(name)] / count**2
        truth = (mean_square - squares) / jnp.where(pairs[kind] > 0, pairs[kind], jnp.nan)
        signal[name] += truth
        noise[name] += count * (mean_square - truth)
    signal["all"], noise["all"] = (jnp.sum(jnp.stack(list(of.values()))) for of in (signal, noise))
    return signal, noise


def measure(
    gradients: dict,
    tokens: Int[Array, ""],
    sums: UnitSums,
    clip: Float[Array, ""],
    params: dict,
    updates: Any,
    opt_state: Any,
    layout: Layout,
) -> dict[str, Any]:
    """Scalars, by name. `gradients`: S / N, before the clip; `params`: before the update; `opt_state`: after it."""
    signal, noise = signal_and_noise(gradients, tokens, sums, layout)
    roots = lambda squares: {name: jnp.sqrt(square) for name, square in squares.items()}
    norms = lambda by: {
        "gradient_norm": roots(by(gradients, square_sum)),
        "parameter_norm": roots(by(params, square_sum)),
        "update_norm": roots(by(updates, square_sum)),
    }
    same = jax.tree.map(lambda p, u: (p + u == p).astype(jnp.float32), params, updates)
    sizes = layout.by_group(params, lambda leaf: leaf.size)
    unchanged = {name: count / sizes[name] for name, count in layout.by_group(same, jnp.sum).items()}
    return {
        "signal": signal,
        "noise": noise,
        "coherence_running": sums.coherence,
        "clipped": (clip < 1).astype(jnp.float32),
        "groups": norms(layout.by_group) | {"unchanged_share": unchanged, "moment_ratio": moment_ratios(opt_state)},
        "blocks": norms(layout.by_block),
    }


def moment_ratios(opt_state: Any) -> dict[str, Float[Array, ""]]:
    """Of each group that AdamW updates, the sum of the squared first moments over that of the second ones: near 1 where
    gradients agree from step to step, near (1 - beta1) / (1 + beta1) where they are noise."""
    adam = lambda node: isinstance(node, optax.ScaleByAdamState)
    ratios = {}
    for name, of_group in opt_state.inner_states.items():  # optax.partition's
        for state in filter(adam, jax.tree.leaves(of_group, is_leaf=adam)):
            first, second = (
                sum(function(leaf) for leaf in jax.tree.leaves(moments))
                for function, moments in ((square_sum, state.mu), (jnp.sum, state.nu))
            )
            ratios[name] = first / jnp.maximum(second, 1e-30)
    return ratios
