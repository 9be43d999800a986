"""Test the network's own versions of JAX's collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from model.parallel import psum_scatter


@pytest.mark.parametrize("processes", [1, 2])
def test_several_processes_on_cpus_do_without_gloo_s_reduce_scatter(monkeypatch, processes):
    """Under load gloo gave another gradient in two of five runs of two processes (jax issue 40830)."""
    monkeypatch.setattr("jax.process_count", lambda: processes)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    columns, rows = PartitionSpec(None, ("data", "fsdp")), PartitionSpec(("data", "fsdp"))
    scatter = jax.shard_map(lambda x: psum_scatter(x, "fsdp", 0), mesh=mesh, in_specs=columns, out_specs=rows)
    x = jnp.arange(8.0 * 16).reshape(8, 16)
    compiled = jax.jit(scatter).lower(x).compile()
    assert ("reduce-scatter" in compiled.as_text()) == (processes == 1)
    assert compiled.as_text().count("all-reduce(") == processes - 1
    sums = x.reshape(8, 2, 4, 2).sum(axis=2)  # over the four devices along `fsdp`
    np.testing.assert_array_equal(compiled(x), np.concatenate([sums[:, 0], sums[:, 1]]))
