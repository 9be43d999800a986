"""`batch.rows_per_device=auto` with ever less memory: what is chosen, said and kept, and that it changes no result."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.command_line import Exit
from configs.schema import EvalConfig, MeshConfig, UserError, options, with_options
from hosts.machines import GIB
from run import fitting as module
from run.fitting import CHOSEN, COMPILATIONS, Fitting
from run.programs import TrainSteps
from run.record import Events, read_metrics
from run.times import Times
from tests.helpers import tiny_config
from tests.hosts.processes import finish, start
from tests.test_train import ROOT, figures, run, write_folder
from training.build import build
from training.candidate import candidate_of
from training.memory import device_bytes

OPTIONS = (  # of test_train.py's config: four short steps, with rows that are chosen
    *("--config=tiny.py", "--steps=4", "--model.depth=3", "--batch.sequence_length=64", "--batch.tokens_per_step=1024"),
    *("--batch.rows_per_device=auto", "--checkpoint.every_steps=2", "--eval.every_steps=100", "--eval.tokens=500"),
    "--log.every_steps=1",
)
LONGER = ("--steps=6", "--model.depth=1")
LEVELS = [(1, "none", 1), (8, "none", 1), (8, "products", 1), (8, "block", 1), *((8, "block", n) for n in (2, 4, 8))]
NEEDS = re.compile(
    r"--batch.rows_per_device=(\d+) --model.loss_chunks=(\d+) --model.remat=(\w+) --mesh.fsdp=(\d+): "
    r"a device needs ([\d.e-]+) of ([\d.e-]+) GiB; it (fits|does not fit)"
)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Return a config with `auto`; the choices have a cache of their own."""
    monkeypatch.setattr(module, "known", lambda: tmp_path / "known")
    config = tiny_config(rows=64, rows_per_device="auto", length=64, depth=3)  # pyright: ignore
    return replace(config, run_dir=str(tmp_path / "run"), eval=EvalConfig(tokens=500, prompts=()))


class Device:
    """A device of another kind."""

    device_kind = "other"

    def __init__(self, device):
        self.device = device

    def __getattr__(self, name):
        return getattr(self.device, name)


def chosen(config) -> dict:
    return {name: options(config)[name] for name in CHOSEN}


def choices(asked, patch, devices: int) -> list[tuple]:
    """Return what the closed form chooses, from ample memory to none: rows, chunks, recomputation, fsdp."""
    patch.setattr(jax, "devices", lambda *_: jax.local_devices()[:devices])
    fitting, taken = Fitting(asked, 1.0), []
    for fitting.limit in (1.0 * GIB, *np.geomspace(2, 0.4, 60) * 2**20):  # type: ignore
        taken.append(tuple(chosen(fitting.first()).values()))
    return taken


@pytest.mark.parametrize("devices", [1, 8])
def test_rows_then_chunks_then_recomputation_then_fsdp(asked, monkeypatch, devices):
    taken = choices(asked, monkeypatch, devices)
    assert taken[0] == (64 // devices, *LEVELS[0]) and taken[-1] == (1, *LEVELS[-1 if devices == 8 else 3])
    places = [LEVELS.index(choice[1:]) for choice in taken]
    assert places == sorted(places) and len({*places}) >= 4
    assert all(rows >= after for (rows, *level), (after, *next) in pairwise(taken) if level == next)
    if devices == 8:  # a mesh that is asked for stays
        fixed = choices(replace(asked, mesh=MeshConfig(data=8)), monkeypatch, 8)
        assert fixed[-1] == (1, *LEVELS[3])


class Compiled:
    """A program that asks for some bytes."""

    output_size_in_bytes = alias_size_in_bytes = temp_size_in_bytes = 0

    def __init__(self, size: float):
        self.argument_size_in_bytes = int(size)

    def memory_analysis(self):
        return self


def compiling(patch, truth) -> list:
    """Let programs need `truth(closed form)` bytes, or be refused if that is None. Return what is compiled, in time."""
    compiled = []

    def compile_train_steps(built, times):
        compiled.append(built.config)
        if (size := truth(device_bytes(candidate_of(built.config, jax.devices())))) is None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 20.3G of 15.7G hbm.")
        return TrainSteps(Compiled(size), Compiled(size))  # pyright: ignore

    some, built = jax.local_devices()[:1], build(tiny_config(), jax.local_devices()[:1])
    patch.setattr(jax, "devices", lambda *_: some)
    patch.setattr(module, "build", lambda config: built._replace(config=config))  # a build takes a second
    patch.setattr(module, "compile_train_steps", compile_train_steps)
    return compiled


def fit(asked, gib: float):
    """Return the config that train.py would run with."""
    Path(asked.run_dir).mkdir(exist_ok=True)
    fitting = Fitting(asked, gib)
    built, _ = fitting.compile(module.build(fitting.first()), 0, Times())
    return built.config


@pytest.mark.parametrize("factor", [0.25, 1.3, 4.0])
def test_three_compilations_are_enough_however_wrong_the_closed_form_is(asked, monkeypatch, factor):
    for gib in (0.02, 0.006, 0.002):
        compiled = compiling(monkeypatch, lambda size: factor * size)
        try:
            config = fit(replace(asked, run_dir=f"{asked.run_dir}-{gib}"), gib)
            needs = factor * device_bytes(candidate_of(config, jax.devices()))
            assert needs <= 0.9 * gib * GIB and config in compiled
        except UserError as error:
            last = compiled[-1]
            assert last.batch.rows == 1 and last.model.remat == "block" and len(compiled) <= COMPILATIONS
            ((depth, more),) = re.findall(r"would fit: (?:--model.depth=(\d+) or )?([\d.]+) GiB of", str(error))
            fit(replace(asked, run_dir=f"{asked.run_dir}-{gib}-more"), float(more))
            if depth:
                shallow = with_options(asked, {"model.depth": int(depth)})
                fit(replace(shallow, run_dir=f"{asked.run_dir}-{gib}-shallow"), gib)
            continue
        assert 1 <= len(compiled) <= COMPILATIONS
    compiled = compiling(monkeypatch, lambda size: None if size > 0.003 * GIB else size)
    config = fit(replace(asked, run_dir=f"{asked.run_dir}-refused"), 0.005)
    assert config in compiled and 1 < len(compiled) <= COMPILATIONS


def test_a_choice_is_kept_with_the_run_and_for_others_on_such_devices(asked, monkeypatch, tmp_path):
    compiled = compiling(monkeypatch, lambda size: 1.9 * size)
    first = fit(asked, 0.006)
    assert len(compiled) == 2
    others = replace(asked, run_dir=str(tmp_path / "other"))
    for config in (asked, others):  # the run's own choice, and the cache's
        compiled.clear()
        assert chosen(fit(config, 0.006)) == chosen(first) and len(compiled) == 1
    for path in module.known().iterdir():
        path.write_text("damaged")
    assert not Fitting(replace(asked, run_dir=str(tmp_path / "third")), 0.006).kept
    assert Fitting(asked, 0.006).kept == chosen(first)
    assert not Fitting(asked, 0.005).kept and not Fitting(with_options(asked, {"model.depth": 2}), 0.006).kept
    monkeypatch.setattr(jax, "devices", lambda *_: [Device(device) for device in jax.local_devices()[:1]])
    assert not Fitting(asked, 0.006).kept


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a config and text, and a cache of its own for what is chosen."""
    monkeypatch.setattr(module, "known", lambda: tmp_path / "known")
    monkeypatch.chdir(write_folder(tmp_path))
    return tmp_path


def train(patch, capfd, run_dir: str, *more: str) -> tuple[int, list[tuple], str]:
    """Return the exit code of train.py, what it says of each program that it compiles, and all that it says."""
    code = run("train", patch, *OPTIONS, f"--run_dir={run_dir}", *more, devices=1)
    out, err = capfd.readouterr()
    return code, NEEDS.findall(out), out + err


def losses(run_dir: str) -> list[float]:
    return [line["loss"] for line in read_metrics(run_dir) if "loss" in line]


def fitted(run_dir: str) -> list[dict]:
    return [event["options"] for event in Events(run_dir).read() if event["event"] == "fitted"]


@pytest.mark.medium
def test_with_ever_less_memory_it_takes_less_then_names_what_would_fit_and_the_result_stays(folder, monkeypatch, capfd):
    code, programs, said = train(monkeypatch, capfd, "ample")
    assert code == Exit.COMPLETE and [program[:4] for program in programs] == [("16", "1", "none", "1")]
    needed = float(programs[0][4]) / 0.9
    code, programs, said = train(monkeypatch, capfd, "little", f"--memory={0.115 * needed}")
    taken = fitted("little")[-1]
    assert code == Exit.COMPLETE and taken["batch.rows_per_device"] == 1 and taken["model.remat"] != "none"
    assert (*map(str, taken.values()), "fits") in [(*program[:4], program[6]) for program in programs]
    assert f"--model.remat={taken['model.remat']}: one row should not fit without it; it saves" in said
    np.testing.assert_allclose(losses("little"), losses("ample"), rtol=2e-5)
    code, _, said = train(monkeypatch, capfd, "none", f"--memory={0.08 * needed}")
    assert code == Exit.MISTAKE and "not one row fits the device's memory" in said and "Traceback" not in said
    assert not (folder / "none").exists()
    (gib,) = re.findall(r"would fit: --model.depth=\d+ or ([\d.]+) GiB", said)
    assert train(monkeypatch, capfd, "more", f"--memory={gib}")[0] == Exit.COMPLETE


@pytest.mark.medium
def test_out_of_memory_in_a_step_halves_the_rows_once(folder, monkeypatch, capfd):
    assert train(monkeypatch, capfd, "whole", *LONGER)[0] == Exit.COMPLETE
    after, failing = TrainSteps.after, []

    def failing_after(programs, step, every):
        if step != 3 or not failing:
            return after(programs, step, every)
        left = failing.pop()

        def fail(state, batch):
            for leaf in jax.tree.leaves(state) if not left else ():
                leaf.delete()
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

        return fail

    monkeypatch.setattr(TrainSteps, "after", failing_after)
    for left in (True, False):  # whether the failed step left the state
        failing.append(left)
        code, _, said = train(monkeypatch, capfd, f"halved-{left}", *LONGER)
        assert code == Exit.COMPLETE and "out of memory after step 3: --batch.rows_per_device=8 from here on" in said
        assert ("continuing after step 2 of 6" in said) == (not left)
        events = Events(f"halved-{left}").read()
        assert [(e["step"], e["rows_per_device"]) for e in events if e["event"] == "out_of_memory"] == [(3, 8)]
        assert fitted(f"halved-{left}")[-1]["batch.rows_per_device"] == 8
        np.testing.assert_allclose(losses(f"halved-{left}"), losses("whole"), rtol=2e-5)
        assert figures(folder / f"halved-{left}")["steps"] == 6
    failing += [True, True]
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        train(monkeypatch, capfd, "twice", *LONGER)
    assert not failing


@pytest.mark.slow
def test_two_processes_choose_what_fits_the_smaller_device(folder):
    command = [ROOT / "train.py", *OPTIONS, "--run_dir=two"]
    commands = [[*command, f"--memory={gib}"] for gib in (1, 0.006)]
    assert "it fits" in finish(start(*commands, folders=[folder]), 0)[0]
    (choice,) = fitted("two")
    assert choice["batch.rows_per_device"] < 8 and len(losses("two")) == 4
