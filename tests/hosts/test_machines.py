"""Test the file of machine descriptions."""

import math

import pytest

from configs.schema import UserError
from hosts import machines as module
from hosts.machines import GPU_FRACTION, machine_of, machines, peak_flops
from tools.programs.topologies import H200


def test_peak_flops():
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("TPU v5p") == peak_flops("TPU v5") == 459e12
    assert peak_flops("cpu") is None
    assert math.isfinite(peak_flops("NVIDIA A100-SXM4-80GB") or math.inf)


def test_the_longest_name_counts_and_a_gpu_s_memory_is_jax_s_part():
    kinds = {
        "NVIDIA GH200 480GB": "gh200",
        "NVIDIA H200": "h200",
        "NVIDIA H100 PCIe": "h100_pcie",
        "NVIDIA H100 NVL": "h100_nvl",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-40GB": "a100_40gb",
        "NVIDIA A100-PCIE-40GB": "a100_40gb",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA GB200": "gb200",
        "NVIDIA B200": "b200",
        "TPU7x": "tpu7x",
    }
    assert {name: machine.kind for name in kinds if (machine := machine_of(name))} == kinds
    assert f"device_memory_size: {machines()['h200'].memory}" in H200
    assert machines()["h200"].for_programs == int(GPU_FRACTION * 150_754_820_096)
    assert machines()["v5e"].for_programs == machines()["v5e"].memory


def test_every_machine_states_the_source_of_its_figures():
    for machine in machines().values():
        assert machine.source and machine.device_kind
        assert 0 < machine.network < machine.links < machine.bandwidth < machine.flops


def test_an_invalid_machine_of_the_user_is_named(tmp_path, monkeypatch):
    file = tmp_path / "machines.toml"
    file.write_text('[mine]\ndevice_kind = ["Mine"]\nmemory = 1e9\n')
    monkeypatch.setattr(module, "MACHINES", file)
    machines.cache_clear()
    try:
        with pytest.raises(UserError, match=r"machines\.toml.*flops"):
            machines()
    finally:
        machines.cache_clear()
