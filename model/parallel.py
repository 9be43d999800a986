"""The collectives of the network, written out, so that a reader can count them.

In the step (`jax.shard_map`, manual over all axes of the mesh) each device holds a share of every matrix: the dimension
that is the residual stream's width is divided over the mesh axis `fsdp`, the other (heads, MLP width, vocabulary) over
`tensor`. Value embeddings have no such width: their vocabulary takes its place. Every device has all of what is too
small to divide. On a mesh of one device there is no `jax.shard_map`, and every function here returns what it is given.
"""

from typing import TypeVar

import jax
from jaxtyping import Array, Float, Int, Shaped

from model.axes import BATCH_AXES

T = TypeVar("T")
Axes = tuple[str | None, ...]
"""For each dimension of a parameter, the mesh axis it is divided over."""


def in_shard_map() -> bool:
    """Whether this is traced for one device of a mesh, within `jax.shard_map`."""
    return "tensor" in jax.sharding.get_abstract_mesh().manual_axes


def platform() -> str:
    """Of the device that this is traced for: the mesh's, if there is one (TPU programs are compiled elsewhere, too)."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def compute_capability() -> float:
    """Of the GPUs here; without one, of those that programs are compiled for elsewhere, which are Hopper's
    (tools/programs/topologies.py)."""
    return float(jax.local_devices()[0].compute_capability) if jax.default_backend() == "gpu" else 9.0


def varying_as(like: Array, tree: T) -> T:
    """Return the same arrays, marked as varying over the mesh axes that `like` varies over."""
    axes = lambda x: jax.typeof(x).manual_axis_type.varying
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(axes(like) - axes(x)), to="varying"), tree)


def mark_varying(x: T, axes: tuple[str, ...]) -> T:
    """Return the same arrays, marked as varying over the mesh `axes`. Nothing is sent. The transpose is a psum over
    `axes`: a gradient with respect to the result is this device's own, and one with respect to `x` is summed."""
    return jax.lax.pcast(x, axes, to="varying") if in_shard_map() else x


def psum(x: T, axes: tuple[str, ...]) -> T:
    """Return the sums over the devices along `axes`."""
    return jax.lax.psum(x, axes) if in_shard_map() else x


def vary_over_tensor(x: T) -> T:
    """Return the input of work that is divided over `tensor`: the same values; their gradients are summed over
    `tensor`."""
    return mark_varying(x, ("tensor",))


def psum_over_tensor(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the result of work that is divided over `tensor`: the sum of the devices' parts, in their own type.
    Float32 would send twice the bytes in every block (docs/mesh.md has the errors)."""
    return psum(x, ("tensor",))


def pmax_over_tensor(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Return the largest of the values that the devices along `tensor` hold."""
    return jax.lax.pmax(x, "tensor") if in_shard_map() else x


def tensor_index() -> Array | int:
    """Return this device's position along `tensor`, which is also the number of its share."""
    return jax.lax.axis_index("tensor") if in_shard_map() else 0


def tensor_size() -> int:
    """Return the number of devices along `tensor`."""
    return jax.lax.axis_size("tensor") if in_shard_map() else 1


def own_heads(heads: int) -> tuple[Array | int, int]:
    """Return the first of this device's key heads and their number, of so many in all. Where `tensor` is a multiple of
    their number, devices that follow each other share one."""
    return tensor_index() * heads // tensor_size(), max(1, heads // tensor_size())


def all_gather_shared_head(
    x: Float[Array, "batch length own_heads part"], heads: int
) -> Float[Array, "batch length own_heads head_dim"]:
    """Of channels that `tensor` divides all those of this device's key heads: itself, except where devices share a
    head. Then each has computed its part of it; the transpose sums their gradients, once."""
    sharing = tensor_size() // heads
    if sharing <= 1:
        return x
    groups = [list(range(first, first + sharing)) for first in range(0, tensor_size(), sharing)]
    return jax.lax.all_gather(x, "tensor", axis=3, tiled=True, axis_index_groups=groups)


def all_gather_vocabulary(logits: Float[Array, "batch vocab_share"]) -> Float[Array, "batch vocab"]:
    """Return the logits of all devices along `tensor`."""
    return jax.lax.all_gather(logits, "tensor", axis=1, tiled=True) if in_shard_map() else logits


def pmax_over_mesh(tokens: Int[Array, "batch"]) -> Int[Array, "batch"]:
    """Return the largest over all devices: of tokens that every device has drawn alike these tokens, marked as varying
    over no axis."""
    return jax.lax.pmax(tokens, (*BATCH_AXES, "tensor")) if in_shard_map() else tokens


def psum_scatter(x: Float[Array, "..."], axis: str | tuple[str, ...], dimension: int) -> Float[Array, "..."]:
    """Return the sum over the devices along the mesh `axis`, or several, of which each keeps its share of
    `dimension`."""
    if platform() == "cpu" and jax.process_count() > 1:
        # Processes on CPUs sum through gloo, whose reduce-scatter now and then sends a buffer that it has overwritten
        # already (jax issue 40830); its all-reduce does not.
        size = x.shape[dimension] // jax.lax.axis_size(axis)
        return jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, axis), jax.lax.axis_index(axis) * size, size, dimension)
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)


def all_gather_fsdp(share: Float[Array, "..."], axes: Axes) -> Float[Array, "..."]:
    """Return a parameter whose dimensions are divided over `axes`, gathered along `fsdp`."""
    if not in_shard_map() or "fsdp" not in axes:
        return share
    return jax.lax.all_gather(share, "fsdp", axis=axes.index("fsdp"), tiled=True)


def order_gradients(dx: Float[Array, "*shape"], dkernel: Float[Array, "i o"]) -> tuple[Array, Array]:
    """Return the same gradients, of a product's input and of its gathered matrix. With `fsdp` on GPUs the backward pass
    continues only when both are there.

    XLA's latency hiding scheduler would leave the gradients of most matrices for the end, to have work during the
    reduce-scatters, and all that they are computed from would be kept until then (docs/performance.md).
    """
    if platform() in ("gpu", "cuda") and in_shard_map() and jax.lax.axis_size("fsdp") > 1:
        return jax.lax.optimization_barrier((dx, dkernel))
    return dx, dkernel


def reduce_scatter_fsdp(gradient: Float[Array, "..."], axes: Axes) -> Float[Array, "..."]:
    """Return the gradient with respect to what `all_gather_fsdp` takes: the sum over `fsdp`, of which each device keeps
    its share."""
    # One device along `fsdp` has nothing to sum. Without a barrier XLA adds a table's rows to the scan's sum in place.
    if not in_shard_map() or "fsdp" not in axes or jax.lax.axis_size("fsdp") == 1:
        return gradient
    share = psum_scatter(gradient, "fsdp", axes.index("fsdp"))
    # Without the barrier XLA moves the sum out of the scan, which then keeps all of it (openxla/xla#49143's pass).
    return jax.lax.optimization_barrier(share)
