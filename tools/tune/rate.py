"""rate: try every peak rate times 1/4 to 4, by successive halving of short runs on the same batches."""

from collections.abc import Mapping

from configs.messages import LOGGER
from configs.schema import Config, with_options
from tools.tune.statistics import better_half, lowest_of_the_best
from tools.tune.trial import Context, evaluation_cost
from tools.tune.tune_json import Decision
from training.schedule import with_rates, with_steps

GRID = (0.25, 0.5, 1.0, 2.0, 4.0)
WIDEST = 16.0  # times the config's rates, or its inverse: how far the grid grows if its edge is the best
RUNGS = 3  # each of twice the steps of the one before, with half of the rates
OF_RUN = 0.025  # share of the run's steps that the first rung takes if the budget allows it
MIN_STEPS = 16  # of the first rung
UNITS = 5 * 1 + 3 * 2 + 2 * 4  # of the first rung's steps, that all rungs take
TRIALS = 5 + 3 + 2


def rate_needs(config: Config) -> int:
    """Return the fewest tokens that halving needs."""
    return MIN_STEPS * UNITS * config.batch.tokens_per_step + TRIALS * evaluation_cost(config)


def first_rung(steps: int, tokens_per_step: int, allowed: float, evaluation: int) -> int:
    """Return the steps of the first rung: a fortieth of the run, or what the budget allows."""
    affordable = (allowed - TRIALS * evaluation) / (UNITS * tokens_per_step)
    return max(MIN_STEPS, int(min(round(OF_RUN * steps), affordable)))


def rate(context: Context, allowed: float) -> None:
    """Train on the same batches with each rate, then the better half for twice as long. Each trial is a new run with
    its complete schedule. If the best is at the grid's edge, the grid grows. `allowed`: tokens that the stage may
    take."""
    record, config = context.record, with_options(context.config, context.record.options("fit", "time"))
    size, evaluation, most = config.batch.tokens_per_step, evaluation_cost(context.config), record.spent + allowed
    shortest = first_rung(config.steps, size, allowed, evaluation)
    first = record.piece("rate/first", lambda: {"steps": shortest, "tokens": 0})["steps"]
    alive, rungs = list(GRID), []
    for rung in range(RUNGS):
        steps = min(first * 2**rung, config.steps)
        losses = {}
        while alive:
            factor = alive.pop(0)
            name = f"rate/{steps}/x{factor:g}"
            if name not in record.pieces and record.spent + steps * size + evaluation > most:
                LOGGER.info(f"rate: {name} would exceed the stage's share of the budget")
                record.decide(decision(rungs, config.steps))
                return
            losses[factor] = context.losses(name, with_steps(with_rates(config, factor), steps))
            if not alive and rung == 0:
                alive += beyond(losses)
        rungs.append((steps, losses))
        alive = better_half(losses)
        if len(alive) == 1 or steps == config.steps:
            break
    record.decide(decision(rungs, config.steps))


def beyond(losses: Mapping[float, list[float]]) -> list[float]:
    """Return the next factor beyond the grid's edge if that edge is the best so far."""
    best = better_half(losses)
    if not best or not max(losses) < WIDEST or not min(losses) > 1 / WIDEST:
        return []
    return {max(losses): [2 * max(losses)], min(losses): [min(losses) / 2]}.get(best[0], [])


def decision(rungs: list[tuple[int, dict[float, list[float]]]], steps: int) -> Decision:
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
