"""tools.depth chooses the deepest network that a time or a price allows, by FLOPs."""

import sys
from types import SimpleNamespace

import pytest

from system.exits import exit_code_of
from tools import depth

H100 = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")


def chosen(monkeypatch, *words: str) -> int:
    """Return the exit code of the command, on eight H100."""
    monkeypatch.setattr("jax.devices", lambda: [H100] * 8)
    monkeypatch.setattr(sys, "argv", ["depth", "--config=configs/nanochat.py", *words])
    return exit_code_of(depth.main, "")


@pytest.mark.parametrize(
    "limit", [("--hours=1.4",), ("--dollars=33.6", "--price=3"), ("--hours=1.4", "--dollars=900", "--price=3")]
)
def test_the_deepest_network_within_the_limit_is_chosen(monkeypatch, capfd, limit):
    """docs/speedrun.md: depth 20 takes 79 minutes, and depth 22 more than 84."""
    assert chosen(monkeypatch, *limit) == 0
    of_depth, tokens, hours = capfd.readouterr().out.split()
    assert of_depth == "20" and 5.0e9 < int(tokens) < 5.4e9 and 1.3 < float(hours) < 1.4


def test_options_of_the_run_count(monkeypatch, capfd):
    assert chosen(monkeypatch, "--model.depth=12") == 0
    assert capfd.readouterr().out.split()[0::2] == ["12", "unknown"]
    for more, expected in ((), "20"), (("--ratio=8",), "22"):  # fewer tokens, so a deeper network
        assert chosen(monkeypatch, "--hours=1.6", *more) == 0
        assert capfd.readouterr().out.split()[0] == expected


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--dollars=100",), "--dollars needs --price"),
        (("--hours=1e-9",), "depth 2 alone takes more than 1e-09 hours"),
    ],
)
def test_a_limit_that_cannot_be_met_is_refused(monkeypatch, capfd, words, problem):
    assert chosen(monkeypatch, *words) == 2
    assert problem in capfd.readouterr().err


def test_a_machine_of_unknown_speed_is_refused(monkeypatch, capfd):
    monkeypatch.setitem(vars(H100), "device_kind", "cpu")
    assert chosen(monkeypatch, "--hours=4") == 2
    assert "add the device to hosts/machines.toml" in capfd.readouterr().err
