"""Test the file of machine descriptions, and what memory a device has: as it reports, or the machine's and the
container's."""

import re
from types import SimpleNamespace

import psutil
import pytest
from jax import local_devices
from jaxlib import xla_client

from hosts import machines as module
from hosts.machines import GIB, GPU_FRACTION, cgroup_limit, device_limit, peak_flops
from hosts.runtime import start_jax
from hosts.topology import machines
from system.errors import UserError
from tools.programs.topologies import CORES, target_config

KINDS = {
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA H200": "h200",
    "NVIDIA H100 PCIe": "h100_pcie",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA A100-SXM4-40GB": "a100_40gb",
    "NVIDIA A100-PCIE-40GB": "a100_40gb",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA GB200": "gb200",
    "NVIDIA GeForce RTX 4090": "rtx_4090",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100",
    "TPU7x": "tpu7x",
}


def test_a_device_finds_its_machine_and_other_cards_find_none():
    assert {name: peak_flops(name) for name in KINDS} == {name: machines()[kind].flops for name, kind in KINDS.items()}
    for other in ("NVIDIA L40S", "NVIDIA A10", "NVIDIA T400", "NVIDIA GeForce RTX 4090 Laptop GPU", "cpu"):
        assert peak_flops(other) is None
    assert peak_flops("NVIDIA H200") == 989e12 and peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("TPU v5p") == peak_flops("TPU v5") == 459e12
    assert machines()["h200"].for_programs == int(GPU_FRACTION * 150_754_820_096)  # JAX's part of the memory
    assert machines()["v5e"].for_programs == machines()["v5e"].memory


def test_each_machine_s_figures_are_complete_and_xla_gets_a_gpu_s():
    for machine in machines().values():
        assert machine.source and machine.device_kind
        assert 0 < machine.bandwidth < machine.flops and machine.directions > 0
    gpus = [machine for machine in machines().values() if machine.gpu]
    assert {machine.kind for machine in gpus if machine.capability not in CORES} == {"v100"}
    for machine in gpus:
        assert 0 < machine.float32 < machine.flops and machine.float32 == machine.peak("float32")
        if machine.capability in CORES:
            text = target_config(machine)
            assert peak_flops(text.split('device_description_str: "')[1].split('"')[0]) == machine.flops
            figures = dict(re.findall(r"^  (\w+): ([\d.]+)$", text, re.MULTILINE))
            assert float(figures["clock_rate_ghz"]) == pytest.approx(machine.clock / 1e9)
            assert int(figures["core_count"]) == machine.multiprocessors and int(figures["l2_cache_size"]) == machine.l2
            assert int(figures["device_memory_size"]) == machine.memory and all(map(float, figures.values()))


def test_an_invalid_machine_of_the_user_is_named(tmp_path, monkeypatch):
    file = tmp_path / "machines.toml"
    file.write_text('[mine]\ndevice_kind = ["Mine"]\nmemory = 1e9\n')
    monkeypatch.setattr(module, "MACHINES", file)
    monkeypatch.setattr("hosts.topology.MACHINES", file)
    for read in (machines.__wrapped__, lambda: peak_flops("Mine")):
        with pytest.raises(UserError, match=r"machines\.toml.*flops"):
            read()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes this process's control groups, and limits of groups, in place of the kernel's."""
    monkeypatch.setattr(module, "CGROUPS", tmp_path)
    monkeypatch.setattr(module, "OF_PROCESS", tmp_path / "process")

    def write(process: str, **limits: str) -> None:
        (tmp_path / "process").write_text(process)
        for path, text in limits.items():
            folder = tmp_path / path.replace("__", "/").removeprefix("root")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ("memory.limit_in_bytes" if path.startswith("memory") else "memory.max")).write_text(f"{text}\n")

    return write


def test_the_least_limit_of_a_container_or_job_counts(write):
    assert cgroup_limit() > 2**60  # macOS has no such file
    write("0::/job/step\n", job__step="max", job=f"{3 * GIB}")  # SLURM limits the job
    assert cgroup_limit() == 3 * GIB
    write("0::/job/step\n", root=f"{2 * GIB}")  # a container with a namespace of its own sees the root alone
    assert cgroup_limit() == 2 * GIB
    write("3:cpu:/a\n2:memory:/docker/b\n0::/\n", memory__docker__b=f"{GIB}", memory=f"{2**63 - 4096}")
    assert cgroup_limit() == GIB
    write("2:memory:/not/seen/here\n")
    assert cgroup_limit() == 2**63 - 4096


def test_a_device_reports_its_limit_or_shares_what_the_machine_has_left(write):
    reports = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 7 * GIB})
    assert device_limit(reports, 4) == 7 * GIB
    assert 0 < device_limit(local_devices()[0], 8) <= psutil.virtual_memory().total / 8
    write("0::/\n", root=f"{psutil.Process().memory_info().rss + GIB // 2}")
    assert device_limit(local_devices()[0], 2) == pytest.approx(GIB / 4, rel=0.1)


@pytest.mark.parametrize("given", ["", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"])
def test_jax_takes_the_fraction_of_a_gpu_that_a_plan_assumes_unless_the_user_sets_it(monkeypatch, given):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "0.5")  # to be restored
        if name != given:
            monkeypatch.delenv(name)
    start_jax()
    fraction = xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"]
    assert fraction == (0.5 if given else GPU_FRACTION)
