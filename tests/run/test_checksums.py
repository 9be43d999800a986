"""Test that a checksum depends on every element and bit, of any type, and not on the mesh."""

import jax
import numpy as np
import pytest

from run.checksums import checksums
from tests.training.test_state import state_on


def test_checksums_tell_every_element_and_every_bit_and_not_the_mesh():
    leaf = np.arange(60, dtype=np.float32).reshape(3, 4, 5) + 0.5
    whole = checksums({"a": leaf})
    for index in range(60):
        for bit in (0, 13, 31):
            other = leaf.copy()
            other.reshape(-1).view(np.uint32)[index] ^= np.uint32(1) << np.uint32(bit)
            assert checksums({"a": other}) != whole
    assert checksums({"a": leaf[:, ::-1]}) != whole
    sums = [checksums(jax.device_get(state_on(1)[0])), checksums(state_on(8)[0])]
    assert sums[0] == sums[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint8", "int32"])
def test_checksums_take_elements_of_any_width(dtype):
    leaf = np.arange(1, 13).reshape(3, 4).astype(dtype)
    whole = checksums({"a": jax.numpy.asarray(leaf)})
    for index in range(12):
        other = leaf.copy()
        other.reshape(-1).view(np.uint8)[index * leaf.itemsize] ^= 1
        assert checksums({"a": jax.numpy.asarray(other)}) != whole
