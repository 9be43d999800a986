"""Choose a run's micro-batch, rates and batch: python -m tools.tune --config=FILE --budget=3%.

Each of five stages stops by its own rule: fit compiles what may fit the memory; time takes steps of it in turn; noise
measures the gradient noise scale along the run's beginning; rate trains short runs with other rates; branch trains on
from one checkpoint with other batches. The same command resumes. It writes tuned.py, a config that train.py takes,
tune.json and pictures. docs/tuning.md shows an example.
"""

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import jax

from configs.command_line import Exit, parse
from configs.messages import LOGGER, outlive_the_log, show_messages
from configs.schema import Config, FilePath, NotNegative, UserError, with_options
from configs.validation import require_steps
from data.dataset import open_text
from hosts.machines import GIB, HEADROOM, device_limit, machines
from hosts.runtime import cache_dir, run_command, start_jax
from hosts.stop import Stop
from run.diagnosis import BLOCKS
from run.folder import RunLock
from tools.programs.topologies import devices_of, parse_topology
from tools.tune.learning import branch, branch_needs, noise, noise_needs, points, rate, rate_needs
from tools.tune.outputs import draw, write_tuned
from tools.tune.speed import MIN_ROUNDS, chosen, fit, that_fit, time_steps
from tools.tune.trial import Context
from tools.tune.tune_json import STAGES, Record
from training.build import build
from training.candidate import candidate_of
from training.memory import with_rows

OF_RATE = 0.5  # the share that `rate` may spend of what the stages before it left, if `branch` comes after it


@dataclass(frozen=True)
class Arguments:
    """Options of this command, not of the run."""

    stages: str = ",".join(STAGES)
    """The stages to run, in their order. `time` needs the results of `fit`."""
    budget: str = "3%"
    """The share of the run's FLOPs that the stages may spend together; 0 is no limit. Compiling does not count."""
    memory: NotNegative[float] = 0.0
    """GiB of a device, instead of what it reports: for an unknown `topology`, or to leave memory to other programs."""
    topology: str = ""
    """A TPU slice (`v5e:4x4`) or GPUs (`h200:8`) to compile for, which need not be here. Only with `--stages=fit`."""
    out: FilePath = ""
    """The folder for all results; `runs/NAME-tune` unless given."""


def stages_of(text: str) -> list[str]:
    """Parse names of stages. Raise UserError for others."""
    asked = text.split(",")
    if unknown := [stage for stage in asked if stage not in STAGES]:
        wrong = ", ".join(map(repr, unknown))
        raise UserError(f"--stages={text}: {wrong} is not one of {', '.join(STAGES)}")
    return [stage for stage in STAGES if stage in asked]


def budget_of(text: str) -> float:
    """Parse `3%` or `0.03` as a share; 0 is no limit. Raise UserError for others."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf:
        raise UserError(f"--budget={text} is not a share of the run's FLOPs; give 3%, or 0 for no limit")
    return share


def needs(config: Config, record: Record, candidates: int = 2) -> dict[str, float]:
    """Return the fewest tokens that each stage needs to do anything, beyond what is recorded of it. (`fit` runs
    nothing.)"""
    begun = bool(record.pieces_of("noise")) and not record.options("rate")  # else branch trains its own beginning
    least = {
        "time": candidates * (MIN_ROUNDS + 1) * config.batch.tokens_per_step if candidates > 1 else 0,
        "noise": noise_needs(config),
        "rate": rate_needs(config),
        "branch": branch_needs(config, begun),
    }
    return {stage: 0 if record.pieces_of(stage) else tokens for stage, tokens in least.items()}


def too_little(record: Record, stage: str, tokens: float) -> str:
    """Return a message that the budget is too small for a stage, with the tokens it needs."""
    left = "" if math.isinf(record.left) else f", and {record.share(record.left)} are left"
    return f"{stage} needs at least {record.share(tokens)} of the run's FLOPs{left}"


def tune(config: Config, arguments: Arguments, folder: Path, stop: Stop) -> Exit:
    """Run the stages, one after the other. Each logs its decision when it ends."""
    stages = stages_of(arguments.stages)
    require_steps(config)
    if arguments.topology and stages != ["fit"]:
        raise UserError(f"--topology={arguments.topology} can be compiled for, not run on: give --stages=fit")
    devices = devices_of(arguments.topology)
    limit = device_memory(arguments, devices)
    rows = with_rows(candidate_of(config, devices), HEADROOM * limit).config.batch.rows_per_device
    config = with_options(config, {"batch.rows_per_device": rows})
    built = build(config, devices)  # raises UserError for sizes that do not divide
    record = Record(folder, config, budget_of(arguments.budget), devices[0], len(devices))
    if {"noise", "branch"} & {*stages} and not points(config.steps):
        raise UserError(f"--steps={config.steps}: noise and branch need a run of at least {BLOCKS} steps")
    least = needs(config, record)
    if all(stage in least and least[stage] > record.left for stage in stages):
        missing = "; ".join(too_little(record, stage, least[stage]) for stage in stages)
        raise UserError(f"{missing}. Give a larger --budget, or 0 for no limit")
    if "time" in stages and "fit" not in stages and not that_fit(record, limit):
        raise UserError("--stages: time needs the results of fit, and there are none yet; give fit, too")
    programs = fit(config, record, limit, devices) if "fit" in stages else {}
    if stages != ["fit"]:
        micro_batches, rows, length = built.batch_shape
        text = open_text(config.data, config.model.vocab_size, length, 4 * micro_batches * rows, cache_dir())
        context, fitting = Context(config, folder, record, text, stop), chosen(that_fit(record, limit))
        of_rate = OF_RATE if "branch" in stages else 1
        run = {
            "time": lambda: time_steps(context, fitting, programs),
            "noise": lambda: noise(context),
            "rate": lambda: rate(context, (record.left + record.cost("rate")) * of_rate),
            "branch": lambda: branch(context, record.options("rate").get("rate", 1.0)),
        }
        for stage in (stage for stage in stages if stage != "fit"):
            tokens = needs(config, record, len(fitting))[stage]
            if tokens > record.left:
                LOGGER.info(f"{too_little(record, stage, tokens)}: left out")
                continue
            run[stage]()
            programs.clear()  # their memory is needed
    names = draw(config, record, limit)
    write_tuned(config, record, "python -m tools.tune " + shlex.join(sys.argv[1:]), devices)
    written = ", ".join(["tuned.py", "tune.json", *(f"{name}.png" for name in names)])
    LOGGER.info(f"{record.share(record.spent)} of the run's FLOPs were spent. In {folder}: {written}")
    LOGGER.info(f"train: python train.py --config={folder}/tuned.py")
    return Exit.COMPLETE


def device_memory(arguments: Arguments, devices: list) -> int:
    """Return the bytes of a device. Raise UserError for a topology whose memory is not known."""
    if arguments.memory:
        return int(arguments.memory * GIB)
    if not arguments.topology:
        return device_limit(devices[0], len(devices))
    kind = parse_topology(arguments.topology).kind
    if kind not in machines():
        raise UserError(f"--topology={arguments.topology}: the memory of a {kind} is not known; give --memory=GIB")
    return machines()[kind].for_programs


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    outlive_the_log("stdout")  # its messages; the results are in the folder
    folder = Path(arguments.out or f"runs/{config.name}-tune")
    with RunLock(folder) as lock, Stop() as stop:
        if arguments.topology:
            show_messages()
        else:
            start_jax()
        if jax.process_count() > 1:
            raise UserError("python -m tools.tune runs in one process: times of several would disagree")
        try:
            lock.take()
        except OSError as error:
            raise UserError(f"--out={folder} cannot be written: {error}") from error
        return tune(config, arguments, folder, stop)


if __name__ == "__main__":
    run_command(main)
