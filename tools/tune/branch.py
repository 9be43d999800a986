"""branch: measure the critical batch: 1/2, 1, 2 and 4 times the batch, from one checkpoint, over the same tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.messages import LOGGER
from configs.schema import Config, UserError, with_options
from tools.tune.fit import divides
from tools.tune.noise import DIVISOR, TRUNK, points
from tools.tune.statistics import better_half, critical_batch
from tools.tune.trial import Context, Origin, evaluation_cost
from tools.tune.tune_json import Decision
from training.schedule import Rule, with_batch, with_rates

FACTORS = (0.5, 1.0, 2.0, 4.0)
RULES: tuple[Rule, ...] = ("root", "linear")
BRANCHES: list[tuple[float, Rule]] = [
    (1.0, RULES[0]),
    *((factor, rule) for rule in RULES for factor in FACTORS if factor != 1),
]
TOLERANCE = 0.01  # nats that a batch may lose on the best without wasting tokens
MIN_STEPS = 16  # of the run's own batch, in a branch


def needed(steps: int, tokens_per_step: int, evaluation: int, trunk: bool) -> int:
    """Return the tokens of the shortest branches from the first point on. Without a `trunk`, add those up to the
    point."""
    before = 0 if trunk else next(iter(points(steps)), 0) * tokens_per_step
    return before + len(BRANCHES) * (MIN_STEPS * tokens_per_step + evaluation)


def length(start: int, tokens_per_step: int, allowed: float, evaluation: int) -> int:
    """Return a branch's steps of the run's own batch: as many as led to the checkpoint, or what the budget allows."""
    affordable = int(min(allowed / len(BRANCHES) - evaluation, 2.0**62) // tokens_per_step)
    return max(MIN_STEPS, min(start, affordable) // DIVISOR * DIVISOR)


def branch(context: Context, rate: float) -> None:
    """Train with each batch and rule from the beginning that `noise` trained, and choose the largest batch that loses
    at most TOLERANCE. If `rate` chose another rate, train a new beginning with it."""
    record = context.record
    rate = record.pieces.get("branch/plan", {}).get("rate", rate)
    config = with_rates(with_options(context.config, record.speed), rate)
    size, evaluation = config.batch.tokens_per_step, evaluation_cost(context.config)
    start, trunk = _trunk(context, config, rate)
    if "branch/plan" not in record.pieces:
        steps = length(start, size, record.left, evaluation)
        record.put("branch/plan", {"start": start, "steps": steps, "rate": rate, "tokens": 0})
    plan = record.pieces["branch/plan"]
    losses: dict[tuple[float, Rule], list[float]] = {}
    for factor, rule in BRANCHES:
        branched, first, last = with_batch(config, factor, rule), plan["start"] / factor, plan["steps"] / factor
        branched = fitting(branched)
        if branched is None:
            LOGGER.info(f"branch: the rows of a step cannot be divided for a batch x{factor:g}")
            continue
        name = f"branch/x{factor:g}-{rule}"
        if name not in record.pieces and plan["steps"] * size + evaluation > record.left:
            LOGGER.info(f"branch: {name} would pass the budget")
            break
        origin, until = Origin(trunk, plan["start"], int(first)), int(first + last)
        branched = with_options(branched, {"steps": until})  # schedules end with the branch
        work = lambda name=name, branched=branched, until=until, origin=origin: context.losses(
            name, branched, until, origin
        )
        piece = [float(loss) for loss in record.piece(name, work)["losses"]]
        context.forget(name)
        losses[factor, rule] = piece
        LOGGER.info(f"{name}: held-out loss {sum(piece) / len(piece):.4f}")
    noise = record.pieces_of("noise").get(str(plan["start"]), {})
    record.decide(decision(losses, size, plan["start"] / config.steps, noise))


def _trunk(context: Context, config: Config, rate: float) -> tuple[int, Path]:
    """Return the step of the checkpoint to branch from, and its folder. Train it if `noise` did not."""
    record, size = context.record, config.batch.tokens_per_step
    if rate == 1 and record.pieces_of("noise"):
        return max(map(int, record.pieces_of("noise"))), context.folder / TRUNK
    name = f"{TRUNK}-x{rate:g}"
    reach = lambda point: point * size + needed(config.steps, size, evaluation_cost(context.config), True)
    start = max(
        (point for point in points(config.steps) if reach(point) <= record.left), default=points(config.steps)[0]
    )
    if f"branch/{name}" not in record.pieces:
        if context.train(name, config, start) is None:
            raise UserError(f"the run gives up before step {start} with its rates x{rate:g}")
        record.put(f"branch/{name}", {"step": start, "tokens": start * size})
    return record.pieces[f"branch/{name}"]["step"], context.folder / name


def fitting(config: Config, devices: Sequence[Any] | None = None) -> Config | None:
    """Return the config with rows of a micro-batch that divide its batch, on all devices here or those given; None if
    there are none."""
    for rows in (config.batch.rows >> n for n in range(config.batch.rows.bit_length())):
        if divides(of_rows := with_options(config, {"batch.rows_per_device": rows}), devices):
            return of_rows
    return None


def decision(losses: dict[tuple[float, Rule], list[float]], batch: int, share: float, noise: dict) -> Decision:
    """Return the decision from each branch's losses. `noise`: the piece with the noise scale at the checkpoint's
    step."""
    if len(losses) < 2 or not better_half(losses):
        return Decision("branch", "no two batches were compared", "not done", {})
    (factor, rule), behind = critical_batch(losses, TOLERANCE)
    shown = ", ".join(f"x{factor:g} {by} {more.shown('+.4f')}" for (factor, by), more in sorted(behind.items()))
    at_least = "at least " if factor == max(FACTORS) else ""
    proxy = f" (the noise scale after as many steps was {float(noise['value']):,.0f})" if noise.get("value") else ""
    scaled = f", with rates scaled by the {rule} rule," if factor != 1 else ""
    says = (
        f"a batch of {at_least}{factor * batch:,.0f} tokens (x{factor:g}){scaled} loses at most {TOLERANCE} nats on "
        f"the best: the critical batch at {share:.1%} of the run{proxy}. Nats above the best, with intervals of 95% "
        f"over held-out text, not over seeds: {shown}"
    )
    if factor < 1:  # the critical batch grows along the run
        says += "; the batch stays: a smaller one would be too small later; a ramp (--batch.ramp) can start small"
    return Decision("branch", says, "extrapolated", {"batch": factor, "rule": rule} if factor > 1 else {})
