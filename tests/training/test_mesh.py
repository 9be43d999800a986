import re
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import Mesh

from options.schema import BatchConfig, MeshConfig
from system.errors import UserError
from training.mesh import arrange, axes_between, batch_shape, device_groups, make_mesh


def mesh(replicas: int) -> Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:replicas])


@pytest.mark.parametrize(
    ("config", "works"),
    [
        (MeshConfig(data=1), "use --mesh.data=8 or -1"),
        (MeshConfig(data=16), "use --mesh.data=8 or -1"),
        (MeshConfig(data=4, fsdp=4), "use --mesh.data=2 or -1"),
        (MeshConfig(fsdp=3), "fsdp x tensor that divide them"),
    ],
)
def test_mesh_of_another_size_than_the_devices_is_refused(config, works):
    with pytest.raises(UserError, match=f"does not fit the 8 cpu .*{works}"):
        make_mesh(config)


@dataclass(frozen=True)
class GPU:
    """The attributes of a device that a mesh reads."""

    id: int
    slice_index: int
    process_index: int
    local_hardware_id: int | None = 0
    platform: str = "gpu"
    device_kind: str = "H200"


def gpus(nodes: int, each: int, tasks: int = 1) -> list[GPU]:
    """Return the GPUs of several nodes, in `tasks` processes per node."""
    return [GPU(i, i // each, i * tasks // each) for i in range(nodes * each)]


def test_islands_follow_slice_index_or_else_processes():
    assert [len(island) for island in device_groups(gpus(2, 8))] == [8, 8]
    assert [len(island) for island in device_groups(gpus(2, 8, tasks=8))] == [8, 8]  # one task per GPU: still two nodes
    one_domain = [replace(gpu, slice_index=0) for gpu in gpus(2, 4)]  # an NVLink domain of several machines
    assert [len(island) for island in device_groups(one_domain)] == [8]
    described = [replace(gpu, local_hardware_id=None) for gpu in one_domain]
    assert [len(island) for island in device_groups(described)] == [4, 4]
    assert len(device_groups(jax.devices())) == 1


@pytest.mark.parametrize(
    ("nodes", "each", "shape", "across"),
    [
        (2, 8, (16, 1, 1), (True, False, False)),
        (2, 8, (4, 2, 2), (True, False, False)),
        (2, 8, (2, 8, 1), (True, False, False)),
        (2, 8, (1, 16, 1), (False, True, False)),  # larger than a node: fsdp crosses nodes before tensor does
        (2, 4, (1, 1, 8), (False, False, True)),
        (3, 8, (2, 12, 1), (False, True, False)),
    ],
)
def test_data_spans_nodes_and_the_rest_stays_inside_as_far_as_it_fits(nodes, each, shape, across):
    devices = gpus(nodes, each)
    mesh = arrange(shape, device_groups(devices[::-1]))
    assert mesh.shape == shape and set(mesh.flat) == set(devices)
    node = np.vectorize(lambda device: device.slice_index)(mesh)
    assert tuple(bool(np.ptp(node, axis).any()) for axis in range(3)) == across


def test_axes_that_cross_nodes_are_named(monkeypatch):
    meshes = [make_mesh(MeshConfig(*sizes)) for sizes in ((4, 2, 1), (2, 2, 2), (1, 8, 1), (1, 1, 8))]
    monkeypatch.setattr("training.mesh.device_groups", lambda devices: [jax.devices()[:4], jax.devices()[4:]])
    assert [axes_between(mesh) for mesh in meshes] == [["data"], ["data"], ["fsdp"], ["tensor"]]


def test_nodes_of_different_sizes_are_refused():
    with pytest.raises(UserError, match=r"have \[4, 8\] devices"):
        arrange((12, 1, 1), device_groups(gpus(2, 8)[:12]))


@example(replicas=8, rows=25, rows_per_device=2, length=4)
@example(replicas=1, rows=12, rows_per_device=8, length=1)
@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 12), st.sampled_from([1, 8]))
def test_every_size_works_or_is_refused_with_sizes_that_work(replicas, rows, rows_per_device, length):
    config = BatchConfig(sequence_length=length, tokens_per_step=rows * length, rows_per_device=rows_per_device)
    try:
        micro_batches, width, _ = batch_shape(config, mesh(replicas))
    except UserError as error:
        message = str(error)
    else:
        assert micro_batches * width == rows
        assert width == replicas * min(rows_per_device, rows // replicas)
        return
    assert re.match(rf"--batch\.(tokens_per_step={rows * length}|rows_per_device={rows_per_device}) ", message)
    proposed = message.split("; ", 1)[1]
    rows_that_work = re.findall(r"\d+", "".join(re.findall(r"\[.*\]", proposed)))
    tokens_that_work = re.findall(r"\d+", re.sub(r"\[.*\]", "", proposed))
    proposals = [replace(config, rows_per_device=int(n)) for n in rows_that_work]
    proposals += [replace(config, tokens_per_step=int(n)) for n in tokens_that_work]
    assert tokens_that_work
    for proposal in proposals:
        micro_batches, width, _ = batch_shape(proposal, mesh(replicas))
        assert micro_batches * width * length == proposal.tokens_per_step
