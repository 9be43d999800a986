"""Run tools.plan as a user does, and compare what it extrapolates with whole programs."""

import re
import sys
from importlib.util import find_spec
from unittest.mock import Mock

import jax
import pytest

from configs import plain
from hosts.topology import machines
from options.command_line import parse
from options.schema import with_options
from run.folder import RunFolder
from run.text import open_text_of_run
from system.errors import Exit
from system.exits import exit_code_of
from tests.commands import write_folder
from tests.helpers import tiny_config
from tools import plan
from tools.programs.compiled import compile_step
from tools.programs.topologies import devices_of
from training.build import Build, build, device_bytes, program_bytes, stored_bytes

V5E = "--topology=v5e:4x4"
NARROW = {"model.depth": 6, "model.width": 128, "model.heads": 1, "model.kv_heads": 1, "model.vocab_size": 1024}
NARROW |= {"batch.sequence_length": 256, "batch.tokens_per_step": 65_536, "eval.tokens": 8192}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--topology=v9:4x4"], "hosts/machines.toml does not describe v9; it has v4, v5e"),
        (["--topology=v5e:4x4x4"], "v5e takes 2 number(s), as "),
        (["--topology=v5p:16x24x32"], "a pod of v5p has 8,960 chips"),
        ([], "--topology is missing"),
        (["--config=none.py", V5E], "--config=none.py"),
        (["--topology=h100:8", "--epochs=1", "--data.source=nowhere"], "nowhere"),
        ([V5E], "no libtpu"),
        (["--config=configs/nanochat.py", V5E], "no libtpu"),  # before it prints rates
        (["--topology=v5e-8"], "; did you mean v5e:2x4?"),
    ],
)
def test_a_mistake_is_one_message_and_code_2(monkeypatch, capsys, words, text):
    missing = RuntimeError("Unable to initialize backend: no libtpu")
    described = Mock(side_effect=missing if text == "no libtpu" else None)
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", described)
    given = [] if any(word.startswith("--config") for word in words) else ["--config=configs/plain.py"]
    monkeypatch.setattr(sys, "argv", ["plan", *given, *words])
    code = exit_code_of(plan.main, "")
    out, problem = capsys.readouterr()
    assert code == Exit.MISTAKE and text in problem and problem.count("\n") == 1 and not out


def test_epochs_have_the_steps_of_train_py(tmp_path, monkeypatch):
    monkeypatch.chdir(write_folder(tmp_path))
    config, _ = parse("", argv=["--config=tiny.py", "--epochs=1.5"])
    steps = plan.with_steps(config).steps
    assert steps == open_text_of_run(config, RunFolder(config.run_dir))[0].config.steps > 0 == config.steps


def test_stored_bytes_are_those_of_the_state_and_the_batch():
    """Compare with the arrays that a device has, on a mesh of 2 x 2 x 2."""
    built = build(with_options(tiny_config(), {"mesh.fsdp": 2, "mesh.tensor": 2}))
    stored, state = stored_bytes(built), built.create_state()
    size = lambda tree: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
    assert (stored["parameters"], stored["moments"]) == (size(state.params), size(state.opt_state))
    gathered = jax.jit(built.network.gathered)(state.params)
    assert size(gathered) == device_bytes(built.network.abstract_gathered()) <= stored["gradients"]
    assert stored["gradients"] == sum(
        leaf.size * 4 // 4 for leaf in jax.tree.leaves(state.params) if leaf.ndim == 2
    )  # fsdp and tensor divide every matrix of this network


@pytest.mark.medium
def test_a_small_plan_here_prints_its_products_and_options(monkeypatch, capsys):
    """Take this machine's CPU devices for a node of eight GPUs."""
    monkeypatch.setattr(plan, "devices_of", lambda _: jax.devices())
    programs = {}

    def compile_once(built: Build) -> jax.stages.Compiled:  # programs that recompute take as much here
        key = built.batch_shape, *built.mesh.devices.shape
        return programs[key] if key in programs else programs.setdefault(key, compile_step(built))

    monkeypatch.setattr("tools.programs.compiled.compile_step", compile_once)
    words = "--config=configs/plain.py --topology=h100:8 --price=2 --mfu=0.5 --steps=1000 --eval.tokens=8192"
    small = "--model.depth=1 --model.vocab_size=2048 --batch.sequence_length=64 --batch.tokens_per_step=8192"
    tables = []
    for rows in ("8", "auto"):
        given = f"--batch.rows_per_device={rows}"
        monkeypatch.setattr(sys, "argv", ["plan", *words.split(), *small.split(), given])
        assert exit_code_of(plan.main, "") == Exit.COMPLETE
        out = capsys.readouterr().out
        tables.append(out.splitlines()[:4])
    assert tables[0] == tables[1]  # rows that are given take what a line says of them
    assert "8 x 1 x 1" in out and "2 x 4 x 1: --mesh.fsdp=4 --batch.rows_per_device=8" in out
    assert "FLOP/s x 50% MFU) = " in out and "device-hours x $2 = $" in out
    assert re.search(r"1,000 steps x .* s = \d\.\d\d hours", out)
    monkeypatch.setattr(plan, "HEADROOM", 1e-6)
    assert exit_code_of(plan.main, "") == Exit.FAILED
    out, problem = capsys.readouterr()
    assert "nothing fits" in problem and out.count("; does not fit") == 4


@pytest.mark.slow
@pytest.mark.timeout(3000)  # a TPU's compiler takes a minute of a processor
@pytest.mark.parametrize(
    ("topology", "compiler", "rows"), [("h100:1", "jax_cuda13_plugin", "auto"), ("v5e:2x2", "libtpu", 16)]
)
def test_memory_that_small_programs_predict_is_that_of_the_whole_one_within_a_twentieth(topology, compiler, rows):
    """Compare the plan of plain depth 12 on a GPU, and of a narrow network of depth 6 on a TPU, with the whole program
    of the same rows. With given rows, a TPU's, fewer small programs are compiled."""
    if not find_spec(compiler):
        pytest.skip(f"needs {compiler}")
    devices = devices_of(topology)
    config = with_options(plain.of_depth(12), {"batch.rows_per_device": rows})
    if compiler == "libtpu":
        config = with_options(config, NARROW)
    planned = plan.plan_mesh(config, devices, plan.memory_limit(machines()[topology.split(":")[0]]))
    built = build(planned.config, devices)
    needs = program_bytes(compile_step(built)) + stored_bytes(built)["held-out rows"]
    print(f"{topology}: {planned.config.batch.rows} rows, {sum(planned.parts.values()) / needs - 1:+.1%}")
    assert planned.fits and sum(planned.parts.values()) == pytest.approx(needs, rel=0.05)
