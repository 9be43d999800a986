"""Test which type of activations `model.dtype=auto` stands for."""

from dataclasses import replace

import jax
import pytest

from tests.helpers import tiny_config
from training import dtype
from training.dtype import compute_dtype, fastest_dtype

AVX2, AVX512 = "fma avx avx2", "fma avx avx2 avx512f avx512bw avx512_vnni"


@pytest.mark.parametrize(
    ("platform", "version", "capability", "flags", "expected", "why"),
    [
        ("cpu", (0, 12, 0), 9.0, AVX2, "float32", "the processor has no amx_bf16 or avx512_bf16"),
        ("cpu", (0, 12, 0), 9.0, AVX512, "float32", "the processor has no amx_bf16 or avx512_bf16"),
        ("cpu", (0, 12, 0), 9.0, f"{AVX512} avx512_bf16", "bfloat16", "the processor has avx512_bf16"),
        ("cpu", (0, 13, 0), 9.0, f"{AVX512} avx512_bf16 amx_bf16 amx_tile", "bfloat16", "amx_bf16 and avx512_bf16"),
        ("cpu", (0, 11, 2), 9.0, f"{AVX512} avx512_bf16", "float32", "on a CPU, JAX before 0.12"),
        ("gpu", (0, 12, 0), 8.0, AVX2, "bfloat16", "a GPU multiplies bfloat16"),
        ("gpu", (0, 12, 0), 7.5, AVX512, "float32", "GPUs before Ampere"),
        ("tpu", (0, 11, 2), 9.0, AVX2, "bfloat16", "a TPU multiplies bfloat16"),
    ],
)
def test_the_type_is_the_faster_one_on_the_devices(
    platform, version, capability, flags, expected, why, tmp_path, monkeypatch
):
    """docs/performance.md has the measurements."""
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr("training.dtype.compute_capability", lambda: capability)
    monkeypatch.setattr(dtype, "CPUINFO", tmp_path / "cpuinfo")
    dtype.CPUINFO.write_text(f"processor\t: 0\nvmx flags\t: {AVX512}\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    chosen, reason = fastest_dtype(platform)
    assert chosen == expected and why in reason
    model = tiny_config().model
    assert compute_dtype(replace(model, dtype="auto"), platform) == expected
    other = "bfloat16" if expected == "float32" else "float32"
    assert compute_dtype(replace(model, dtype=other), platform) == other


def test_a_machine_that_lists_no_features_computes_in_float32(tmp_path, monkeypatch):
    """As macOS, which has no such file, and ARM's Linux, which names them otherwise."""
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    monkeypatch.setattr(dtype, "CPUINFO", tmp_path / "cpuinfo")
    assert fastest_dtype("cpu")[0] == "float32"
    dtype.CPUINFO.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert fastest_dtype("cpu")[0] == "float32"
