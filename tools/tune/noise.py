"""noise: measure the gradient noise scale along the run's first tenth, a proxy of the critical batch."""

from configs.messages import LOGGER
from configs.schema import UserError, with_options
from run.diagnosis import BLOCKS, NoiseScale, noise_scale
from run.lines import read_metrics
from tools.tune.fit import halvings
from tools.tune.trial import Context
from tools.tune.tune_json import Decision
from training.build import build
from training.mesh import batch_devices, make_mesh

POINTS = (0.01, 0.02, 0.05, 0.1)  # shares of the run's tokens
UNITS = 8  # the fewest gradients of a step that are compared: micro-batches x replicas
TRUNK = "trunk"  # the folder of the run's beginning, which `branch` starts from too
DIVISOR = 4  # steps at a point are a multiple of it, so that a batch four times as large can start there


def points(steps: int) -> list[int]:
    """Return the steps of the run at which the noise scale is read, each at least as late as a noise scale needs."""
    rounded = [-(-round(share * steps) // DIVISOR) * DIVISOR for share in POINTS]
    return sorted({max(point, BLOCKS) for point in rounded if max(point, BLOCKS) <= steps})


def every(steps: int) -> int:
    """Return the steps between measured ones: at least sixteen are measured up to the first point, or all."""
    return max(1, points(steps)[0] // 16)


def needed(steps: int, tokens_per_step: int) -> int:
    """Return the tokens up to the first point."""
    return next(iter(points(steps)), 0) * tokens_per_step


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
    record, config = context.record, context.config
    mesh = make_mesh(config.mesh)
    replicas = batch_devices(mesh)
    share = config.batch.tokens_per_step // config.batch.sequence_length // replicas
    rows = units_of(share, min(config.batch.rows, share), replicas)
    measured = with_options(config, {"batch.rows_per_device": rows, "diagnostics.every_steps": every(config.steps)})
    micro_batches = build(measured).batch_shape[0]
    if micro_batches * replicas == 1:
        says = "a step of one row on one device has one gradient, and shows no noise; give it two rows"
        record.decide(Decision("noise", says, "not done", {}))
        return
    size, done = config.batch.tokens_per_step, max(map(int, record.pieces_of("noise")), default=0)
    reached = [point for point in points(config.steps) if (point - done) * size <= record.left]
    for point in points(config.steps)[len(reached) :][:1]:
        LOGGER.info(f"noise: training to {record.share(point * size)} of the tokens would exceed the budget")
    if reached and reached[-1] > done and context.train(TRUNK, measured, reached[-1]) is None:
        raise UserError("the run gives up in its first tenth; find lower rates: --stages=rate")
    lines = read_metrics(context.folder / TRUNK)
    for before, point in zip([0, *reached], reached):
        scale = read(lines, point)
        piece = {name: getattr(scale, name) if scale else None for name in ("value", "low", "high")}
        piece = record.piece(f"noise/{point}", lambda: {**piece, "tokens": (point - before) * size})  # noqa: B023
        LOGGER.info(f"noise: after {point} steps B is {interval(piece)} tokens")
    pieces = {int(step): piece for step, piece in record.pieces_of("noise").items() if piece["value"] is not None}
    record.decide(decision(pieces, size, config.steps))


def interval(piece: dict) -> str:
    """Return a noise scale as text, with its interval."""
    if piece["value"] is None:
        return "not known"
    low, high = float(piece["low"]), float(piece["high"])
    return f"at least {low:,.0f}" if high == float("inf") else f"{float(piece['value']):,.0f} [{low:,.0f}, {high:,.0f}]"


def decision(pieces: dict[int, dict], batch: int, steps: int) -> Decision:
    """Return the decision on the batch, in tokens, from the noise scales. The batch stays: the scales are from the
    run's first tenth, and the batch is for the complete run."""
    if not pieces:
        return Decision("noise", "no point was reached at which the noise scale is known", "not done", {})
    last = max(pieces)
    high, low = float(pieces[last]["high"]), float(pieces[last]["low"])
    if high < batch:
        what = (
            f"the config's {batch:,} is above it there, and stays: a smaller one would be too small later; a ramp "
            f"(--batch.ramp) can start small"
        )
    elif low > batch:
        what = f"the config's {batch:,} is below it: a larger batch may cost few tokens, which branch measures"
    else:
        what = f"the config's {batch:,} is within its interval, and stays"
    says = (
        f"B is {interval(pieces[last])} tokens at {last / steps:.1%} of the run; {what}. It mostly grows as the loss "
        "falls (arXiv:1812.06162), and it is a proxy of the critical batch"
    )
    return Decision("noise", says, "extrapolated", {})
