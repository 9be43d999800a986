"""Check that the way a step is divided does not change its result: python -m bench.exactness

Every config in configs/ runs with its own features, optimizer, schedule and start. Sizes, text and tokenizer are those
of configs/small.py. One micro-batch on one device is compared with 2, 4 and 8 micro-batches, and with two processes of
four devices. It is also compared with every arrangement of eight CPU devices that the four heads allow. Rows of text
have half to all of their tokens valid. chat.py runs on conversations, as if it fine-tuned small.py's run, and the valid
tokens of its rows differ a hundredfold. reinforce.py has the same rows, with advantages as weights. A table shows the
largest relative differences of the loss and of the gradient's norm over the first one, two and eight steps. The exit
code is 1 if one passes its bound, which only float32 has: in bfloat16 (`--dtype=bfloat16`) a difference in the last bit
of a float32 parameter can round the parameter to another bfloat16.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from configs.chat import following
from data.dataset import Text, open_text
from data.loader import StepBatches
from hosts.runtime import run_command, start_jax
from options.command_line import parse_arguments
from options.files import load_config
from options.schema import Config, DataConfig, MeshConfig, with_options
from options.validation import resolved
from reinforcement.rollouts import whole_to_devices
from system.errors import UserError
from system.files import cache_dir
from tools.programs.compiled import compile_step
from training.build import Build, build
from training.state import TrainState, stored_as
from training.step import Batch

STEPS = 8
BOUNDS = {"loss": 1e-5, "grad_norm": 1e-4}
"""Bounds on the relative differences over these steps, in float32."""
SHOWN = (1, 2, STEPS)
"""A table's columns: the largest differences over this many of the first steps."""
SIZES = ("depth", "width", "heads", "kv_heads", "head_dim", "vocab_size", "loss_chunks")


class Split(NamedTuple):
    """A way to divide a step."""

    mesh: tuple[int, int, int]
    """Devices along data, fsdp and tensor."""
    rows: int
    """Rows of a micro-batch on one device, of the step's 16."""
    processes: int = 1


UNDIVIDED = Split((1, 1, 1), 16)
MESHES = [(d, f, 8 // d // f) for d in (8, 4, 2, 1) for f in (1, 2, 4, 8) if d * f <= 8 and 8 // d // f <= 4]
SPLITS = {
    **{f"K={k}": Split((1, 1, 1), 16 // k) for k in (2, 4, 8)},
    **{f"{d}x{f}x{t}": Split((d, f, t), 8 // (d * f)) for d, f, t in MESHES},
    "processes": Split((8, 1, 1), 1, processes=2),
}


@dataclass(frozen=True)
class Arguments:
    """The configs to run, and the ways to divide their steps."""

    configs: tuple[str, ...] = ()
    """Names of files in configs/. Empty: all."""
    splits: tuple[str, ...] = tuple(SPLITS)
    """Micro-batches on one device (K), data x fsdp x tensor of eight, or `processes`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation."""


def shipped() -> list[str]:
    """Return the names of the files in configs/ that are configs."""
    return sorted(path.stem for path in Path("configs").glob("*.py") if "\ndef get_config(" in path.read_text())


def sized(name: str, dtype: str) -> Config:
    """Return a shipped config's network, optimizer and schedule at the sizes of small.py, its steps included, computed
    in `dtype`."""
    small, config = (load_config(f"configs/{file}.py")[0] for file in ("small", name))
    values: dict[str, object] = {f"model.{size}": getattr(small.model, size) for size in SIZES}
    values["model.dtype"] = dtype
    data = small.data
    if name in ("chat", "reinforce"):
        config = following(config, small, set())
        data = config.data
    run = replace(small, name=name, seed=config.seed, data=data, model=config.model, optimizer=config.optimizer)
    return resolved(with_options(run, values))


def build_for(config: Config, split: Split) -> Build:
    """Return the build of the same run with its steps divided as `split` says."""
    config = replace(config, mesh=MeshConfig(*split.mesh), batch=replace(config.batch, rows_per_device=split.rows))
    return build(config, jax.devices()[: int(np.prod(split.mesh))])


@cache
def text_of(data: DataConfig, vocab_size: int, length: int, rows: int) -> Text:
    """Return a run's text, as train.py opens it: prepared at its first use."""
    return open_text(data, vocab_size, length, rows, cache_dir())


def batch_of(built: Build, step: int) -> Batch:
    """Return a step's batch. Rows have different numbers of valid tokens, which exposes a mean of means."""
    config, shape, length = built.config, built.batch_shape, built.batch_shape[2]
    rows = config.batch.tokens_per_step // length
    text = text_of(config.data, config.model.vocab_size, length, rows)
    undivided, every = (1, rows, length), np.arange(rows)
    batch = StepBatches(text.train, text.mixture, config.seed, undivided, every, text.document_bos)[step]
    generator = np.random.default_rng(step)
    valid = generator.integers(length // 2, length + 1, rows)
    if config.data.packing == "whole":
        valid = generator.permutation(np.geomspace(length / 100, length, rows))
    batch["weights"] *= np.arange(length) < valid[:, None]
    if config.name == "reinforce":
        batch["weights"] *= generator.choice(np.array([-0.25, 0.75], np.float32), (rows, 1))
    return whole_to_devices(batch, shape, built.batch_sharding)


@cache
def start(config: Config) -> TrainState:
    """Return the state before the first step, on the host: it is the same however the run is divided."""
    one = replace(config, mesh=MeshConfig(1, 1, 1))
    return jax.device_get(build(one, jax.local_devices()[:1]).create_state())


@cache
def course(config: Config, split: Split) -> Mapping[str, Float[np.ndarray, "steps"]]:
    """Return the loss and the gradient's norm at each step of a run whose steps are divided as `split` says."""
    if split.processes > jax.process_count():
        return _in_processes(config, split)
    built = build_for(config, split)
    train_step = compile_step(built)
    if split.processes > 1:  # whose first sum fails if one compiles half a minute longer than the others
        print("compiled", flush=True)
        sys.stdin.read()
    state, values = stored_as(start(config), built.abstract_state), []
    for step in range(STEPS):
        state, metrics = train_step(state, batch_of(built, step))
        values.append(jax.device_get([metrics[name] for name in BOUNDS]))
    return dict(zip(BOUNDS, np.array(values, np.float64).T))


def _in_processes(config: Config, split: Split) -> Mapping[str, Float[np.ndarray, "steps"]]:
    """Return the course of a run on several processes that share the devices, as the first of them prints it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    devices = int(np.prod(split.mesh)) // split.processes
    members: list[Any] = []
    for index in range(split.processes):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(split.processes),
            "JAX_PROCESS_ID": str(index),
        }
        # The text of a dataclass is the expression that makes it.
        imports = "from bench.exactness import *; from options.schema import *"
        call = f"{imports}; run_command(lambda: member({config}, {split}))"
        pipe = subprocess.PIPE
        members.append(subprocess.Popen([sys.executable, "-c", call], env=environment, stdin=pipe, stdout=pipe))
    for member in members:
        while member.stdout.readline() not in (b"compiled\n", b""):
            pass
    for member in members:
        member.stdin.close()
        member.stdin = None
    outputs = [member.communicate()[0] for member in members]
    if any(member.returncode for member in members):
        raise RuntimeError(f"a process of {split} ended with {[member.returncode for member in members]}")
    return {name: np.array(values) for name, values in json.loads(outputs[0].splitlines()[-1]).items()}


def member(config: Config, split: Split) -> int:
    """Run with the other processes, and print the course. Return the exit code."""
    start_jax()
    print(json.dumps({name: list(values) for name, values in course(config, split).items()}))
    return 0


def differences(config: Config, split: Split) -> dict[str, Float[np.ndarray, "steps"]]:
    """Return the relative differences at each step between the run divided by `split` and the undivided run."""
    undivided, run = course(config, UNDIVIDED), course(config, split)
    return {name: np.abs(run[name] / undivided[name] - 1) for name in BOUNDS}


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    for option, known in (("configs", shipped()), ("splits", list(SPLITS))):
        if unknown := set(getattr(arguments, option)) - set(known):
            raise UserError(f"--{option}: {sorted(unknown)} are not among {known}")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    start_jax()
    failed = False
    columns = [f"{name}, {steps} step{'s' * (steps > 1)}" for steps in SHOWN for name in BOUNDS]
    print(f"| config | split | {' | '.join(columns)} | |\n{'| --- ' * (len(columns) + 3)}|", flush=True)
    for name in arguments.configs or shipped():
        for split in arguments.splits:
            by_step = differences(sized(name, arguments.dtype), SPLITS[split])
            within = all(by_step[metric].max() <= bound for metric, bound in BOUNDS.items())
            passes_bound = arguments.dtype == "float32" and not within
            cells = [f"{by_step[metric][:steps].max():.1e}" for steps in SHOWN for metric in BOUNDS]
            print(f"| {name} | {split} | {' | '.join(cells)} | {'FAIL' if passes_bound else ''} |", flush=True)
            failed |= passes_bound
    return int(failed)


if __name__ == "__main__":
    run_command(main)
