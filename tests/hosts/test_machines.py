"""Test the file of machine descriptions."""

import math
import re

import pytest

from configs.schema import UserError
from hosts import machines as module
from hosts.machines import GPU_FRACTION, machine_of, machines, peak_flops
from tools.programs.topologies import CORES, target_config


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
        "NVIDIA L4": "l4",
        "NVIDIA A10G": "a10g",
        "NVIDIA GeForce RTX 3090": "rtx_3090",
        "NVIDIA GeForce RTX 4090": "rtx_4090",
        "NVIDIA GeForce RTX 5090": "rtx_5090",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx_pro_6000",
        "Tesla T4": "t4",
        "Tesla V100-SXM2-16GB": "v100",
        "TPU7x": "tpu7x",
    }
    assert {name: machine.kind for name in kinds if (machine := machine_of(name))} == kinds
    assert machines()["h200"].for_programs == int(GPU_FRACTION * 150_754_820_096)
    assert machines()["v5e"].for_programs == machines()["v5e"].memory


@pytest.mark.parametrize("other", ["NVIDIA L40S", "NVIDIA A10", "NVIDIA T400", "NVIDIA GeForce RTX 4090 Laptop GPU"])
def test_other_cards_are_not_taken_for_described_ones(other):
    assert machine_of(other) is None


def test_xla_gets_each_gpu_s_figures_and_a_name_that_finds_its_machine():
    gpus = [machine for machine in machines().values() if machine.gpu]
    assert {machine.kind for machine in gpus if machine.capability not in CORES} == {"v100"}
    for machine in gpus:
        assert 0 < machine.float32 < machine.flops and machine.float32 == machine.peak("float32")
        if machine.capability in CORES:
            text = target_config(machine)
            assert machine_of(text.split('device_description_str: "')[1].split('"')[0]) == machine
            figures = dict(re.findall(r"^  (\w+): ([\d.]+)$", text, re.MULTILINE))
            assert float(figures["clock_rate_ghz"]) == pytest.approx(machine.clock / 1e9)
            assert int(figures["core_count"]) == machine.multiprocessors and int(figures["l2_cache_size"]) == machine.l2
            assert int(figures["device_memory_size"]) == machine.memory and all(map(float, figures.values()))


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
