"""Run tools.plan as a user does."""

import json
import re
import shlex
import sys
from dataclasses import replace

import pytest

from configs import plain
from configs.command_line import Exit, exit_code_of, parse
from hosts.machines import HEADROOM, machines
from tools.plan import __main__ as plan
from tools.plan import output
from tools.plan.search import ERROR, Given, row_of
from tools.programs.topologies import parse_topology
from training.candidate import Candidate

V5E = "--topology=v5e:4x4"


def run(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Return the exit code and what was printed."""
    monkeypatch.setattr(sys, "argv", ["plan", "--config=configs/plain.py", "--model.depth=12", *words])
    code = exit_code_of(plan.main, "")
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--topology=v9:4x4"], "hosts/machines.toml does not describe v9; it has v4, v5e"),
        (["--topology=v5e:4x4x4"], "a slice of v5e is 1x1, 2x2, 2x4"),
        (["--topology=v5p:5x5x5"], "or rising multiples of 4"),
        (["--topology=v5p:16x24x32"], "a pod of v5p has 8,960 chips; take several slices"),
        ([], "--topology is missing"),
        ([V5E, "--mesh.fsdp=3"], "--mesh.data=-1 x fsdp=3 x tensor=1 does not fit the 16 devices of v5e:4x4"),
        ([V5E, "--batch.rows_per_device=3"], "rows_per_device that would work: [1, 2, 4, 8, 16]"),
        ([V5E, "--batch.tokens_per_step=2048", "--search"], "1 rows of 2048 tokens, which 16 devices"),
        ([V5E, "v6e:4x4", "h200:8", "--price", "1", "2"], "--price has 2 numbers for 3 topologies"),
        ([V5E, "--picture=no/folder/plan.png"], "--picture=no/folder/plan.png cannot be written"),
        ([V5E, "--picture=plan.xyz"], "--picture=plan.xyz cannot be written: Format 'xyz' is not supported"),
    ],
)
def test_a_mistake_is_one_message_and_code_2(monkeypatch, capsys, words, text):
    code, out, problem = run(monkeypatch, capsys, *words)
    assert code == Exit.MISTAKE and text in problem and problem.count("\n") == 1 and not out


def test_if_nothing_fits_it_ends_with_1_and_names_what_would(monkeypatch, capsys):
    network = lambda heads: [f"--model.width={128 * heads}", f"--model.heads={heads}", f"--model.kv_heads={heads}"]
    words = ["--model.depth=32", "--batch.rows_per_device=16", "--topology"]
    code, _, problem = run(monkeypatch, capsys, *words, "v5e:4x4", *network(64))
    assert code == Exit.FAILED and "nothing on it would" in problem and "x v5e:4x4 would" in problem
    code, _, problem = run(monkeypatch, capsys, *words, "v5p:2x2x4", *network(32))
    assert code == Exit.FAILED and "nearest that would: --" in problem


def test_the_chosen_one_is_a_command_of_train(monkeypatch, capsys, tmp_path):
    picture = tmp_path / "plan.png"
    words = ["--steps=5000", "--topology", "v5e:4x4", "2x h200:8", "--price", "1.2", "4", "--search", "--json"]
    code, out, _ = run(monkeypatch, capsys, *words, f"--picture={picture}")
    chosen = json.loads(out)
    assert code == Exit.COMPLETE and picture.stat().st_size > 10_000
    assert [each["topology"] for each in chosen["plans"]] == ["v5e:4x4", "2x h200:8"]
    cheapest = min((each["candidates"][0]["run"]["cost"], each["topology"]) for each in chosen["plans"])
    assert (chosen["chosen"]["run"]["cost"], chosen["chosen"]["topology"]) == cheapest
    python, train, *rest = shlex.split(chosen["command"])
    config, _ = parse(None, argv=rest)
    assert (python, train, config.steps) == ("python", "train.py", 5000)
    options = chosen["chosen"]["options"]
    assert (config.mesh.fsdp, config.batch.rows_per_device) == (options["mesh.fsdp"], options["batch.rows_per_device"])
    assert (config.model.remat, config.model.loss_chunks) == (options["model.remat"], options["model.loss_chunks"])


def test_a_table_states_its_assumptions_and_the_jax_it_was_compared_with(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, V5E, "v6e:4x4", "--price=1.5")
    parts = ("gathered copies", "reduce-scatter", "limited by", "device-hours", "assumed of a", output.accuracy())
    assert code == Exit.COMPLETE and all(text in out for text in parts)
    assert out.rstrip().splitlines()[-1] == "python train.py --config=configs/plain.py --model.depth=12"
    monkeypatch.setattr(output, "version", lambda package: output.COMPILED_WITH)
    assert output.COMPILED_WITH in output.accuracy() and output.ACCURACY in output.accuracy()
    monkeypatch.setattr(output, "version", lambda package: "99.0")
    assert "with JAX 99.0 is not known" in output.accuracy() and "%" not in output.accuracy()


def test_advice_of_a_batch_that_is_too_small_and_of_memory_near_the_limit(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, V5E, "--batch.tokens_per_step=16384", "--search")
    assert code == Exit.COMPLETE and "a step has 8 rows for 16 devices: use 8 devices, or a larger" in out
    row = row_of(Candidate(plain.of_depth(12), parse_topology("v5e:4x4")), Given())
    for times, expected in ((1 + ERROR / 2, True), (1 + 2 * ERROR, False)):
        memory = int(times * row.bytes / HEADROOM)
        monkeypatch.setitem(machines(), "v5e", replace(machines()["v5e"], memory=memory))
        assert row.fits and any("--compile=1" in line for line in output.advice(row)) == expected


def test_a_comparison_names_what_memory_was_read_from_and_compiles_no_card_that_cuda_cannot(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "--topology", "v100:1", "v5e:4x4", "--search")
    assert code == Exit.COMPLETE and re.search(r"v100:1 .* shapes +float32 +blocks", out)
    assert re.search(r"v5e:4x4 .* shapes +bfloat16 +splash", out)
    code, out, err = run(monkeypatch, capsys, "--topology=v100:1", "--search", "--compile=1")
    assert code == Exit.COMPLETE and "compiling" not in err
