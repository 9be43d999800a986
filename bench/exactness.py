"""Whether the way a step is divided changes its result: python -m bench.exactness

Every config in configs/ runs with its own features, optimizer and schedule, from its own start, at the sizes of
configs/small.py, on that config's text and tokenizer. One micro-batch on one device is compared with 2, 4 and 8
micro-batches, with every arrangement of eight CPU devices that the four heads allow, and with two processes of four
devices. A table shows the largest relative differences of the loss and of the gradient's norm over the first eight
steps. The exit code is 1 if one passes its bound.

With --noise, in place of that: the norm of each group's gradient, and of what rounding adds to it. With --out, a
picture of the differences, step by step, next to those with the `eps` of 1e-10 that every group once had.
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
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float
from matplotlib.figure import Figure

from configs.command_line import load_config, parse_arguments
from configs.files import cache_dir
from configs.schema import Config, DataConfig, FilePath, MeshConfig, UserError, resolved, with_options
from data.dataset import Text, open_text
from data.loader import StepBatches
from hosts.runtime import run_command, start_jax
from tools.programs.compile import compile_step
from training.build import Build, build
from training.mesh import resized
from training.optimizer import parameter_groups
from training.state import TrainState, abstract_state, stored_as
from training.step import Batch, make_train_step

METRICS, BOUND_STEPS = ("loss", "grad_norm"), 8
BOUNDS = {"float32": (1e-5, 1e-4), "bfloat16": (np.inf, np.inf)}  # none was found yet for bfloat16
SIZES = ("depth", "width", "heads", "kv_heads", "head_dim", "vocab_size", "loss_chunks")
CANCELLED = ("x0_lambdas", "resid_lambdas", "scalars")  # groups whose first gradient cancels, but for rounding


class Split(NamedTuple):
    """A way to divide a step."""

    mesh: tuple[int, int, int]
    """Devices along data, fsdp and tensor."""
    rows: int
    """Rows of a micro-batch on one device, of the step's 16."""
    processes: int = 1


WHOLE = Split((1, 1, 1), 16)
MESHES = [(d, f, 8 // d // f) for d in (8, 4, 2, 1) for f in (1, 2, 4, 8) if d * f <= 8 and 8 // d // f <= 4]
SPLITS = {
    **{f"K={k}": Split((1, 1, 1), 16 // k) for k in (2, 4, 8)},
    **{f"{d}x{f}x{t}": Split((d, f, t), 8 // (d * f)) for d, f, t in MESHES},
    "processes": Split((8, 1, 1), 1, processes=2),
}


@dataclass(frozen=True)
class Arguments:
    """Which configs, divided how."""

    configs: tuple[str, ...] = ()
    """Names of files in configs/; none: all."""
    splits: tuple[str, ...] = tuple(SPLITS)
    """Micro-batches on one device (K), data x fsdp x tensor of eight, or `processes`."""
    steps: int = BOUND_STEPS
    """Steps of each run, for the picture and for the noise."""
    eps: float | None = None
    """In place of the `eps` of x0_lambdas, resid_lambdas and scalars."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the activations. The bounds are for float32."""
    noise: bool = False
    """Print the sizes of gradients and of their noise."""
    out: FilePath = ""
    """A folder for the picture."""


def shipped() -> list[str]:
    """The names of the files in configs/ that are configs."""
    return sorted(path.stem for path in Path("configs").glob("*.py") if "\ndef get_config(" in path.read_text())


def sized(name: str, eps: float | None = None, dtype: str = "float32") -> Config:
    """A shipped config's network, optimizer and schedule at the sizes of small.py, its 300 steps included. (d12, d20
    and plain are one run then.)"""
    small, config = (load_config(f"configs/{of}.py")[0] for of in ("small", name))
    values: dict[str, object] = {f"model.{size}": getattr(small.model, size) for size in SIZES}
    values["model.dtype"] = dtype
    if eps is not None:
        values |= {f"optimizer.{group}.eps": eps for group in CANCELLED}
    run = replace(small, seed=config.seed, model=config.model, optimizer=config.optimizer)
    return resolved(with_options(run, values))


def divided(config: Config, split: Split) -> Config:
    """The same run, its steps divided so."""
    batch = replace(config.batch, rows_per_device=split.rows)
    return replace(config, mesh=MeshConfig(*split.mesh), batch=batch)


def built_for(config: Config, split: Split) -> Build:
    return build(divided(config, split), jax.devices()[: int(np.prod(split.mesh))])


@cache
def text_of(data: DataConfig, vocab_size: int, length: int, rows: int) -> Text:
    """A run's text, as train.py opens it: prepared at its first use."""
    return open_text(data, vocab_size, length, rows, cache_dir())


def batch_of(built: Build, step: int) -> Batch:
    """A step's batch; rows have different numbers of valid tokens, so that a mean of means would show."""
    config, shape, length = built.config, built.batch_shape, built.batch_shape[2]
    rows = config.batch.tokens_per_step // length
    text = text_of(config.data, config.model.vocab_size, length, rows)
    batch = StepBatches(text.train, text.mixture, config.seed, (1, rows, length), np.arange(rows))[step]
    valid = np.random.default_rng(step).integers(length // 2, length + 1, rows)
    batch["weights"] *= np.arange(length) < valid[:, None]
    place = lambda array: jax.make_array_from_callback(shape, built.batch_sharding, array.reshape(shape).__getitem__)
    return {name: place(array) for name, array in batch.items()}  # pyright: ignore[reportReturnType]


@cache
def start(config: Config) -> TrainState:
    """The state before the first step, on the host: it is the same however the run is divided."""
    return jax.device_get(build(divided(config, WHOLE), jax.local_devices()[:1]).create_state())


@cache
def course(config: Config, split: Split, steps: int) -> Mapping[str, Float[np.ndarray, "steps"]]:
    """The loss and the gradient's norm at each step of a run whose steps are divided so."""
    if split.processes > jax.process_count():
        return _in_processes(config, split, steps)
    built = built_for(config, split)
    train_step = compile_step(built)
    if split.processes > 1:  # whose first sum fails where one compiles half a minute longer than the others
        print("compiled", flush=True)
        sys.stdin.read()
    state, values = stored_as(start(config), built.abstract_state), []
    for step in range(steps):
        state, metrics = train_step(state, batch_of(built, step))
        values.append(jax.device_get([metrics[name] for name in METRICS]))
    return dict(zip(METRICS, np.array(values, np.float64).T))


def _in_processes(config: Config, split: Split, steps: int) -> Mapping[str, Float[np.ndarray, "steps"]]:
    """The same, of a run on several processes that share the devices: the course that the first of them prints."""
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
        imports = "from bench.exactness import *; from configs.schema import *"
        call = f"{imports}; run_command(lambda: member({config}, {split}, {steps}))"
        pipe = subprocess.PIPE
        members.append(subprocess.Popen([sys.executable, "-c", call], env=environment, stdin=pipe, stdout=pipe))
    for member in members:
        while member.stdout.readline() not in (b"compiled\n", b""):
            pass
    for member in members:
        member.stdin.close()
        member.stdin = None
    said = [member.communicate()[0] for member in members]
    if any(member.returncode for member in members):
        raise RuntimeError(f"a process of {split} ended with {[member.returncode for member in members]}")
    return {name: np.array(values) for name, values in json.loads(said[0].splitlines()[-1]).items()}


def member(config: Config, split: Split, steps: int) -> int:
    """One of several processes: runs with the others, and prints the course. Its exit code."""
    start_jax()
    print(json.dumps({name: list(values) for name, values in course(config, split, steps).items()}))
    return 0


def differences(config: Config, split: Split, steps: int) -> dict[str, Float[np.ndarray, "steps"]]:
    """Relative differences, at each step, between the run divided so and the run that is not divided."""
    whole, run = course(config, WHOLE, steps), course(config, split, steps)
    return {name: np.abs(run[name] / whole[name] - 1) for name in METRICS}


def table(arguments: Arguments) -> bool:
    """Prints a line a config and split. Whether all are within the bounds."""
    within = True
    print(f"| config | split | {' | '.join(METRICS)} | |\n| --- | --- | --- | --- | --- |", flush=True)
    for name in arguments.configs or shipped():
        for split in arguments.splits:
            found = differences(sized(name, arguments.eps, arguments.dtype), SPLITS[split], arguments.steps)
            largest = {of: np.max(values[:BOUND_STEPS]) for of, values in found.items()}
            good = all(largest[of] <= bound for of, bound in zip(METRICS, BOUNDS[arguments.dtype]))
            cells = " | ".join(f"{value:.1e}" for value in largest.values())
            print(f"| {name} | {split} | {cells} | {'' if good else 'FAIL'} |", flush=True)
            within &= good
    return within


def gradient_program(config: Config, split: Split) -> tuple[Build, Any]:
    """`(state, batch) -> gradients`, divided and clipped, by the step's own program, with an optimizer that moves
    nothing and keeps the gradient in its state."""
    built = built_for(config, split)
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
    keep = optax.GradientTransformationExtraArgs(zeros, lambda gradients, *_, **__: (zeros(gradients), gradients))  # pyright: ignore
    abstract = abstract_state(built.config.model, keep, built.mesh)
    train_step = make_train_step(
        built.config.model,
        built.dtype,
        built.mesh,
        abstract,
        keep,
        built.rates,
        built.config.optimizer.clip_norm,
        deterministic=built.config.deterministic,
    )

    def gradients(params: dict, step: int) -> dict:
        state = TrainState(np.int32(step), params, zeros(params), np.int32(0))  # pyright: ignore
        found = jax.device_get(train_step(stored_as(state, abstract), batch_of(built, step))[0].opt_state)
        return jax.tree.map(lambda leaf, like: resized(leaf, like.shape), found, params)

    return built, gradients


def noise(config: Config, split: Split, steps: int) -> list[dict[str, tuple[float, float]]]:
    """For each step of the run that is not divided, and each group of parameters: the norm of the gradient, and that of
    its difference from the gradient of the step divided so, from the same state."""
    built, whole = gradient_program(config, WHOLE)
    parted = gradient_program(config, split)[1]
    state, sizes = jax.device_get(built.create_state()), []
    params, opt_state = state.params, state.opt_state
    groups = jax.tree.leaves(parameter_groups(config.model))
    update = jax.jit(built.optimizer.update)

    def norms(tree: dict) -> dict[str, float]:
        leaves = list(zip(jax.tree.leaves(tree), groups))
        return {name: float(optax.tree.norm([leaf for leaf, of in leaves if of == name])) for name in built.rates}

    for step in range(steps):
        gradients = whole(params, step)
        differing = norms(jax.tree.map(np.subtract, parted(params, step), gradients))
        sizes.append({name: (size, differing[name]) for name, size in norms(gradients).items()})
        updates, opt_state = update(gradients, opt_state, params, step=step)
        params = jax.tree.map(np.add, params, jax.device_get(updates))
    return sizes


def noise_table(arguments: Arguments) -> None:
    """Prints a line a config, split and group: gradient and noise at the first step, the second, the fourth, ..."""
    chosen = [step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256) if step <= arguments.steps]
    print(f"| config | split | group | {' | '.join(f'step {step}' for step in chosen)} |")
    print("| --- " * (3 + len(chosen)) + "|", flush=True)
    for name in arguments.configs or shipped():
        for split in arguments.splits:
            sizes = noise(sized(name, arguments.eps, arguments.dtype), SPLITS[split], arguments.steps)
            for group in sizes[0]:
                cells = " | ".join("{:.1e}, {:.1e}".format(*sizes[step - 1][group]) for step in chosen)
                print(f"| {name} | {split} | {group} | {cells} |", flush=True)


def picture(arguments: Arguments) -> None:
    """The largest difference over the splits, step by step: a line a config, and a dashed one with the old `eps`."""
    figure = Figure(figsize=(12, 4.5))
    for axes, of, bound in zip(figure.subplots(1, 2), METRICS, BOUNDS[arguments.dtype]):
        for i, name in enumerate(arguments.configs or shipped()):
            now, before = sized(name, None, arguments.dtype), sized(name, 1e-10, arguments.dtype)
            for config, style, label in ((now, "-", name), (before, "--", f"{name}, before")):
                if config is before and not (now.model.x0_lambdas or now.model.resid_lambdas or now.model.backout):
                    continue  # none of the groups: nothing changed
                found = [differences(config, SPLITS[split], arguments.steps)[of] for split in arguments.splits]
                steps = np.arange(1, arguments.steps + 1)
                axes.semilogy(steps, np.maximum(np.max(found, axis=0), 2**-25), style, color=f"C{i}", label=label)
        axes.hlines(bound, 1, BOUND_STEPS, color="black", linewidth=0.8, linestyle=":", label="bound")
        axes.set_xlabel("step")
        axes.set_ylabel(f"relative difference of {of}: {', '.join(arguments.splits)}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    figure.savefig(Path(arguments.out) / "exactness.png", dpi=100)


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    for option, known in (("configs", shipped()), ("splits", list(SPLITS))):
        if unknown := set(getattr(arguments, option)) - set(known):
            raise UserError(f"--{option}: {sorted(unknown)} are not among {known}")
    if arguments.steps < BOUND_STEPS:
        raise UserError(f"--steps={arguments.steps}: the bounds are for the first {BOUND_STEPS}")
    if arguments.noise and "processes" in arguments.splits:
        raise UserError("--noise is measured in one process; give other --splits, such as K=4 2x2x2")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    start_jax()
    if arguments.noise:
        noise_table(arguments)
        return 0
    within = table(arguments)
    if arguments.out:
        picture(arguments)
    return 0 if within else 1


if __name__ == "__main__":
    run_command(main)
