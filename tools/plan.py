"""Plan a run without its machine: which meshes and rows fit, what crosses the links, how long it takes.

python -m tools.plan --config=FILE --topology=v5e:4x4

Parameters, moments and gradients are counted from shapes. What a program adds (activations, temporaries) and what it
sends come from small programs, compiled for the described devices: two depths and two numbers of rows, extrapolated
linearly. They take minutes. Step time is FLOPs over the devices' peak times `--mfu`. Exit code 1 if nothing fits.
docs/planning.md has measured cases.
"""

import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

from options.command_line import parse, parse_own, refuse_mistakes
from options.schema import Config, NotNegative, Share, with_options
from options.validation import validate
from system.errors import Exit, UserError
from system.exits import exit_code_of
from system.files import cache_dir


@dataclass(frozen=True)
class Arguments:
    """Options of this command, not of the run."""

    topology: str = ""
    """The machine: a TPU slice (`v5e:4x4`), GPUs of a node (`h200:8`), or several (`2x v5e:4x4`, `64x h200:8`)."""
    price: NotNegative[float] = 0.0
    """US dollars a device and hour."""
    mfu: Share = 0.4
    """Share of the devices' peak FLOP/s that the step is taken to reach."""


if __name__ == "__main__":
    refuse_mistakes(parse_own, __doc__, Arguments)  # before the imports, which take seconds

from data.dataset import open_text
from hosts.machines import GIB, HEADROOM
from hosts.topology import Machine, Topology, machines, name_of
from model.gpt import flops_per_token
from tools.programs.topologies import devices_of, parse_topology

DEPTHS = {True: (8, 10), False: (2, 4)}
"""Blocks of the programs that are compiled for GPUs, and for TPUs. Below 8 blocks, a GPU's products of weight gradients
wait for the end of the backward pass, which takes other memory."""
ROWS = (4, 8)
"""Rows of a device of these programs, unless there is no choice."""
MICRO_BATCHES = 2
"""Micro-batches of these programs. With one, the compiler leaves no loop, and a TPU's program takes more memory. So a
plan has at least two, unless the config asks for one or a device has one row a step."""
FSDP = (1, 4, 16)
"""Sizes of `fsdp` that are tried, besides the config's: up to half of a slice or node."""
XLA_GPU_SHARE = 0.76
"""Share of a GPU's memory from which on XLA recomputes activations: 95% of 80%, as GetSchedulerMemoryLimit of
gpu_hlo_schedule.cc has it for arguments that are small."""
MFU_SOURCE = "measured on one H100 at depth 12: 49% plain, 38% with all options; nothing else was measured"


class Plan(NamedTuple):
    """A mesh, and what it needs."""

    config: Config
    """With the most rows that fit, or one."""
    mesh: tuple[int, ...]
    """Sizes of data, fsdp and tensor."""
    micro_batches: int
    parts: dict[str, float]
    """Bytes of a device, by part."""
    crossed: dict[str, float]
    """A device's payload in bytes a step, by the axes of the mesh that it crosses."""
    samples: float
    """Bytes of a device for the gathered parameters, while an evaluation draws samples and no gradients are there."""
    fits: bool


def meshes(config: Config, topology: Topology) -> list[Config]:
    """Return the config on each sensible mesh, the config's own first. Raise UserError if its own does not divide."""
    found = [config]
    for fsdp in FSDP if config.mesh.data == -1 else ():
        other = with_options(config, {"mesh.fsdp": fsdp})
        inner = fsdp * config.mesh.tensor
        if other not in found and (fsdp == 1 or topology.inside % (2 * inner) == 0):
            try:
                validate(other)
            except UserError:  # it does not divide the network
                continue
            found.append(other)
    return found


def memory_limit(machine: Machine) -> float:
    """Return the bytes of a device that a program may ask for. On a GPU it stays below XLA's own limit: beyond it XLA
    recomputes activations, and memory no longer grows with the rows."""
    limit = HEADROOM * machine.for_programs
    return min(limit, XLA_GPU_SHARE * machine.memory) if machine.gpu else limit


def plan_mesh(config: Config, devices: Any, limit: float) -> Plan:
    """Return the plan of one mesh: the most rows of at least two micro-batches that fit `limit` bytes, or the least if
    none does."""
    from tools.programs.compiled import collectives, compile_step
    from training.build import build, device_bytes, interpolate, program_bytes, row_counts, stored_bytes
    from training.mesh import sizes_of

    length, depth = config.batch.sequence_length, config.model.depth
    whole = build(with_options(config, {"batch.rows_per_device": first_rows(config)}), devices)
    stored, sizes = stored_bytes(whole), sizes_of(whole.mesh)
    replicas = sizes["data"] * sizes["fsdp"]
    counts = row_counts(whole) if config.batch.rows_per_device == "auto" else [config.batch.rows]
    counts = counts[1:] or counts  # the most rows make one micro-batch, which the programs below do not describe
    added: dict[int, dict[int, float]] = defaultdict(dict)
    once: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    looped: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    names = ["data", "fsdp", "tensor"]
    for of_depth in sorted({min(depth, n) for n in DEPTHS[devices[0].platform == "gpu"]}):
        for rows in ROWS if len(counts) > 1 else counts:
            small = {
                "model.depth": of_depth,
                "batch.rows_per_device": rows,
                "batch.tokens_per_step": MICRO_BATCHES * rows * replicas * length,
            }
            built = build(with_options(config, small), devices)
            print(f"compiling {of_depth} block(s), {rows} rows a device, mesh {sizes}", file=sys.stderr, flush=True)
            program = compile_step(built)
            parts = stored_bytes(built)
            added[of_depth][rows] = program_bytes(program) - sum(parts.values()) + parts["held-out rows"]
            for axis in names:
                once[axis][of_depth][rows] = looped[axis][of_depth][rows] = 0.0
            for crossing in collectives(program.as_text(), sizes):
                of = looped if crossing.in_loop else once
                share = crossing.times * crossing.bytes_each / len(crossing.axes)
                for axis in crossing.axes:
                    of[axis][of_depth][rows] += share / (MICRO_BATCHES if crossing.in_loop else 1)

    def extrapolated(values: dict[int, dict[int, float]], rows: int) -> float:
        return interpolate({of_depth: interpolate(of_rows, rows) for of_depth, of_rows in values.items()}, depth)

    def needs(rows: int) -> float:
        return sum(stored.values()) + extrapolated(added, rows)

    rows = next((n for n in counts if needs(n) <= limit), counts[-1])
    micro_batches = config.batch.tokens_per_step // (rows * replicas * length)
    crossed = {
        axis: extrapolated(once[axis], rows) + micro_batches * extrapolated(looped[axis], rows)
        for axis in names
        if sizes[axis] > 1
    }
    parts = {**stored, "activations": extrapolated(added, rows)}
    chosen = with_options(config, {"batch.rows_per_device": rows})
    samples = device_bytes(whole.network.abstract_gathered())
    return Plan(chosen, tuple(sizes.values()), micro_batches, parts, crossed, samples, needs(rows) <= limit)


def first_rows(config: Config) -> int:
    """Return the rows of a device that the config gives, or one if it leaves them to train.py."""
    return 1 if config.batch.rows_per_device == "auto" else config.batch.rows_per_device


def with_steps(config: Config) -> Config:
    """Return the config with the steps of its epochs, if it gives those. They are counted in its text, which is
    prepared as by train.py."""
    if config.steps:
        return config
    length = config.batch.sequence_length
    rows = config.batch.tokens_per_step // length
    text = open_text(config.data, config.model.vocab_size, length, rows, cache_dir())
    return with_options(config, {"steps": text.steps(config.epochs, rows)})


def table(plans: list[Plan]) -> str:
    """Return a table of meshes: rows, micro-batches, GiB by part, those of samples, and MB a step over each axis."""
    names = list(plans[0].parts)
    head = f"{'data x fsdp x tensor':22}{'rows':>5}{'K':>5}" + "".join(f"{name:>15}" for name in names)
    lines = [f"{head}{'all, GiB':>10}{'samples':>9}  MB a step over"]
    for plan in plans:
        mesh = " x ".join(map(str, plan.mesh))
        parts = "".join(f"{size / GIB:15.3f}" for size in plan.parts.values())
        crossed = ", ".join(f"{axis} {size / 1e6:,.0f}" for axis, size in plan.crossed.items())
        verdict = "" if plan.fits else "; does not fit"
        rows = plan.config.batch.rows_per_device
        whole = sum(plan.parts.values()) / GIB
        memory = f"{parts}{whole:10.2f}{plan.samples / GIB:9.3f}"
        lines.append(f"{mesh:22}{rows:5}{plan.micro_batches:5}{memory}  {crossed or 'no axis'}{verdict}")
    return "\n".join(lines)


def time_and_cost(config: Config, topology: Topology, dtype: str, arguments: Arguments) -> str:
    """Return the multiplications that give a step's seconds, the run's hours and its cost."""
    tokens, devices = config.batch.tokens_per_step, topology.devices
    flops = tokens * flops_per_token(config.model, config.batch.sequence_length)
    peak = machines()[topology.kind].peak(dtype)
    seconds = flops / (devices * peak * arguments.mfu)
    whole = config.steps * seconds
    lines = [
        f"a step: {flops:.4g} FLOPs / ({devices} devices x {peak:.4g} FLOP/s x {arguments.mfu:.0%} MFU) = "
        f"{seconds:.3g} s ({tokens / seconds:,.0f} tokens/s)",
        f"MFU: {MFU_SOURCE}",
        f"the run: {config.steps:,} steps x {seconds:.3g} s = {whole / 3600:,.2f} hours, without evaluations and saves",
    ]
    if arguments.price:
        hours = whole / 3600 * devices
        lines.append(f"cost: {hours:,.1f} device-hours x ${arguments.price:g} = ${hours * arguments.price:,.2f}")
    return "\n".join(lines)


def changes(before: Config, plan: Plan) -> str:
    """Return the options to type for a plan, besides those that were typed."""
    from options.schema import options

    old, new = options(before), options(plan.config)
    names = ("mesh.fsdp", "batch.rows_per_device", "model.loss_chunks", "model.remat")
    return " ".join(f"--{name}={new[name]}" for name in names if new[name] != old[name]) or "as given"


def plan(config: Config, topology: Topology, devices: Any, arguments: Arguments) -> int:
    """Print the plan for these devices of a topology. Raise UserError for sizes that do not divide."""
    config = with_steps(config)
    from training.build import SMALLER
    from training.dtype import compute_dtype

    limit = memory_limit(machines()[topology.kind])
    plans = [plan_mesh(candidate, devices, limit) for candidate in meshes(config, topology)]
    if not any(plan.fits for plan in plans):
        smaller = with_options(config, SMALLER)
        validate(smaller)
        plans += [plan_mesh(candidate, devices, limit) for candidate in meshes(smaller, topology)]
    print(f"{name_of(topology)}: {topology.devices} device(s); {limit / GIB:.3g} GiB of each may be taken")
    print(table(plans))
    state = plans[0].parts["parameters"] + plans[0].parts["moments"]
    print(f"a save copies {state / GIB:.3g} GiB of each device to its host, until they are written")
    for plan in plans:
        if plan.fits:
            print(f"{' x '.join(map(str, plan.mesh))}: {changes(config, plan)}")
    print(time_and_cost(config, topology, compute_dtype(config.model, devices[0].platform).name, arguments))
    if any(plan.fits for plan in plans):
        return Exit.COMPLETE
    print("nothing fits: take more devices, or a smaller network", file=sys.stderr)
    return Exit.FAILED


def main() -> int:
    arguments = parse_own(__doc__, Arguments)
    if not arguments.topology:
        raise UserError("--topology is missing: the machine to plan for, as --topology=v5e:16x16 or h200:8")
    topology, devices = parse_topology(arguments.topology), devices_of(arguments.topology)
    config, _ = parse(__doc__, Arguments)  # after the compilers are found: nanochat.py prints what it derives
    return plan(config, topology, devices, arguments)


if __name__ == "__main__":
    sys.exit(exit_code_of(main, "interrupted: nothing was planned"))
