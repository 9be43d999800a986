"""Print a plan as tables or JSON, and draw it."""

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

from configs.schema import UserError
from hosts.machines import GIB, HEADROOM, Machine, name_of
from tools.plan.search import ERROR, Row
from tools.plan.step_time import PARTS, REACHES, kernel_of
from tools.plan.whole_run import WRITES
from training.candidate import Candidate
from training.memory import most_rows

SHOWN = 8  # candidates of a topology
COMPILED_WITH = "0.10.2"
"""The JAX that compiled the programs of ACCURACY."""
ACCURACY = (
    "the closed form's memory was compared with 148 compiled programs: 111 known when its rules were chosen (1.9% off "
    "at the median, -16.9% to +9.1%), 37 held out (3.1% off at the median, -7.8% to +13.6%); its seconds were compared "
    "with no run (docs/planning.md)"
)
"""A test computes these figures from bench/plan_grid.jsonl."""


def gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"


def limit(row: Row) -> str:
    """Return the memory of a device that a program may take."""
    return gib(HEADROOM * row.candidate.machine.for_programs)


def mesh(candidate: Candidate) -> str:
    return " x ".join(map(str, candidate.sizes.values()))


def candidates(rows: Sequence[Row]) -> str:
    """Return a table of a topology's best rows."""
    candidate = rows[0].candidate
    fitting = sum(row.fits for row in rows)
    lines = [
        f"\n{name_of(candidate.topology)}: {fitting} of {len(rows)} candidate(s) fit {limit(rows[0])} a device",
        f"{'data x fsdp x tensor':22}{'rows':>5}{'K':>5} {'remat':9}{'chunks':>6}{'GiB':>8}{'s a step':>18}"
        f"{'tokens/s':>12}{'MFU':>6}  limiter",
    ]
    for row in rows[:SHOWN]:
        candidate, model, time = row.candidate, row.candidate.config.model, row.time
        bracket = f"{time.fast:.3g} to {time.slow:.3g}"
        compiled = "" if row.compiled is None else "  compiled"
        lines.append(
            f"{mesh(candidate):22}{candidate.step[1]:5}{candidate.step[0]:5} {model.remat:9}{model.loss_chunks:6}"
            f"{row.bytes / GIB:8.2f}{bracket:>18}{row.run.tokens_per_second:12,.0f}{row.run.mfu:6.0%}  {time.limiter}"
            f"{compiled}{'' if row.fits else '  does not fit'}"
        )
    return "\n".join(lines)


def details(row: Row) -> str:
    """Return the full report on the chosen row."""
    candidate, run, time, machine = row.candidate, row.run, row.time, row.candidate.machine
    micro_batches, rows, _ = candidate.step
    lines = [
        f"\nchosen: {name_of(candidate.topology)}, {mesh(candidate)}, {micro_batches} micro-batch(es) of {rows} rows a "
        "device",
        "",
        "memory of a device, closed form",
    ]
    compiled = {} if row.compiled is None else {"compiled": row.compiled}
    sizes = {**row.parts, "the step": sum(row.parts.values()), **compiled, **row.evaluation}
    lines += [f"  {part:18}{size / GIB:9.3f} GiB" for part, size in sizes.items()]
    fitting = most_rows(candidate, HEADROOM * machine.for_programs / row.given.bytes)
    has = f"{machine.for_programs / GIB:.3g}, {limit(row)} may be taken"
    lines += [
        f"  {'at most':18}{row.bytes / GIB:9.3f} GiB of {has}",
        f"  the most rows_per_device that fit, all else equal: {fitting}",
        *advice(row),
        "",
        "what crosses the mesh in a step",
    ]
    for t in row.traffic:
        place = "in the scan" if t.in_scan else "once"
        lines.append(
            f"  {t.axis:8}{t.kind:16}{place:13}{t.times:6}{t.bytes / 1e6:12,.1f} MB  {t.link:8}{t.fast * 1e3:9.2f} to "
            f"{t.slow * 1e3:.2f} ms{'  overlaps' if t.overlaps else ''}"
        )
    lines += [] if row.traffic else ["  nothing"]
    parts = ", ".join(f"{name} {getattr(time, name) * 1e3:.3g}" for name in PARTS)
    cost = "" if run.cost is None else f", ${run.cost:,.0f}"
    lines += [
        "",
        f"a step: {time.fast:.3g} to {time.slow:.3g} s, limited by {time.limiter}; at best, ms: {parts}",
        "",
        f"the run: {run.tokens / 1e9:,.4g} G tokens in {duration(run.days)} at {run.tokens_per_second:,.0f} tokens/s "
        f"(the middle of the bracket), {run.device_hours:,.0f} device-hours{cost}; goodput {run.goodput:.1%}",
        f"a checkpoint: {run.checkpoint_bytes / 1e9:.3g} GB, {run.checkpoint_seconds:.3g} s at "
        f"{WRITES / 1e9:g} GB/s a host (assumed), during training",
        f"compiling the step: some {run.compile_seconds:.0f} s of processor time, to about a factor of two (read "
        "from other steps, on two AMD EPYC cores)",
    ]
    if run.dataset_tokens is not None:
        times = run.tokens / run.dataset_tokens
        lines.append(f"the dataset has {run.dataset_tokens:,} tokens; the run takes {times:.3g} times as many")
    lines += ["", *assumed(machine)]
    return "\n".join(lines)


def advice(row: Row) -> list[str]:
    """Return advice if the closed form's error could exceed the memory, and if there are too few rows."""
    batch, devices, lines = row.candidate.config.batch, row.candidate.topology.devices, []
    rows = batch.tokens_per_step // batch.sequence_length
    if row.compiled is None and row.fits and not row.safe:
        lines.append(
            f"  this is within the closed form's error ({ERROR:.1%}) of the limit: --compile=1 asks the compiler"
        )
    if rows < devices:
        lines.append(
            f"  a step has {rows:,} rows for {devices:,} devices: use {rows:,} devices, or a larger "
            "--batch.tokens_per_step"
        )
    return lines


def accuracy() -> str:
    """Return a sentence on the closed form's errors, and the JAX they are for."""
    here = version("jax")
    if here == COMPILED_WITH:
        return f"with JAX {COMPILED_WITH} {ACCURACY}"
    return (
        f"the closed form was compared with programs of JAX {COMPILED_WITH}; how wrong it is with JAX {here} is not "
        "known: --compile=N uses the memory that compiled programs ask for (docs/planning.md)"
    )


def assumed(machine: Machine) -> list[str]:
    """Return the figures that the plan assumes."""
    share = lambda both: f"{both[0]:.0%} to {both[1]:.0%}"
    return [
        f"assumed of a {machine.kind}: {machine.flops / 1e12:g} TFLOP/s, {machine.for_programs / GIB:.3g} GiB for "
        f"programs at {machine.bandwidth / 1e9:g} GB/s, links {machine.links / 1e9:g} GB/s, network "
        f"{machine.network / 1e9:g} GB/s (hosts/machines.toml: {machine.source})",
        "of these, matrix products reach {}, attention {}, memory {} (tools/plan/step_time.py); ".format(
            *map(share, REACHES[machine.gpu])
        )
        + ("from nanochat's public d20 on eight H100" if machine.gpu else "none of it was measured on a TPU"),
        accuracy(),
    ]


def duration(days: float) -> str:
    """Return days as text: in hours below two days, in minutes below an hour."""
    hours = days * 24
    return f"{days:.3g} days" if days >= 2 else f"{hours:.3g} hours" if hours >= 1 else f"{hours * 60:.3g} minutes"


def comparison(rows: Sequence[Row]) -> str:
    """Return a table of the best of each topology, the cheapest first, then the fastest."""
    lines = [
        f"\n{'topology':16}{'mesh':12}{'rows':>4} {'remat':9}{'chunks':>6}{'GiB':>7} {'read from':12}{'type':9}"
        f"{'attention':10}{'tokens/s':>12}{'days':>8}{'device-hours':>14}{'$':>12}"
    ]
    for row in sorted(rows, key=lambda row: (row.run.cost or 0, row.run.days)):
        run, cost = row.run, "" if row.run.cost is None else f"{row.run.cost:,.0f}"
        candidate, model = row.candidate, row.candidate.config.model
        source, kernel = "shapes" if row.compiled is None else "a program", kernel_of(candidate)
        lines.append(
            f"{name_of(candidate.topology):16}{mesh(candidate):12}{candidate.step[1]:4} {model.remat:9}"
            f"{model.loss_chunks:6}{row.bytes / GIB:7.2f} {source:12}{candidate.dtype:9}{kernel:10}"
            f"{run.tokens_per_second:12,.0f}{run.days:8.3g}{run.device_hours:14,.0f}{cost:>12}"
        )
    return "\n".join(lines)


def as_json(plans: Sequence[Sequence[Row]], chosen: Row | None, command: str) -> dict[str, Any]:
    """Return all candidates as numbers: bytes, seconds, dollars."""
    return {
        "held_against": accuracy(),
        "plans": [
            {
                "topology": name_of(rows[0].candidate.topology),
                "machine": asdict(rows[0].candidate.machine),
                "may_be_taken": HEADROOM * rows[0].candidate.machine.for_programs,
                "candidates": [_row(row) for row in rows],
            }
            for rows in plans
        ],
        "chosen": chosen and {"topology": name_of(chosen.candidate.topology), **_row(chosen)},
        "command": command,
    }


def _row(row: Row) -> dict[str, Any]:
    time = row.time
    return {
        "options": row.candidate.options(),
        "mesh": row.candidate.sizes,
        "micro_batches": row.candidate.step[0],
        "fits": row.fits,
        "bytes": row.bytes,
        "parts": row.parts,
        "evaluation": row.evaluation,
        "compiled_bytes": row.compiled,
        "communication": [t._asdict() | {"overlaps": t.overlaps} for t in row.traffic],
        "step_seconds": time._asdict() | {"expected": time.expected, "limiter": time.limiter},
        "run": row.run._asdict(),
    }


def require_picture(path: str) -> None:
    """Raise UserError if `picture` could not write to `path`: its folder is missing, or matplotlib does not know its
    format."""
    from matplotlib.figure import Figure  # takes a second to import

    try:
        Path(path).parent.stat()
        Figure().savefig(BytesIO(), format=Path(path).suffix[1:] or None)
    except (OSError, ValueError) as error:
        raise UserError(f"--picture={path} cannot be written: {error}") from error


def picture(plans: Sequence[Sequence[Row]], path: str) -> None:
    """Draw memory of a device against tokens/s: a colour per topology, its limit, and its best candidate with the
    bracket of its speed. Raise UserError if `path` cannot be written."""
    from matplotlib.figure import Figure  # takes a second to import
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, rows in enumerate(plans):
        name, limited = name_of(rows[0].candidate.topology), HEADROOM * rows[0].candidate.machine.for_programs
        for fits, marker in ((True, "o"), (False, "x")):
            shown = [row for row in rows if row.fits == fits]
            axes.scatter(
                [row.bytes / GIB for row in shown],
                [row.run.tokens_per_second for row in shown],
                s=14,
                color=f"C{i}",
                marker=marker,
                alpha=0.6,
                label=f"{name}: {'fits' if fits else 'does not fit'}" if shown else None,
            )
        axes.axvline(limited / GIB, color=f"C{i}", linestyle="--", linewidth=1)
        if rows[0].fits:
            best, time = rows[0].run.tokens_per_second, rows[0].time
            below, above = best - best * time.expected / time.slow, best * time.expected / time.fast - best
            looks = {"fmt": "o", "mfc": "none", "mec": "black", "ecolor": f"C{i}", "ms": 12, "capsize": 4}
            axes.errorbar(rows[0].bytes / GIB, best, yerr=[[below], [above]], label=f"{name}: best, bracket", **looks)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_xlabel("GiB of a device (dashed: what may be taken)")
    axes.set_ylabel("tokens/s, expected")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"--picture={path} cannot be written: {error}") from error
