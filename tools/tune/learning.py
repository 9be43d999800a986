"""noise, rate and branch: train short runs to choose what changes the result, the rates and the batch.

noise measures the gradient noise scale along the run's first tenth, a proxy of the critical batch. rate tries every
peak rate times 1/4 to 4, by successive halving of short runs on the same batches. branch measures the critical batch:
1/2, 1, 2 and 4 times the batch, from one checkpoint, over the same tokens.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from configs.messages import LOGGER
from configs.schema import Config, UserError, with_options
from run.diagnosis import BLOCKS, NoiseScale, noise_scale
from run.record import read_metrics
from tools.plan.search import halvings
from tools.tune.speed import rows_that_divide
from tools.tune.statistics import better_half, critical_batch, lowest_of_the_best
from tools.tune.trial import Context, Origin, evaluation_cost
from tools.tune.tune_json import Decision
from training.build import build
from training.mesh import batch_devices, make_mesh
from training.schedule import Rule, each, for_batch, with_rates

POINTS = (0.01, 0.02, 0.05, 0.1)  # shares of the run's tokens at which the noise scale is read
UNITS = 8  # the fewest gradients of a step that are compared: micro-batches x replicas
TRUNK = "trunk"  # the folder of the run's beginning, which `branch` starts from too
DIVISOR = 4  # steps at a point are a multiple of it, so that a batch four times as large can start there
GRID = (0.25, 0.5, 1.0, 2.0, 4.0)
WIDEST = 16.0  # times the config's rates, or its inverse: how far the grid grows if its edge is the best
RUNGS = 3  # each of twice the steps of the one before, with half of the rates
OF_RUN = 0.025  # share of the run's steps that the first rung takes if the budget allows it
OF_ALL_RUNGS = 5 * 1 + 3 * 2 + 2 * 4  # times the first rung's steps, that all rungs take
TRIALS = 5 + 3 + 2
BRANCHES: list[tuple[float, Rule]] = [
    (1.0, "root"),
    *((factor, "root") for factor in (0.5, 2.0, 4.0)),
    *((factor, "linear") for factor in (0.5, 2.0, 4.0)),
]
TOLERANCE = 0.01  # nats that a batch may lose on the best without wasting tokens
MIN_STEPS = 16  # of the run's own batch: in the first rung of rates, and in a branch


def points(steps: int) -> list[int]:
    """Return the steps of the run at which the noise scale is read, each at least as late as a noise scale needs."""
    rounded = [-(-round(share * steps) // DIVISOR) * DIVISOR for share in POINTS]
    return sorted({max(point, BLOCKS) for point in rounded if max(point, BLOCKS) <= steps})


def noise_needs(config: Config) -> int:
    """Return the tokens up to the first point."""
    return next(iter(points(config.steps)), 0) * config.batch.tokens_per_step


def read(lines: list[dict], step: int) -> NoiseScale | None:
    """Return the noise scale at `step`, from the later half of the steps measured so far, but at least 8."""
    measured = [line["diagnostics"] for line in lines if "diagnostics" in line and line["step"] <= step]
    window = measured[-max(BLOCKS, len(measured) // 2) :]
    pairs = [(piece["signal"]["all"], piece["noise"]["all"]) for piece in window]
    sound = [(signal, noise) for signal, noise in pairs if signal is not None and noise is not None]
    return noise_scale(*zip(*sound)) if sound else None


def units_of(share: int, rows: int, replicas: int) -> int:
    """Return the rows of a micro-batch on a device that divide a step into at least 8 units, if a device's `share` can
    be halved so often. The noise is measured between units; the step's result does not depend on them."""
    sizes = [n for n in sorted(halvings(share), reverse=True) if n <= rows]
    return next((n for n in sizes if share // n * replicas >= UNITS), sizes[-1])


def noise(context: Context) -> None:
    """Train the run's beginning, measuring itself, from point to point as far as the budget reaches, and print the
    noise scale there. Change no batch: the later noise scale is not known; `branch` measures a batch."""
    record, config, size = context.record, context.config, context.config.batch.tokens_per_step
    replicas = batch_devices(make_mesh(config.mesh))
    share = size // config.batch.sequence_length // replicas
    rows = units_of(share, min(config.batch.rows, share), replicas)
    every = max(1, points(config.steps)[0] // 16)  # at least sixteen are measured up to the first point, or all
    measured = with_options(config, {"batch.rows_per_device": rows, "diagnostics.every_steps": every})
    if build(measured).batch_shape[0] * replicas == 1:
        says = "a step of one row on one device has one gradient, and shows no noise; give it two rows"
        record.decide(Decision("noise", says, "not done", {}))
        return
    done = max(map(int, record.pieces_of("noise")), default=0)
    begun = record.pieces_of("branch")
    stays = "plan" in begun and not any(name.startswith(TRUNK) for name in begun)  # they start from this checkpoint
    left = 0 if stays else record.left
    reached = [point for point in points(config.steps) if (point - done) * size <= left]
    for point in points(config.steps)[len(reached) :][:1]:
        why = "is not possible: branches have begun before it" if stays else "would exceed the budget"
        LOGGER.info(f"noise: training to {record.share(point * size)} of the tokens {why}")
    if reached and reached[-1] > done and context.train(TRUNK, measured, reached[-1]) is None:
        raise UserError("the run gives up in its first tenth; find lower rates: --stages=rate")
    lines = read_metrics(context.folder / TRUNK)
    for before, point in zip([0, *reached], reached):
        scale = read(lines, point)
        piece = {name: getattr(scale, name) if scale else None for name in ("value", "low", "high")}
        piece = record.piece(f"noise/{point}", lambda: {**piece, "tokens": (point - before) * size})  # noqa: B023
        LOGGER.info(f"noise: after {point} steps B is {interval(piece)} tokens")
    pieces = {int(step): piece for step, piece in record.pieces_of("noise").items() if piece["value"] is not None}
    record.decide(noise_decision(pieces, size, config.steps))


def interval(piece: dict) -> str:
    """Return a noise scale as text, with its interval."""
    if piece["value"] is None:
        return "not known"
    low, high = float(piece["low"]), float(piece["high"])
    return f"at least {low:,.0f}" if high == float("inf") else f"{float(piece['value']):,.0f} [{low:,.0f}, {high:,.0f}]"


def noise_decision(pieces: dict[int, dict], batch: int, steps: int) -> Decision:
    """Return the decision on the batch, in tokens, from the noise scales. The batch stays: the scales are from the
    run's first tenth, and the batch is for the complete run."""
    if not pieces:
        return Decision("noise", "no point was reached at which the noise scale is known", "not done", {})
    last = max(pieces)
    if float(pieces[last]["high"]) < batch:
        what = f"the config's {batch:,} is above it there, and stays: a smaller one would be too small later"
    elif float(pieces[last]["low"]) > batch:
        what = f"the config's {batch:,} is below it: a larger batch may cost few tokens, which branch measures"
    else:
        what = f"the config's {batch:,} is within its interval, and stays"
    says = (
        f"B is {interval(pieces[last])} tokens at {last / steps:.1%} of the run; {what}. It mostly grows as the loss "
        "falls (arXiv:1812.06162), and it is a proxy of the critical batch"
    )
    return Decision("noise", says, "extrapolated", {})


def rate_needs(config: Config) -> int:
    """Return the fewest tokens that halving needs."""
    return MIN_STEPS * OF_ALL_RUNGS * config.batch.tokens_per_step + TRIALS * evaluation_cost(config)


def first_rung(steps: int, tokens_per_step: int, allowed: float, evaluation: int) -> int:
    """Return the steps of the first rung: a fortieth of the run, or what the budget allows."""
    affordable = (allowed - TRIALS * evaluation) / (OF_ALL_RUNGS * tokens_per_step)
    return max(MIN_STEPS, int(min(round(OF_RUN * steps), affordable)))


def rate(context: Context, allowed: float) -> None:
    """Train on the same batches with each rate, then the better half for twice as long. Each trial is a new run with
    its complete schedule. If the best is at the grid's edge, the grid grows. `allowed`: tokens that the stage may
    take, over all its starts."""
    record, config = context.record, with_options(context.config, context.record.options("fit", "time"))
    size, evaluation = config.batch.tokens_per_step, evaluation_cost(context.config)
    shortest = first_rung(config.steps, size, allowed, evaluation)
    first = record.piece("rate/first", lambda: {"steps": shortest, "tokens": 0})["steps"]
    alive, rungs = list(GRID), []
    for rung in range(RUNGS):
        steps = min(first * 2**rung, config.steps)
        losses = {}
        while alive:
            factor = alive.pop(0)
            name = f"rate/{steps}/x{factor:g}"
            if name not in record.pieces and record.cost("rate") + steps * size + evaluation > allowed:
                LOGGER.info(f"rate: {name} would exceed the stage's share of the budget")
                record.decide(rate_decision(rungs, config.steps))
                return
            losses[factor] = context.losses(name, with_steps(with_rates(config, factor), steps))
            if not alive and rung == 0:
                alive += beyond(losses)
        rungs.append((steps, losses))
        alive = better_half(losses)
        if len(alive) == 1 or steps == config.steps:
            break
    record.decide(rate_decision(rungs, config.steps))


def beyond(losses: Mapping[float, list[float]]) -> list[float]:
    """Return the next factor beyond the grid's edge if that edge is the best so far."""
    best = better_half(losses)
    if not best or not max(losses) < WIDEST or not min(losses) > 1 / WIDEST:
        return []
    return {max(losses): [2 * max(losses)], min(losses): [min(losses) / 2]}.get(best[0], [])


def rate_decision(rungs: list[tuple[int, dict[float, list[float]]]], steps: int) -> Decision:
    """Return the decision from the losses of each finished rung, by factor."""
    sound = [(at, losses) for at, losses in rungs if better_half(losses)]
    if not sound:
        return Decision("rate", "no rung was finished, or no rate gave a finite loss", "not done", {})
    at, losses = sound[-1]
    factor, behind = lowest_of_the_best(losses)
    others = ", ".join(f"x{other:g} {more.shown('+.4f')}" for other, more in sorted(behind.items()) if more.value)
    course = ", ".join(f"x{better_half(losses)[0]:g} at {n} steps" for n, losses in sound)
    share = at / steps
    warning = "" if share >= 1 else "; a short horizon favours high rates (arXiv:2409.19913): if in doubt, take half"
    says = (
        f"every peak rate x{factor:g}, the smallest not worse for certain than the best, in runs of {share:.1%} of the "
        f"steps; nats above the best, with intervals of 95% over held-out text, not over seeds: {others or 'none'}. "
        f"The best was {course}{warning}"
    )
    return Decision("rate", says, "measured" if share >= 1 else "extrapolated", {"rate": factor} if factor != 1 else {})


def with_steps(config: Config, steps: int) -> Config:
    """Return the config with `steps` steps. The warmups of rates and of Muon's momentum stay the same share of them."""
    share = lambda warmup: round(warmup * steps / config.steps)
    for name in ("warmup_steps", "momentum_warmup_steps"):
        config = each(config, name, share)
    return with_options(config, {"steps": steps})


def with_batch(config: Config, factor: float, rule: Rule) -> Config:
    """Return the config with `factor` times as many tokens per step, and the same total tokens. Rates and second
    moments follow."""
    if factor == 1:
        return config
    config = for_batch(with_steps(config, math.ceil(config.steps / factor)), factor, rule)
    return with_options(config, {"batch.tokens_per_step": round(config.batch.tokens_per_step * factor)})


def branch_needs(config: Config, trunk: bool) -> int:
    """Return the tokens of the shortest branches from the first point on. Without a `trunk`, add those up to the
    point."""
    branches = len(BRANCHES) * (MIN_STEPS * config.batch.tokens_per_step + evaluation_cost(config))
    return branches + (0 if trunk else noise_needs(config))


def branch(context: Context, rate: float) -> None:
    """Train with each batch and rule from the beginning that `noise` trained, and choose the largest batch that loses
    at most TOLERANCE. If `rate` chose another rate, train a new beginning with it."""
    record = context.record
    rate = record.pieces.get("branch/plan", {}).get("rate", rate)
    config = with_rates(with_options(context.config, record.options("fit", "time")), rate)
    size, evaluation = config.batch.tokens_per_step, evaluation_cost(context.config)
    start, trunk = _trunk(context, config, rate)
    # As many steps of the run's own batch as led to the checkpoint, or what the budget allows.
    affordable = int(min(record.left / len(BRANCHES) - evaluation, 2.0**62) // size)
    steps = max(MIN_STEPS, min(start, affordable) // DIVISOR * DIVISOR)
    plan = record.piece("branch/plan", lambda: {"start": start, "steps": steps, "rate": rate, "tokens": 0})
    losses: dict[tuple[float, Rule], list[float]] = {}
    for factor, rule in BRANCHES:
        branched, first, last = with_batch(config, factor, rule), plan["start"] / factor, plan["steps"] / factor
        branched = rows_that_divide(branched)
        if branched is None:
            LOGGER.info(f"branch: the rows of a step cannot be divided for a batch x{factor:g}")
            continue
        name = f"branch/x{factor:g}-{rule}"
        if name not in record.pieces and plan["steps"] * size + evaluation > record.left:
            LOGGER.info(f"branch: {name} would pass the budget")
            break
        branched = with_options(branched, {"steps": int(first + last)})  # schedules end with the branch
        losses[factor, rule] = context.losses(name, branched, Origin(trunk, plan["start"], int(first)))
    scale = record.pieces_of("noise").get(str(plan["start"]), {})
    record.decide(branch_decision(losses, size, plan["start"] / config.steps, scale))


def _trunk(context: Context, config: Config, rate: float) -> tuple[int, Path]:
    """Return the step of the checkpoint to branch from, and its folder. Train it if `noise` did not."""
    record, size = context.record, config.batch.tokens_per_step
    name = f"{TRUNK}-x{rate:g}"
    if rate == 1 and record.pieces_of("noise") and f"branch/{name}" not in record.pieces:
        return max(map(int, record.pieces_of("noise"))), context.folder / TRUNK
    later = branch_needs(config, trunk=True)
    affordable = [point for point in points(config.steps) if point * size + later <= record.left]
    start = max(affordable, default=points(config.steps)[0])
    if f"branch/{name}" not in record.pieces and context.train(name, config, start) is None:
        raise UserError(f"the run gives up before step {start} with its rates x{rate:g}")
    piece = record.piece(f"branch/{name}", lambda: {"step": start, "tokens": start * size})
    return piece["step"], context.folder / name


def branch_decision(losses: dict[tuple[float, Rule], list[float]], batch: int, share: float, noise: dict) -> Decision:
    """Return the decision from each branch's losses. `noise`: the piece with the noise scale at the checkpoint's
    step."""
    if len(losses) < 2 or not better_half(losses):
        return Decision("branch", "no two batches were compared", "not done", {})
    (factor, rule), behind = critical_batch(losses, TOLERANCE)
    shown = ", ".join(f"x{factor:g} {by} {more.shown('+.4f')}" for (factor, by), more in sorted(behind.items()))
    at_least = "at least " if factor == max(factor for factor, _ in BRANCHES) else ""
    proxy = f" (the noise scale after as many steps was {float(noise['value']):,.0f})" if noise.get("value") else ""
    scaled = f", with rates scaled by the {rule} rule," if factor != 1 else ""
    says = (
        f"a batch of {at_least}{factor * batch:,.0f} tokens (x{factor:g}){scaled} loses at most {TOLERANCE} nats on "
        f"the best: the critical batch at {share:.1%} of the run{proxy}. Nats above the best, with intervals of 95% "
        f"over held-out text, not over seeds: {shown}"
    )
    if factor < 1:  # the critical batch grows along the run
        says += "; the batch stays: a smaller one would be too small later"
    return Decision("branch", says, "extrapolated", {"batch": factor, "rule": rule} if factor > 1 else {})
