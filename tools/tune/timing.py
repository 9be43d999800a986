"""time: take steps of the candidates that fit, in turn, until it is clear which is the fastest."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax

from configs.messages import LOGGER
from data.loader import to_devices
from tools.programs.compile import compile_step
from tools.tune.fit import Candidate, describe, named
from tools.tune.statistics import mean, slowdowns
from tools.tune.trial import Context
from tools.tune.tune_json import Decision
from training.build import build
from training.candidate import REMAT
from training.state import stored_as

MAX_CANDIDATES = 6
MIN_ROUNDS, MAX_ROUNDS = 4, 16
TIE = 0.02  # the largest difference in time that does not matter
OF_STAKE = 0.25  # timing ends once it has cost this share of the most that its choice could still save


def chosen(fitting: list[Candidate]) -> list[Candidate]:
    """Return the few to time: those with the least recomputation and the most rows."""
    return sorted(fitting, key=lambda c: (REMAT.index(c.remat), -c.rows, c.fsdp, c.loss_chunks))[:MAX_CANDIDATES]


def time_steps(context: Context, candidates: list[Candidate], programs: dict[str, Any]) -> None:
    """Time complete steps on the run's first batch, one of each candidate in a round, and drop those that are slower
    for certain. Stop when one is left, when those left are within 2%, after 16 rounds, or before the budget is
    exceeded. Also stop once the timed steps cost a quarter of what a choice could still save of the run. Choose, of
    those left, the one that asks for the least memory."""
    record, config = context.record, context.config
    kept = {c.name: record.pieces.get(f"time/{c.name}", {}).get("seconds", []) for c in candidates}
    left, alike = _left(kept)
    state, steps = None, {}
    while len(left) > 1 and not alike and len(kept[left[0]]) < MAX_ROUNDS:
        if sum(map(len, kept.values())) >= OF_STAKE * at_stake({name: kept[name] for name in left}) * config.steps:
            LOGGER.info("time: more rounds would cost too much of what the choice can save")
            break
        first = [name for name in left if name not in steps]
        if (len(left) + len(first)) * config.batch.tokens_per_step > record.left:
            LOGGER.info("time: the next round would exceed the budget")
            break
        if state is None:
            state = build(config).create_state()
        for name in first:
            steps[name] = _prepared(context, name, programs)
            state, _ = _seconds(*steps[name], state)
        taken = {}
        for name in left:
            state, taken[name] = _seconds(*steps[name], state)
        for name in left:
            kept[name].append(taken[name])
            before = record.pieces.get(f"time/{name}", {"tokens": 0})["tokens"]
            tokens = before + (2 if name in first else 1) * config.batch.tokens_per_step
            record.pieces[f"time/{name}"] = {"seconds": kept[name], "tokens": tokens}
        record.write()
        left, alike = _left(kept)
    decide(context, {name: seconds for name, seconds in kept.items() if seconds}, left)


def _left(kept: dict[str, list[float]]) -> tuple[list[str], bool]:
    """Return the candidates that are not slower for certain, and whether they are equally fast."""
    most = max(len(seconds) for seconds in kept.values())
    running = [name for name in kept if len(kept[name]) == most]
    if most < MIN_ROUNDS:
        return running, False
    behind = slowdowns({name: kept[name] for name in running})
    left = [name for name in running if behind[name].low <= 0]
    return left, all(behind[name].high < TIE for name in left)


def at_stake(kept: dict[str, list[float]]) -> float:
    """Return the share of its time that the run could still lose or win by a choice among candidates: the upper bound
    of how much slower or faster than the fastest so far any may be. Infinite before the fourth round."""
    if len(next(iter(kept.values()))) < MIN_ROUNDS:
        return math.inf
    return max(max(slower.high, -slower.low) for slower in slowdowns(kept).values())


def _prepared(context: Context, name: str, programs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return a candidate's program, the run's first batch in its shape, and its abstract state."""
    made = build(named(name).applied_to(context.config))
    if name not in programs:
        programs[name] = compile_step(made)
    batch = to_devices(context.batches(made)[0], made.batch_shape, made.batch_sharding)
    return programs[name], batch, made.abstract_state


def _seconds(program: Callable, batch: Any, abstract: Any, state: Any) -> tuple[Any, float]:
    """Return the state after a step, and the step's seconds, which do not include moving the state to its devices."""
    state = jax.block_until_ready(stored_as(state, abstract))
    start = time.perf_counter()
    state, _ = jax.block_until_ready(program(state, batch))
    return state, time.perf_counter() - start


def decide(context: Context, kept: dict[str, list[float]], left: list[str]) -> None:
    """Choose the candidate that asks for the least memory, of those left."""
    record = context.record
    memory = {name: piece["bytes"] for name, piece in record.pieces_of("fit").items()}
    best = min(left, key=lambda name: memory[name])
    if not kept:
        only = f"only {describe(named(best))} fits, so nothing was timed"
        says = only if len(left) == 1 else "no round was timed within the budget"
        record.decide(Decision("time", says, "not done", {}))
        return
    others = ", ".join(
        f"{name} {more.shown('+.1%')}"
        for name, more in sorted(slowdowns(kept).items(), key=lambda item: item[1].value)
        if more.value or more.high
    )
    per_second = context.config.batch.tokens_per_step / mean(kept[best]).value
    tied = f"; {len(left)} are tied, and it asks for the least memory" if len(left) > 1 else ""
    says = (
        f"{describe(named(best))}: {per_second:,.0f} tokens/s{tied}. Time of the others over the fastest, with "
        f"intervals of 95%: {others}"
    )
    record.decide(Decision("time", says, "measured", named(best).options()))
