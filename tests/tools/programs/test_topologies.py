"""Test names of topologies, and compile the step for several slices and nodes that are not present."""

from collections import Counter

import pytest

from bench.throughput import Sizes, sized
from configs import plain
from hosts.topology import Topology
from model.gpt import parameter_counts
from options.schema import DATA_AXES, MeshConfig, with_options
from system.errors import UserError
from tools.programs.compiled import collectives, compile_step
from tools.programs.topologies import devices_of, named_by_clouds, parse_topology
from training.build import build
from training.mesh import axes_between


@pytest.mark.parametrize(
    ("text", "topology", "devices"),
    [
        ("v5e:4x4", Topology(1, "v5e", (4, 4)), 16),
        ("2x v5e:4x4", Topology(2, "v5e", (4, 4)), 32),
        (" 1x V6E:2x2 ", Topology(1, "v6e", (2, 2)), 4),
        ("h200:8", Topology(1, "h200", (8,)), 8),
        ("tpu7x:2x2x1", Topology(1, "tpu7x", (2, 2, 1)), 8),  # two devices per chip
    ],
)
def test_topologies_are_read(text, topology, devices):
    assert parse_topology(text) == topology and topology.devices == devices


@pytest.mark.parametrize("text", ["v5e", "v5e:4x", "0x v5e:4x4", "2 v5e:4x4", "v5e:0x4", "h200:2x4", "v5p-96"])
def test_an_invalid_topology_is_refused_with_valid_ones(text):
    with pytest.raises(UserError, match=r"--topology=.*h200:8"):
        parse_topology(text)


@pytest.mark.parametrize(
    ("text", "ours"),
    [("v5e-8", "v5e:2x4"), ("v6e-16", "v6e:4x4"), ("v5p-8", "v5p:2x2x1"), ("v4-64", "v4:2x4x4"), ("h100-8", "h100:8")],
)
def test_a_cloud_s_name_is_answered_with_the_topology(text, ours):
    assert named_by_clouds(text) == ours and parse_topology(ours)
    with pytest.raises(UserError, match=rf"; did you mean {ours}\?$"):
        parse_topology(text)


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "fsdp"), [("2x v5e:4x4", 4), ("2x h200:8", 1)])
def test_only_data_crosses_slices_and_nodes_once_a_step(topology, fsdp):
    """Compile a block with two micro-batches."""
    pytest.importorskip("jax_cuda13_plugin" if "h200" in topology else "libtpu")
    devices = devices_of(topology)
    options = {"mesh": MeshConfig(fsdp=fsdp), "batch.sequence_length": 512, "model.vocab_size": 4096}
    config = sized(with_options(plain.of_depth(1), options), Sizes(rows=1, micro_batches=2), len(devices))
    built = build(config, devices)
    traffic = collectives(compile_step(built).as_text(), dict(built.mesh.shape))
    assert axes_between(built.mesh) == ["data"]
    # The devices of an fsdp x tensor block share a replica. They must be in one slice or node.
    island = lambda device: device.slice_index if device.platform == "tpu" else device.process_index
    replicas = built.mesh.devices.reshape(-1, *built.mesh.devices.shape[len(DATA_AXES) :])
    assert all(len({island(device) for device in replica.flat}) == 1 for replica in replicas)
    over_data = [c for c in traffic if set(c.axes) & set(DATA_AXES)]
    assert over_data and not [c for c in over_data if c.in_loop]
    payload, across = Counter(), Counter()
    for c in over_data:
        (across if c.axes == DATA_AXES[:1] else payload)[c.kind, c.dtype] += c.times * c.bytes_each
    parameters = sum(parameter_counts(built.config.model).values()) // fsdp
    summed = payload["reduce-scatter", "f32"] + payload["all-reduce", "f32"]
    assert 4 * parameters <= summed < 4 * parameters + 4096
    gathered = payload.total() - summed  # all-gathers in the compute type, or all-reduces of zeros elsewhere
    assert 2 * parameters <= gathered < 2 * parameters + 4096
    # Between slices or nodes, only each device's share of gradients and parameters is sent.
    inside = len(replicas) // 2
    assert across.total() < 6 * parameters / inside + 4096
