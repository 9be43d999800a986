"""The file of machine descriptions."""

import math

import pytest

from configs.schema import UserError
from program import machines as module
from program.machines import machines, peak_flops


def test_peak_flops():
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("TPU v5p") == peak_flops("TPU v5") == 459e12
    assert peak_flops("cpu") is None
    assert math.isfinite(peak_flops("NVIDIA A100-SXM4-80GB") or math.inf)


def test_every_machine_says_where_its_figures_are_from():
    for machine in machines().values():
        assert machine.source and machine.device_kind
        assert 0 < machine.network < machine.links < machine.bandwidth < machine.flops


def test_a_machine_that_a_user_adds_wrongly_is_named(tmp_path, monkeypatch):
    file = tmp_path / "machines.toml"
    file.write_text('[mine]\ndevice_kind = ["Mine"]\nmemory = 1e9\n')
    monkeypatch.setattr(module, "MACHINES", file)
    machines.cache_clear()
    try:
        with pytest.raises(UserError, match=r"machines\.toml.*flops"):
            machines()
    finally:
        machines.cache_clear()
