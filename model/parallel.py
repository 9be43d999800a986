"""What the network says across devices, written out, so that a reader can count it.

Inside the step (`jax.shard_map`) each device holds a share of every matrix: the dimension that is the residual stream's
width is divided over the mesh axis `fsdp`, the other (heads, MLP width, vocabulary) over `tensor`. (Value embeddings
have no such width: their vocabulary takes its place.) What is too small to divide is whole on every device. Outside,
where the mesh is one device, every function here does nothing.
"""

from typing import TypeVar

import jax
from jaxtyping import Array, Float, Int

T = TypeVar("T")
Axes = tuple[str | None, ...]
"""For each dimension of a parameter, the mesh axis it is divided over."""


def inside() -> bool:
    """Whether this is traced for one device of the step's mesh."""
    return "tensor" in jax.sharding.get_abstract_mesh().manual_axes


def platform() -> str:
    """Of the device that this is traced for: the mesh's, if there is one (TPU programs are compiled elsewhere, too)."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def own(x: T, axes: tuple[str, ...]) -> T:
    """The same arrays, marked as this device's own along `axes`: their gradients are not summed over these."""
    return jax.lax.pcast(x, axes, to="varying") if inside() else x


def total(x: T, axes: tuple[str, ...]) -> T:
    """The sums over the devices along `axes`."""
    return jax.lax.psum(x, axes) if inside() else x


def split(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Before work that is divided over `tensor`: the same values; their gradients are summed over `tensor`."""
    return own(x, ("tensor",))


def join(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """After it: the sum of the devices' parts."""
    return total(x, ("tensor",))


def tensor_index() -> Array | int:
    """Which of the parts along `tensor` this device holds."""
    return jax.lax.axis_index("tensor") if inside() else 0


def tensor_size() -> int:
    """How many parts there are along `tensor`."""
    return jax.lax.axis_size("tensor") if inside() else 1


def whole_vocabulary(logits: Float[Array, "batch vocab_share"]) -> Float[Array, "batch vocab"]:
    """The logits of all devices along `tensor`, put together."""
    return jax.lax.all_gather(logits, "tensor", axis=1, tiled=True) if inside() else logits


def agreed(tokens: Int[Array, "batch"]) -> Int[Array, "batch"]:
    """The tokens that every device has drawn alike, as one value of the whole mesh."""
    return jax.lax.pmax(tokens, ("data", "fsdp", "tensor")) if inside() else tokens


def gather(share: Float[Array, "..."], axes: Axes) -> Float[Array, "..."]:
    """A parameter's shares over `fsdp`, made whole."""
    if not inside() or "fsdp" not in axes:
        return share
    return jax.lax.all_gather(share, "fsdp", axis=axes.index("fsdp"), tiled=True)


def scatter(gradient: Float[Array, "..."], axes: Axes) -> Float[Array, "..."]:
    """The gradient of `gather`: summed over `fsdp`, each device keeping its share."""
    if not inside() or "fsdp" not in axes:
        return gradient
    share = jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=axes.index("fsdp"), tiled=True)
    # Else XLA would move the sum out of the scan, and keep whole gradients in it, by the pass of openxla/xla#49143.
    return jax.lax.optimization_barrier(share)
