"""Test which attention nanochat gets on a GPU, with stand-ins for the packages that have one."""

import sys
from types import SimpleNamespace

import pytest

from bench.nanochat import fastest_attention, use_attention

NEWEST, THIRD = "flash_attn.cute.interface", "flash_attn_interface"


@pytest.mark.parametrize(
    ("installed", "downloaded", "name"),
    [
        ([NEWEST, THIRD], True, "FlashAttention 4"),
        ([THIRD], True, "FlashAttention 3"),
        ([], True, "FlashAttention 3, downloaded"),
        ([], False, "cuDNN's by torch, a lower bound: it computes what windows hide"),
    ],
)
def test_nanochat_attends_with_the_fastest_that_is_installed_and_says_which(monkeypatch, installed, downloaded, name):
    kernels = pytest.importorskip("torch").backends.cuda
    calls = []
    monkeypatch.setattr(kernels, "enable_cudnn_sdp", lambda on: calls.append(("cudnn", on)))
    for kernel in ("flash", "mem_efficient", "math"):
        monkeypatch.setattr(kernels, f"enable_{kernel}_sdp", lambda on, kernel=kernel: calls.append((kernel, on)))
    for module in (NEWEST, THIRD):
        result = lambda *_, module=module, **options: (f"{module} {options['window_size']}",)
        there = SimpleNamespace(flash_attn_func=result) if module in installed else None
        monkeypatch.setitem(sys.modules, module, there)
    network = SimpleNamespace(USE_FA3=downloaded, _fa3=SimpleNamespace(flash_attn_func=lambda *_, **__: "downloaded"))
    monkeypatch.setitem(sys.modules, "nanochat.flash_attention", network)
    attention, function = fastest_attention()
    use_attention(function)
    assert attention == name and network.USE_FA3 is (downloaded or bool(installed))
    result = network._fa3.flash_attn_func(0, 0, 0, causal=True, window_size=(-1, 0))
    expected = {NEWEST: f"{NEWEST} (None, 0)", THIRD: (f"{THIRD} (-1, 0)",)}
    assert result == (expected[installed[0]] if installed else "downloaded")
    assert calls == [("cudnn", True), ("flash", False), ("mem_efficient", False), ("math", False)]
