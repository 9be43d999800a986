"""Test that every leaf of the state is divided over every axis of the mesh, whatever the sizes."""

from dataclasses import replace
from functools import partial
from math import prod

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from configs import nanochat, plain
from configs.nanochat import network_of_depth
from model.gpt import Parameter, kinds
from options.schema import BATCH_AXES, DATA_AXES, MeshConfig
from options.validation import resolved
from training.mesh import batch_devices, data_parts, make_mesh, resized
from training.sharded import spec_of
from training.shares import ShardLayout, all_gather_data, reduce_scatter_data, shard_layout, summed_layout


def numbers_in(layout: ShardLayout, sizes: dict[str, int]) -> int:
    """Return how many numbers of an array with this layout a device stores, padding included."""
    return prod(layout.stored) // prod(sizes[name] for names in layout.spec for name in names)


def memory_ratio(parameters: list[tuple[Parameter, int]], is_muon: bool, data: int, nodes: int) -> float:
    """Return the ratio of a device's parameters and moments to those that docs/step.md promises."""
    sizes = {**dict(zip(DATA_AXES, data_parts(data, nodes))), "fsdp": 1, "tensor": 1}
    stored = promised = 0
    for p, count in parameters:
        layout = shard_layout(p.shape, p.axes, sizes)
        share = second = numbers_in(layout, sizes)
        if is_muon and p.group == "matrices":
            inputs, outputs = p.shape
            shape = (inputs, 1) if outputs < inputs else (1, outputs)
            second = numbers_in(summed_layout(layout, shape, sizes), sizes)
            promised -= count * p.size
        stored += count * (2 * share + second)
        promised += 3 * count * p.size
    return stored * data / promised


@pytest.mark.medium
@pytest.mark.parametrize("config", [plain.of_depth(12), nanochat.get_config()], ids=["plain", "all"])
def test_state_takes_at_most_5_percent_more_than_its_share(config):
    """Take depths 14 to 50 on one node of up to eight devices, and on nodes of eight."""
    worst = 0.0
    for depth in (14, 26, 50):
        of_depth = resolved(replace(config, model=network_of_depth(config.model, depth)))
        parameters, is_muon = kinds(of_depth.model), of_depth.optimizer.matrices.kind == "muon"
        for data in (2, 3, 6, 24, 40, 96, 1024):
            for nodes in (1, data // 8) if data % 8 == 0 else (1,):
                worst = max(worst, memory_ratio(parameters, is_muon, data, nodes))
    assert 1.0 < worst <= 1.05


@pytest.mark.parametrize("sizes", [(3, 2, 1), (3, 1, 2), (2, 2, 2), (1, 2, 4), (8, 1, 1)], ids=str)
def test_the_gathered_array_is_the_parameter_and_the_scattered_one_the_sum(sizes):
    """Use shapes that the axes do not divide. If along both, padding moves the borders between devices too."""
    mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: prod(sizes)])
    shapes = {
        "a": ((6 * sizes[1], 10 * sizes[2]), ("fsdp", "tensor")),
        "b": ((10 * sizes[2], 14 * sizes[1]), ("tensor", "fsdp")),
        "c": ((7, 3 * sizes[2]), (None, "tensor")),
        "d": ((5,), (None,)),
    }
    layouts = {name: shard_layout(shape, axes, mesh.shape) for name, (shape, axes) in shapes.items()}
    generator = np.random.default_rng(0)
    values = {name: generator.standard_normal(shape).astype(np.float32) for name, (shape, _) in shapes.items()}
    stored = {
        name: jax.device_put(resized(value, layouts[name].stored), jax.NamedSharding(mesh, spec_of(layouts[name])))
        for name, value in values.items()
    }
    specs = jax.tree.map(spec_of, layouts)
    on_mesh = partial(jax.shard_map, mesh=mesh, check_vma=False)

    def gathered(shares):
        return all_gather_data(shares, layouts, np.dtype("float32"))

    whole = {name: PartitionSpec(*axes) for name, (_, axes) in shapes.items()}
    jax.tree.map(
        np.testing.assert_array_equal, jax.jit(on_mesh(gathered, in_specs=(specs,), out_specs=whole))(stored), values
    )

    def scattered(shares, number):
        return reduce_scatter_data(jax.tree.map(lambda p: p * number[0], gathered(shares)), layouts)

    # Every replica's gradient is its parameter times a different number.
    numbers = np.arange(1.0, batch_devices(mesh) + 1, dtype=np.float32)
    sums = jax.jit(on_mesh(scattered, in_specs=(specs, PartitionSpec(BATCH_AXES)), out_specs=specs))(stored, numbers)
    by_replica = numbers.reshape(sizes[0], sizes[1])
    for name, value in values.items():
        axes = shapes[name][1]
        if "fsdp" in axes:  # each device along `fsdp` has only its part's gradient
            along = axes.index("fsdp")
            parts = np.split(value, sizes[1], along)
            expected = np.concatenate([part * by_replica[:, i].sum() for i, part in enumerate(parts)], along)
        else:
            expected = value * numbers.sum()
        np.testing.assert_allclose(resized(sums[name], value.shape), expected, rtol=1e-6)
        beyond = np.asarray(sums[name]).sum() - np.asarray(resized(sums[name], value.shape)).sum()
        assert abs(beyond) < 1e-3
