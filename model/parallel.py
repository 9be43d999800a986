"""The collectives of the network, written out, so that a reader can count them.

In the step (`jax.shard_map`, manual over all axes of the mesh) each device has a share of every matrix. The dimension
of the residual stream's width is divided over the mesh axis `fsdp`, the other one (heads, MLP width, vocabulary) over
`tensor`. Value embeddings have no such width, so `fsdp` divides their vocabulary. Parameters too small to divide are
replicated. On a mesh of one device there is no `jax.shard_map`, and every function here returns its input.
"""

from typing import TypeVar

import jax
from jaxtyping import Array, Float, Shaped

T = TypeVar("T")
Axes = tuple[str | None, ...]
"""For each dimension of a parameter, the mesh axis that divides it."""
described_capability = 9.0
"""Compute capability of the GPU that programs are compiled for on a machine without one: Hopper's, unless
tools/programs/topologies.py describes another."""


def in_shard_map() -> bool:
    """Return whether this is traced for one device of a mesh, within `jax.shard_map`."""
    return "tensor" in jax.sharding.get_abstract_mesh().manual_axes


def platform() -> str:
    """Return the platform that this is traced for: the mesh's, if there is one (TPU programs are also compiled
    elsewhere)."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def compute_capability() -> float:
    """Return the compute capability of the GPUs here; without a GPU, `described_capability`."""
    here = jax.default_backend() == "gpu"
    return float(jax.local_devices()[0].compute_capability) if here else described_capability


def varying_as(like: Array, tree: T) -> T:
    """Return the arrays, marked as varying over the same mesh axes as `like`."""

    def axes(x: Array) -> frozenset[str]:
        return jax.typeof(x).manual_axis_type.varying

    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(axes(like) - axes(x)), to="varying"), tree)


def mark_varying(x: T, axes: tuple[str, ...]) -> T:
    """Return the arrays, marked as varying over the mesh `axes`. Nothing is sent. The transpose is a psum over
    `axes`: a gradient with respect to the result is this device's own, and one with respect to `x` is summed."""
    return jax.lax.pcast(x, axes, to="varying") if in_shard_map() else x


def psum(x: T, axes: tuple[str, ...]) -> T:
    """Return the sums over the devices along `axes`."""
    return jax.lax.psum(x, axes) if in_shard_map() else x


def vary_over_tensor(x: T) -> T:
    """Return the input of work divided over `tensor`: the same values, whose gradients are summed over `tensor`."""
    return mark_varying(x, ("tensor",))


def psum_over_tensor(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the result of work divided over `tensor`: the sum of the devices' parts, in their own type.
    Float32 would send twice the bytes in every block (docs/step.md has the errors)."""
    return psum(x, ("tensor",))


def pmax_over_tensor(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Return the maximum over the devices along `tensor`."""
    return jax.lax.pmax(x, "tensor") if in_shard_map() else x


def tensor_index() -> Array | int:
    """Return this device's position along `tensor`, the number of its share."""
    return jax.lax.axis_index("tensor") if in_shard_map() else 0


def tensor_size() -> int:
    """Return the number of devices along `tensor`."""
    return jax.lax.axis_size("tensor") if in_shard_map() else 1


def own_heads(heads: int) -> tuple[Array | int, int]:
    """Return the index of this device's first key head and the number of its key heads, of all `heads`. If `tensor`
    is a multiple of `heads`, consecutive devices share one."""
    return tensor_index() * heads // tensor_size(), max(1, heads // tensor_size())


def all_gather_shared_head(
    x: Float[Array, "batch length own_heads part"], heads: int
) -> Float[Array, "batch length own_heads head_dim"]:
    """Return all channels of this device's key heads. If devices share a head, gather the parts that each computed; the
    transpose sums their gradients once. Otherwise return the input."""
    sharing = tensor_size() // heads
    if sharing <= 1:
        return x
    groups = [list(range(first, first + sharing)) for first in range(0, tensor_size(), sharing)]
    return jax.lax.all_gather(x, "tensor", axis=3, tiled=True, axis_index_groups=groups)


def all_gather_vocabulary(logits: Float[Array, "batch vocab_share"]) -> Float[Array, "batch vocab"]:
    """Return the logits of all devices along `tensor`."""
    return jax.lax.all_gather(logits, "tensor", axis=1, tiled=True) if in_shard_map() else logits


def psum_scatter(x: Float[Array, "..."], axis: str | tuple[str, ...], dimension: int) -> Float[Array, "..."]:
    """Return the sum over the devices along one or several mesh axes. Each keeps its share of `dimension`."""
    if platform() == "cpu" and jax.process_count() > 1:
        # Processes on CPUs sum through gloo. Its reduce-scatter sometimes sends a buffer that it already overwrote (jax
        # issue 40830); its all-reduce does not.
        size = x.shape[dimension] // jax.lax.axis_size(axis)
        return jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, axis), jax.lax.axis_index(axis) * size, size, dimension)
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)


def all_gather_fsdp(share: Float[Array, "..."], axes: Axes) -> Float[Array, "..."]:
    """Return a parameter whose dimensions are divided over `axes`, gathered along `fsdp`."""
    if not in_shard_map() or "fsdp" not in axes:
        return share
    return jax.lax.all_gather(share, "fsdp", axis=axes.index("fsdp"), tiled=True)


def order_gradients(dx: Float[Array, "*shape"], dkernel: Float[Array, "i o"]) -> tuple[Array, Array]:
    """Return the gradients of a product's input and of its gathered matrix. With `fsdp` on GPUs the backward pass
    continues only when both are computed.

    XLA's latency hiding scheduler would compute most matrices' gradients at the end, as work during the
    reduce-scatters. Their inputs would be kept until then (docs/performance.md).
    """
    if platform() in ("gpu", "cuda") and in_shard_map() and jax.lax.axis_size("fsdp") > 1:
        return jax.lax.optimization_barrier((dx, dkernel))
    return dx, dkernel


def reduce_scatter_fsdp(gradient: Float[Array, "..."], axes: Axes) -> Float[Array, "..."]:
    """Return the gradient of the input of `all_gather_fsdp`: the sum over `fsdp`. Each device keeps its share."""
    # One device along `fsdp` has nothing to sum. Without a barrier XLA adds a table's rows to the scan's sum in place.
    if not in_shard_map() or "fsdp" not in axes or jax.lax.axis_size("fsdp") == 1:
        return gradient
    share = psum_scatter(gradient, "fsdp", axes.index("fsdp"))
    # Without the barrier XLA moves the sum out of the scan, which then keeps all of it (openxla/xla#49143's pass).
    return jax.lax.optimization_barrier(share)
