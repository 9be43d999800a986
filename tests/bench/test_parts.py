"""Test where a step's time goes: the parts of a program's operations, and the command."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from bench import parts
from bench.parts import PARTS, UNKNOWN, Operation, operations, part_of
from bench.throughput import random_batch
from options.command_line import parse
from system.errors import UserError
from tests.commands import CONFIG, write_folder
from training.build import build

MUON = ["--config=tiny.py", "--optimizer.matrices.kind=muon", "--model.value_embeddings"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Go to a folder with a config."""
    monkeypatch.chdir(write_folder(tmp_path, CONFIG))


def test_the_innermost_function_that_is_listed_decides():
    stack = ["model/layers.py:Linear.__call__", "model/gpt.py:MLP.__call__", "model/gpt.py:Block.__call__"]
    assert part_of(stack) == "MLP"
    assert part_of(stack[2:]) == "embeddings, norms, residual stream"
    assert part_of(stack[:1]) == part_of([]) == UNKNOWN


def test_each_matrix_product_of_a_step_belongs_to_a_part():
    """And no part is empty, so the names of files and functions are today's."""
    built = build(parse("", argv=MUON)[0], jax.devices()[:1])
    compiled = built.train_step.lower(built.create_state(), random_batch(built)).compile()
    found = set(operations(compiled.as_text()).values())
    multiply = {of.part for of in found if of.is_product}
    assert multiply == {"attention", "MLP", "head and loss", "Muon"}
    assert {of.part for of in found} >= set(PARTS)


def test_an_operation_without_a_listed_function_is_counted_apart():
    program = jax.jit(lambda x: jnp.sin(x @ x)).lower(jnp.ones((8, 8))).compile().as_text()
    found = set(operations(program).values())
    assert Operation(UNKNOWN, True) in found and {of.part for of in found} == {UNKNOWN}


@pytest.mark.medium
def test_the_command_writes_shares_of_all_parts_and_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["parts", *MUON, "--traced_steps=1", "--out=out"])
    assert parts.main() == 0
    result = json.loads((tmp_path / "out/parts.json").read_text())
    shares = {share.pop("part"): share for share in result["shares"]}
    assert sum(share["products"] + share["other"] for share in shares.values()) == pytest.approx(1)
    assert all(shares[part]["products"] > 0 for part in ("attention", "MLP", "head and loss", "Muon"))
    assert (tmp_path / "out/parts.png").read_bytes()[:4] == b"\x89PNG"
    assert "head and loss" in capsys.readouterr().out


def test_rows_that_are_not_known_yet_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["parts", "--config=tiny.py", "--batch.rows_per_device=auto"])
    with pytest.raises(UserError, match="give --batch"):
        parts.main()
