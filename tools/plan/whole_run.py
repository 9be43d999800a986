"""Plan the complete run: days, device-hours, money, the cost of preemptions, checkpoints, and its text."""

import math
from pathlib import Path
from typing import NamedTuple

from configs.schema import Config, UserError
from data.record import read_record
from model.gpt import flops_per_token
from tools.plan.step_time import StepTime
from training.candidate import Candidate

DAY = 86_400
RESTART = 600.0
"""Seconds from a preemption to the next step: getting the machine, starting, compiling or reading the program,
restoring. Assumed."""
WRITES = 1e9
"""Bytes/s that a host writes of a checkpoint, assumed. Training continues meanwhile."""
DEVICES_OF_A_HOST = {False: 4, True: 8}
"""TPU chips, and GPUs."""
COMPILING = {False: (75.0, 8.0, 1.5), True: (5.0, 1.0, 2.5)}
"""Processor seconds of compiling a step for TPUs, and for GPUs: once, and for each block; and how many times as long
with Muon and the network's options. Read off the grid's record (bench/plan_grid.jsonl, two AMD EPYC cores), which it
matches to a factor of two."""


PROCESSORS = 4.0
"""Processors of a host that compiling keeps busy, assumed: its processor time is divided by this."""


class WholeRun(NamedTuple):
    """A run whose steps take the expected time."""

    tokens: int
    tokens_per_second: float
    mfu: float
    days: float
    """Including compiling once, evaluations and preemptions."""
    device_hours: float
    cost: float | None
    """US dollars; None without a price."""
    goodput: float
    """Share of the time that goes into steps which are kept."""
    checkpoint_bytes: int
    checkpoint_seconds: float
    compile_seconds: float
    """Processor time of compiling the step."""
    dataset_tokens: int | None
    """Tokens of a dataset folder; None for other sources."""


def whole_run(candidate: Candidate, step: StepTime, price: float | None, preemptions: float) -> WholeRun:
    """Return the plan of a run. `price`: dollars a device and hour. `preemptions`: of the complete run, a day."""
    config, devices = candidate.config, candidate.topology.devices
    tokens = config.steps * config.batch.tokens_per_step
    per_second = config.batch.tokens_per_step / step.expected
    flops = flops_per_token(config.model, config.batch.sequence_length)
    # An evaluation is the forward third of a step's work.
    evaluations = math.ceil(config.steps / config.eval.every_steps) * config.eval.tokens / per_second / 3
    training = config.steps * step.expected
    interval = config.checkpoint.every_steps * step.expected
    if config.checkpoint.every_minutes:
        interval = min(interval, 60 * config.checkpoint.every_minutes)
    lost = preemptions * (min(interval, training) / 2 + RESTART) / DAY  # share of a day: half an interval is repeated
    if lost >= 1:
        raise UserError(
            f"--preemptions={preemptions:g} a day: each costs {interval / 2 + RESTART:.0f} s, so the run never ends; "
            f"save more often (--checkpoint.every_minutes)"
        )
    once, block, with_muon = COMPILING[candidate.machine.gpu]
    muon = config.optimizer.matrices.kind == "muon"
    compiling = (with_muon if muon else 1.0) * (once + block * config.model.depth)
    around = training + evaluations + compiling / PROCESSORS
    goodput = (1 - lost) * training / around
    days = around / (1 - lost) / DAY
    hours = days * 24 * devices
    # AdamW's two moments; Muon's momentum, and a number for each row or column of a matrix.
    second = lambda p: max(p.shape) if muon and p.group == "matrices" else p.size
    saved = 4 * sum(count * (2 * p.size + second(p)) for p, count in candidate.kinds)
    hosts = math.ceil(devices / DEVICES_OF_A_HOST[candidate.machine.gpu])
    return WholeRun(
        tokens,
        per_second,
        per_second * flops / (candidate.machine.flops * devices),
        days,
        hours,
        None if price is None else hours * price,
        goodput,
        saved,
        saved / hosts / WRITES,
        compiling,
        dataset_tokens(config),
    )


def dataset_tokens(config: Config) -> int | None:
    """Return the training tokens of a dataset folder; None for raw text, shares of several, other programs' shards."""
    folder = Path(config.data.source)
    if not (folder / "dataset.json").is_file():
        return None
    record = read_record(folder)
    return record["train"]["tokens"] if record["complete"] else None
