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

Two options cost memory. `diagnostics.successive` keeps the gradient of the micro-batch before, for the cosine with it.
`diagnostics.adam_metric` takes the squares once more, each over the root of AdamW's second moment v from before the
step, of which this step's noise is no part: the metric in which AdamW steps. v is divided over `data`, so its root is
gathered as the parameters are, in the compute type.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.parallel import BATCH_AXES, mark_varying, psum, tensor_size
from model.shapes import DATA
from training.layout import Place
from training.muon import MuonState
from training.optimizer import AdamState

DIVIDED, UNDIVIDED = 0, 1  # over `fsdp`: whose units are those of a replica, or of a device
# The least that a second moment counts as, as a share of its group's mean. Without it rows of a table that were not
# seen of late, whose second moments have decayed to nearly nothing, would outweigh all others.
MIN_V = 1e-6


class Layout(NamedTuple):
    """Where the leaves of a tree of parameters belong, in the tree's order."""

    places: list[Place]
    groups: list[str]
    blocks: list[str]
    """The transformer block's number; empty for what is in none."""

    @classmethod
    def of(cls, places: dict, groups: list[str]) -> "Layout":
        """Of a tree of places, and its leaves' groups."""
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(places)]
        blocks = [str(path[1].key) if path[0].key == "blocks" else "" for path in paths]
        return cls(jax.tree.leaves(places), groups, blocks)

    @property
    def names(self) -> list[str]:
        """The groups there are."""
        return sorted(set(self.groups))

    @property
    def kinds(self) -> list[int]:
        """Of each leaf, DIVIDED or UNDIVIDED."""
        return [DIVIDED if "fsdp" in place.axes else UNDIVIDED for place in self.places]

    @property
    def sizes(self) -> dict[str, float]:
        """How many parameters each group has, without padding. Floats: an integer would have to fit in 32 bits."""
        return {
            name: float(sum(prod(p.shape) for p, of in zip(self.places, self.groups) if of == name))
            for name in self.names
        }

    def by_group(self, tree: Any, function: Callable[[Array], Any]) -> dict[str, Any]:
        """The sums of `function(leaf)` over each group."""
        return _summed(self.groups, jax.tree.leaves(tree), function)

    def by_block(self, tree: Any, function: Callable[[Array], Any]) -> dict[str, Any]:
        """The sums of `function(leaf)` over each block."""
        return _summed(self.blocks, jax.tree.leaves(tree), function)


def _summed(keys: Sequence[str], leaves: Sequence[Array], function: Callable[[Array], Any]) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for key, leaf in zip(keys, leaves):
        if key:
            sums[key] = sums.get(key, 0) + function(leaf)
    return sums


def square_sum(leaf: Float[Array, "..."]) -> Float[Array, ""]:
    """The sum of the squares, in float32."""
    return jnp.sum(jnp.square(leaf.astype(jnp.float32)))


Metric = dict[int, Array]
"""What squares are multiplied by, by the leaf's place in the tree. Leaves that are not in it are left out."""


class Units(NamedTuple):
    """What the scan keeps of each micro-batch on one device."""

    tokens: Int[Array, "*K"]
    products: dict[str, Float[Array, "*K 2 groups"]]
    """This device's shares, for DIVIDED and UNDIVIDED: `own` of |g_k|^2; `running` of the squared norm of the sum so
    far, g_k included; where they are asked for, `adam` of |g_k|^2 in AdamW's metric, and `successive` of the product
    with the gradient before, which is 0 at first."""


class UnitSums(NamedTuple):
    """Of all units of the step; the same on every device."""

    token_squares: Float[Array, "2"]
    """M."""
    squares: dict[str, Float[Array, "2 groups"]]
    """Q, `own` and in the metric of `adam`."""
    coherence: dict[str, Float[Array, ""]]
    """The mean cosine between a micro-batch's gradient and the sum before it (`running`), and the gradient before it
    (`successive`); nan where K = 1."""


def unit(
    tokens: Int[Array, ""],
    gradients: dict,
    sums: dict,
    layout: Layout,
    metric: Metric | None = None,
    before: dict | None = None,
) -> Units:
    """For one device: what is kept of a micro-batch with these `gradients`, after which the sums are `sums`; `before`
    are the gradients of the micro-batch before it."""
    products = {"own": _products(gradients, gradients, layout), "running": _products(sums, sums, layout)}
    if metric:
        products["adam"] = _products(gradients, gradients, layout, metric)
    if before:
        products["successive"] = _products(gradients, before, layout)
    return Units(tokens, products)


def _products(a: dict, b: dict, layout: Layout, metric: Metric | None = None) -> Float[Array, "2 groups"]:
    zero = mark_varying(jnp.float32(0), (*BATCH_AXES, "tensor"))
    totals = {(kind, name): zero for kind in (DIVIDED, UNDIVIDED) for name in layout.names}
    kinds = layout.kinds  # once: it looks at every leaf
    for i, (mine, other) in enumerate(zip(jax.tree.leaves(a), jax.tree.leaves(b))):
        if metric is not None and i not in metric:
            continue
        product = jnp.sum(mine * other if metric is None else mine * other * metric[i])
        if "tensor" not in layout.places[i].axes:  # alike along `tensor`: each device counts its part
            product = mark_varying(product / tensor_size(), ("tensor",))
        totals[kinds[i], layout.groups[i]] += product
    return jnp.stack(list(totals.values())).reshape(2, -1)


def sum_units(units: Units) -> UnitSums:
    """For one device: the sums over all units, from what the scan kept on each device. [K, ...] arrays of numbers cross
    the mesh, nothing else."""
    own_tokens = units.tokens.astype(jnp.float32)
    of_device = psum(units.products, ("tensor",))
    tokens, divided = psum((own_tokens, {name: of[:, DIVIDED] for name, of in of_device.items()}), ("fsdp",))
    replicas = psum(mark_varying(jnp.float32(1), DATA), DATA)
    whole = {name: of.sum(-1) for name, of in divided.items()}  # over the groups
    each, so_far = whole["own"], whole["running"]
    dots = {"running": (jnp.diff(so_far) - each[1:]) / 2}  # |A + g|^2 = |A|^2 + |g|^2 + 2 A.g
    lengths = {"running": jnp.sqrt(so_far[:-1] * each[1:])}
    if "successive" in whole:
        dots["successive"], lengths["successive"] = whole["successive"][1:], jnp.sqrt(each[:-1] * each[1:])

    def mean_cosine(name: str) -> Float[Array, ""]:
        cosines = jnp.where(lengths[name] > 0, dots[name] / jnp.where(lengths[name] > 0, lengths[name], 1), 0)
        return psum(jnp.mean(cosines) if cosines.size else jnp.nan * each.sum(), DATA) / replicas

    def over_units(name: str) -> Float[Array, "2 groups"]:
        by_device = psum(jnp.sum(of_device[name][:, UNDIVIDED], 0), BATCH_AXES)
        return jnp.stack([psum(jnp.sum(divided[name], 0), DATA), by_device])

    return UnitSums(
        jnp.stack([psum(jnp.sum(tokens**2), DATA), psum(jnp.sum(own_tokens**2), BATCH_AXES)]),
        {name: over_units(name) for name in ("own", "adam") if name in divided},
        {name: mean_cosine(name) for name in dots},
    )


def adam_metric(opt_state: Any, layout: Layout, dtype: jnp.dtype) -> Metric:
    """One over the root of AdamW's second moments, of each leaf that AdamW updates, in the compute type; nan before
    there are any."""
    metric: Metric = {}
    sizes = layout.sizes  # once: it looks at every leaf
    for name, (_, second) in _adam_moments(opt_state).items():
        mean = sum(jnp.sum(leaf) for leaf in second) / sizes[name]
        for i, leaf in zip([i for i, group in enumerate(layout.groups) if group == name], second):
            weight = jnp.where(mean > 0, jax.lax.rsqrt(jnp.maximum(leaf, MIN_V * mean)), jnp.nan)
            metric[i] = weight if leaf.ndim == 1 else weight.astype(dtype)  # as `all_gather_data` casts parameters
    return metric


def signal_and_noise(
    gradients: dict, tokens: Int[Array, ""], sums: UnitSums, layout: Layout, metric: Metric | None = None
) -> tuple[dict[str, Float[Array, ""]], dict[str, Float[Array, ""]]]:
    """|G|^2 and tr Sigma of each group, and of `all`; nan where there is one unit. `gradients`: S / N, not clipped. In
    AdamW's `metric`, where it is given: of the groups that AdamW updates, and `all` of these."""
    count, pairs = tokens.astype(jnp.float32), 1 - sums.token_squares / tokens.astype(jnp.float32) ** 2
    leaves, in_metric = jax.tree.leaves(gradients), sums.squares["own" if metric is None else "adam"]
    signal: dict[str, Array] = {}
    noise: dict[str, Array] = {}
    kinds, chosen = layout.kinds, range(len(leaves)) if metric is None else metric
    places = {i: (kinds[i], layout.groups[i]) for i in chosen}
    for kind, name in sorted(set(places.values())):
        of = [i for i, place in places.items() if place == (kind, name)]
        weighted = (square_sum(leaves[i]) if metric is None else jnp.sum(leaves[i] ** 2 * metric[i]) for i in of)
        mean_square = sum(weighted)  # |S|^2 / N^2
        squares = in_metric[kind, layout.names.index(name)] / count**2
        truth = (mean_square - squares) / jnp.where(pairs[kind] > 0, pairs[kind], jnp.nan)
        signal[name] = signal.get(name, 0) + truth
        noise[name] = noise.get(name, 0) + count * (mean_square - truth)
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
    metric: Metric | None = None,
) -> dict[str, Any]:
    """Scalars, by name. `gradients`: S / N, before the clip; `params`: before the update; `opt_state`: after it;
    `metric`: AdamW's, from before it, where it is asked for."""
    signal, noise = signal_and_noise(gradients, tokens, sums, layout)
    in_adam_s = signal_and_noise(gradients, tokens, sums, layout, metric) if metric else ()
    roots = lambda squares: {name: jnp.sqrt(square) for name, square in squares.items()}
    norms = lambda by: {
        "gradient_norm": roots(by(gradients, square_sum)),
        "parameter_norm": roots(by(params, square_sum)),
        "update_norm": roots(by(updates, square_sum)),
    }
    same = layout.by_group(jax.tree.map(lambda p, u: (p + u == p).astype(jnp.float32), params, updates), jnp.sum)
    sizes, stored = layout.sizes, layout.by_group(params, lambda leaf: float(leaf.size))
    unchanged = {name: (count - (stored[name] - sizes[name])) / sizes[name] for name, count in same.items()}
    groups = norms(layout.by_group)
    clipped = {name: clip * norm for name, norm in groups["gradient_norm"].items()}
    return {
        "signal": signal,
        "noise": noise,
        **dict(zip(("adam_signal", "adam_noise"), in_adam_s)),
        **{f"coherence_{name}": cosine for name, cosine in sums.coherence.items()},
        "clipped": (clip < 1).astype(jnp.float32),
        "groups": groups | {"unchanged_share": unchanged, "snr": signal_over_noise(opt_state, clipped)},
        "blocks": norms(layout.by_block),
        "moments": moment_sums(opt_state),
    }


def signal_over_noise(opt_state: Any, gradient_norms: dict[str, Float[Array, ""]]) -> dict[str, Float[Array, ""]]:
    """Of each group, the norm of the optimizer's first moments m over the size of one step's gradient, which is the
    root of the sum of AdamW's second moments v, and, since Muon keeps none of the gradient, the norm of this step's
    own, as `gradient_norms` (after the clip) says: |m| / sqrt(v). Near 1 where gradients agree from step to step, near
    sqrt((1 - beta1) / (1 + beta1)) where they are noise; beta1 is Muon's momentum."""
    sums = moment_sums(opt_state)
    found = {name: jnp.sqrt(first / jnp.maximum(sums["second"][name], 1e-30)) for name, first in sums["first"].items()}
    for name, state in _states_of(MuonState, opt_state):
        norm = jnp.sqrt(sum(map(square_sum, jax.tree.leaves(state.mu))))
        found[name] = norm / jnp.maximum(gradient_norms[name], 1e-30)
    return found


def moment_sums(opt_state: Any) -> dict[str, dict[str, Any]]:
    """Of each group that AdamW updates, the sum of its `first` moments' squares, and that of its `second` moments."""
    moments = _adam_moments(opt_state)
    return {
        "first": {name: sum(map(square_sum, first)) for name, (first, _) in moments.items()},
        "second": {name: sum(map(jnp.sum, second)) for name, (_, second) in moments.items()},
    }


def _adam_moments(opt_state: Any) -> dict[str, tuple[list[Array], list[Array]]]:
    """The first and second moments of each group that AdamW updates, in the tree's order."""
    moments = lambda state: (jax.tree.leaves(state.mu), jax.tree.leaves(state.nu))
    return {name: moments(state) for name, state in _states_of(AdamState, opt_state)}


def _states_of(kind: type, opt_state: Any) -> Iterator[tuple[str, Any]]:
    """The groups whose transformations (optax.partition's) keep such a state."""
    is_one = lambda node: isinstance(node, kind)
    for name, of_group in opt_state.inner_states.items():
        yield from ((name, state) for state in filter(is_one, jax.tree.leaves(of_group, is_leaf=is_one)))
