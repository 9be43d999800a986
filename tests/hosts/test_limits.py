"""Test what memory a device has: as it reports, or the machine's and the container's."""

import psutil
import pytest
from jax import local_devices
from jaxlib import xla_client

from hosts import limits
from hosts.limits import cgroup_limit, device_limit
from hosts.machines import GPU_FRACTION
from hosts.runtime import start_jax

GIB = 2**30


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Return a folder for control groups in place of the kernel's; this process's are in `process`."""
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    monkeypatch.setattr(limits, "OF_PROCESS", tmp_path / "process")
    return tmp_path


def write(groups, process: str, **limit: str) -> None:
    (groups / "process").write_text(process)
    for path, text in limit.items():
        folder = groups / path.replace("__", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("memory.limit_in_bytes" if path.startswith("memory") else "memory.max")).write_text(f"{text}\n")


def test_the_least_limit_of_a_container_or_job_counts(groups):
    assert cgroup_limit() > 2**60  # macOS has no such file
    write(groups, "0::/job/step\n", job__step="max", job=f"{3 * GIB}")  # SLURM limits the job
    assert cgroup_limit() == 3 * GIB
    (groups / "memory.max").write_text(f"{2 * GIB}\n")  # a container with a namespace of its own sees the root alone
    assert cgroup_limit() == 2 * GIB
    write(groups, "3:cpu:/a\n2:memory:/docker/b\n0::/\n", memory__docker__b=f"{GIB}", memory=f"{2**63 - 4096}")
    assert cgroup_limit() == GIB
    (groups / "process").write_text("2:memory:/not/seen/here\n")
    assert cgroup_limit() == 2**63 - 4096


def test_cpu_devices_share_what_is_left_of_the_limit(groups):
    device = local_devices()[0]
    assert 0 < device_limit(device, 8) <= psutil.virtual_memory().total / 8
    rss = psutil.Process().memory_info().rss
    write(groups, "0::/\n", job="max")
    (groups / "memory.max").write_text(f"{rss + GIB // 2}")
    assert device_limit(device, 2) == pytest.approx(GIB / 4, rel=0.1)


def test_a_device_that_reports_its_limit_is_believed(groups):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 7 * GIB}

    assert device_limit(Device(), 4) == 7 * GIB


@pytest.mark.parametrize("given", ["", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"])
def test_jax_takes_the_fraction_of_a_gpu_that_a_plan_assumes_unless_the_user_sets_it(monkeypatch, given):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "0.5")  # to be restored
        if name != given:
            monkeypatch.delenv(name)
    start_jax()
    fraction = xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"]
    assert fraction == (0.5 if given else GPU_FRACTION)
