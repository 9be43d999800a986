"""Write sentences with figures about a run. Those that ask for action are marked."""

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import mean, median, stdev
from typing import NamedTuple

from configs.command_line import Exit
from run.goodput import goodput
from tools.report.runs import Course, Run, course_of, number

ALIVE = 300  # seconds without a line after which a run may be dead, or three times the usual gap
WAITING = 0.05  # share of the time that waiting for data, or repeated steps, may take without a warning
SLOWER = 0.85  # of its first rate: below it, the run became slower
UNCHANGED = 0.1  # share of a group's parameters that an update may be too small to change


class Sentence(NamedTuple):
    """One sentence or two."""

    text: str
    heed: bool = False
    """True if it asks for action."""


def sentences(run: Run, now: float) -> list[Sentence]:
    """Return sentences about one run, at the time `now` (seconds since 1970)."""
    subjects = (sizes, made_with, losses, benchmarks, jumps, sources, speed, time_spent, noise, coherence, updates)
    return [state(run, now), *(sentence for subject in subjects for sentence in subject(run))]


def state(run: Run, now: float) -> Sentence:
    """Return a sentence on the run's progress and state."""
    steps, step = run.options["steps"], max((line["step"] for line in run.lines), default=0)
    if run.summary:
        tokens, seconds = run.summary["tokens"], run.summary["seconds"]
        return Sentence(f"Complete: {steps:,} steps, {quantity(tokens)} tokens in {duration(seconds)} of training.")
    last = next((event for event in reversed(run.events) if event["event"] in ("start", "stop")), {})
    if last.get("event") == "stop":
        code = Exit(last["code"])
        name, again = code.name.lower().replace("_", " "), code in (Exit.INTERRUPTED, Exit.PREEMPTED)
        repair = "; the same command continues it" * again
        return Sentence(f"Stopped after step {step:,} of {steps:,} with exit code {code} ({name}){repair}.", not again)
    if not run.lines:
        return Sentence("Nothing has been logged yet.")
    silence = now - max(entry["time"] for entry in (*run.lines[-1:], *run.events[-1:]))
    gaps = [later["time"] - earlier["time"] for earlier, later in pairwise(run.lines[-16:])]
    if silence > max([ALIVE, *(3 * gap for gap in gaps)]):
        after = f"after step {step:,} of {steps:,}: it was killed, or hangs."
        return Sentence(f"Nothing was written for {duration(silence)}, {after}", True)
    rates = run.course("tokens_per_second").values
    size = int(run.options["batch.tokens_per_step"])
    left = (steps - step) * size / median(rates[-8:]) if rates else 0
    rest = f"; {duration(left)} of training are left at its present rate" if left else ""
    return Sentence(f"Running: step {step:,} of {steps:,} ({percent(step / steps)}){rest}.")


def sizes(run: Run) -> Iterator[Sentence]:
    """Yield the sizes of the network and of a step, and the text."""
    known = [event["parameters"] for event in run.events if "parameters" in event]
    count = f"{known[-1]:,} parameters, " if known else ""
    network = f"{count}depth {run.options['model.depth']} and width {run.options['model.width']}"
    tokens, source = run.options["batch.tokens_per_step"], run.options["data.source"]
    yield Sentence(f"The network has {network}; a step has {tokens:,} tokens of {source}.")


def made_with(run: Run) -> Iterator[Sentence]:
    """Yield how code, devices and versions of later starts differ from the start before."""
    starts = [event for event in run.events if event["event"] == "start" and "code_hash" in event]
    facts = [
        {"code": f"{start['code_hash']}{' (git: changed files)' * start.get('dirty', False)}"}
        | {"devices": start["devices"], "mesh": " ".join(f"{axis} {size}" for axis, size in start["mesh"].items())}
        | start["versions"]
        for start in starts
    ]
    for (before, after), start in zip(pairwise(facts), starts[1:]):
        changed = [
            f"{name} {before.get(name)} -> {value}" for name, value in after.items() if before.get(name) != value
        ]
        if changed:
            yield Sentence(f"From step {start['step']:,} on these differ: {'; '.join(changed)}.", True)


def losses(run: Run) -> Iterator[Sentence]:
    """Yield the losses and their trend."""
    loss, val = run.course("loss"), run.course("val_loss")
    if val.values:
        last, best = val.values[-1], min(val.values)
        bits, errors = run.course("val_bpb").values[-1:], run.course("val_bpb_stderr").values
        error = f" +- {errors[-1]:.3f}" if errors else ""
        in_bits = f" ({bits[0]:.3f}{error} bits per byte)" if bits else ""
        tokens = quantity(run.along("tokens", val.steps[-1:])[0])
        began = f"; it began at {val.values[0]:.3f}" * (len(val.values) > 1)
        yield Sentence(f"Validation loss is {last:.3f} nats a token{in_bits} after {tokens} tokens{began}.")
        if last > 1.005 * best:
            lowest = f"Validation loss was lowest, {best:.3f}, at step {val.steps[val.values.index(best)]:,}"
            yield Sentence(f"{lowest}, and is {last - best:.3f} above that now.", True)
    tenth = len(loss.values) // 10
    if tenth < 4:
        return
    newest, before = loss.values[-tenth:], loss.values[-2 * tenth : -tenth]
    fell, error = mean(before) - mean(newest), 2 * math.hypot(stdev(newest), stdev(before)) / math.sqrt(tenth)
    changed = f"{'fell' if fell > 0 else 'rose'} by {abs(fell):.3f} nats"
    text = changed if abs(fell) > error else f"changed by less than its noise ({error:.3f} nats)"
    yield Sentence(f"In the newest tenth of the steps the training loss {text}.", fell < -error)
    if val.values and (gap := last - mean(newest)) > 0.1 and val.steps[-1] >= loss.steps[-tenth]:
        learned = "the network knows what it was trained on better than other text"
        yield Sentence(f"Validation loss is {gap:.2f} nats above training loss: {learned}.", gap > 0.3)


def benchmarks(run: Run) -> Iterator[Sentence]:
    """Yield CORE if the run measured it."""
    core, errors = run.course("core"), run.course("core_stderr").values
    if core.values:
        first = f"; it was {core.values[0]:.4f} at step {core.steps[0]:,}" * (len(core.values) > 1)
        value = f"{core.values[-1]:.4f} +- {errors[-1]:.4f}"
        yield Sentence(f"CORE is {value} at step {core.steps[-1]:,}, where guessing gives 0{first}.")


def jumps(run: Run) -> Iterator[Sentence]:
    """Yield spikes, skipped steps, and how often the gradient was clipped."""
    if steps := sorted({step for step, _ in run.spikes}):
        listed = ", ".join(f"{step:,}" for step in steps[:6]) + ", ..." * (len(steps) > 6)
        yield Sentence(f"The loss jumped at {counted(len(steps), 'step')} ({listed}); the text of each is below.", True)
    if skipped := int(max(run.course("skipped_steps").values, default=0)):
        why = "no finite gradient, or no valid token"
        yield Sentence(f"{counted(skipped, 'step')} changed nothing: {why}.", True)
    norms, bound = run.course("grad_norm").values, run.options["optimizer.clip_norm"]
    if bound and norms and (share := sum(norm > bound for norm in norms) / len(norms)) >= 0.1:
        yield Sentence(f"The gradient was clipped to a norm of {bound:g} at {percent(share)} of the logged steps.")


def sources(run: Run) -> Iterator[Sentence]:
    """Yield how often the run went through its text."""
    courses = {name: run.course("epochs", name).values for name in run.names("epochs")}
    epochs = {name: values[-1] for name, values in courses.items() if values}
    if epochs:
        listed = ", ".join(f"{name} {times:.3g} times" for name, times in epochs.items())
        again = ", ".join(name for name, times in epochs.items() if times > 1)
        yield Sentence(f"It read {listed}" + (f": rows of {again} were repeated." if again else "."))


def speed(run: Run) -> Iterator[Sentence]:
    """Yield tokens a second, MFU and memory."""
    rates, mfu = run.course("tokens_per_second").values, run.course("mfu").values
    if not rates:
        return
    of_peak = f", an MFU of {percent(median(mfu))}" if mfu else "; the device's peak is not known, so there is no MFU"
    yield Sentence(f"It trains on {quantity(median(rates))} tokens a second{of_peak}.")
    quarter = len(rates) // 4
    early, late = (median(part) if quarter >= 4 else 0 for part in (rates[:quarter], rates[-quarter:]))
    if late < SLOWER * early:
        rates_now = f"{quantity(late)} tokens a second in its last quarter, {quantity(early)} before"
        yield Sentence(f"It became slower: {rates_now}.", True)
    if memory := run.course("peak_memory_bytes").values:
        yield Sentence(f"A device used at most {max(memory) / 2**30:.1f} GiB.")


def time_spent(run: Run) -> Iterator[Sentence]:
    """Yield sentences on the use of wall time."""
    spent = goodput(run.events)
    if wall := sum(spent.values()):
        rest = sorted(((seconds / wall, part) for part, seconds in spent.items() if part != "steps"), reverse=True)
        parts = ", ".join(f"{part} {percent(share)}" for share, part in rest[:3] if share >= 0.005)
        others = f"; the rest is mostly {parts}" if parts else ""
        yield Sentence(f"Steps took {percent(spent['steps'] / wall)} of {duration(wall)} of wall time{others}.")
        lost, down = spent["lost"] / wall, spent["down"] / wall
        if lost + down > WAITING:
            text = f"{percent(lost)} of the wall time went to repeated steps, {percent(down)} to no process"
            yield Sentence(f"{text} (--checkpoint.every_minutes bounds the first).", True)
    if (waits := run.course("data_wait").values) and (waited := mean(waits)) > WAITING:
        repair = f"more --data.workers ({run.options['data.workers']} now), or text on a faster disk, would help"
        yield Sentence(f"Waiting for data took {percent(waited)} of the time: {repair}.", True)


def noise(run: Run) -> Iterator[Sentence]:
    """Yield the batch compared with the gradient noise scale, by the rule of arXiv:1812.06162: with batch b and noise
    scale B, a loss takes 1 + B/b times the fewest possible steps, and 1 + b/B times the fewest possible tokens."""
    measured = lambda name: [line for line in run.lines if number(line, "diagnostics", name) is not None]
    name = "noise_scale" if measured("noise_scale_low") or measured("noise_scale") else "noise_scale_moments"
    lines = measured(f"{name}_low") or measured(name)
    if not lines:
        return
    line, rough = lines[-1], ", roughly, from AdamW's moments" * (name == "noise_scale_moments")
    scale, least, most = (number(line, "diagnostics", f"{name}{end}") for end in ("", "_low", "_high"))
    batch = (run.course("valid_tokens").values or [run.options["batch.tokens_per_step"]])[-1]
    if scale is None or scale <= 0 or (least is not None and most is None):
        size = "smaller" if batch < (least or 0) else "larger: whether it is too large is not known yet"
        bound = f"The noise scale is at least {quantity(least or 0)} tokens{rough}"
        known = f"{bound}; the batch, {quantity(batch)}, is {size}."
        yield Sentence(known if least and least > 0 else "What was measured so far does not give the noise scale.")
        return
    interval = f", between {quantity(least)} and {quantity(most)}" if least is not None and most is not None else ""
    ratio = batch / scale
    times = f"{ratio:.2g} times the noise scale ({quantity(scale)}{interval}{rough})"
    advice = "neither steps nor tokens are wasted"
    if ratio >= 2:
        steps, tokens = (1 + 2 / ratio) / (1 + 1 / ratio) - 1, 1 - (1 + ratio / 2) / (1 + ratio)
        cost = f"{percent(steps)} more steps and {percent(tokens)} fewer tokens"
        advice = f"half the batch would lose little: by arXiv:1812.06162, {cost} for the same loss"
    elif ratio <= 0.5:
        steps, tokens = 1 - (1 + 0.5 / ratio) / (1 + 1 / ratio), (1 + 2 * ratio) / (1 + ratio) - 1
        cost = f"{percent(steps)} fewer steps for {percent(tokens)} more tokens"
        advice = f"twice the batch would take, by arXiv:1812.06162, {cost}"
    yield Sentence(f"The batch of {quantity(batch)} tokens is {times}: {advice}.", ratio >= 2)


def coherence(run: Run) -> Iterator[Sentence]:
    """Yield how much the micro-batches of a step agree."""
    cosines = run.course("diagnostics", "coherence_running").values
    if not cosines:
        return
    cosine, meaning = median(cosines[-8:]), "they agree in part"
    if cosine > 0.9:
        meaning = "they say nearly the same, and further micro-batches in a step add little"
    elif cosine < 0.3:
        meaning = "each is mostly noise, which summing them reduces"
    between = "a micro-batch's and the sum of those before it"
    yield Sentence(f"The cosine between gradients, {between}, is {cosine:.2f}: {meaning}.", cosine > 0.9)


def updates(run: Run) -> Iterator[Sentence]:
    """Yield sizes of updates over sizes of their parameters, by group, after the first tenth of the measured steps.

    There is no verdict: what is usual depends on the group, the optimizer and the network.
    """
    ratios = {group: ratio(run, "groups", group).values for group in run.names("diagnostics", "groups")}
    medians = {group: median(values[len(values) // 10 :]) for group, values in ratios.items() if values}
    if medians:
        listed = ", ".join(f"{group} {percent(share)}" for group, share in medians.items())
        yield Sentence(f"A step's update over the size of its parameters, by group (medians): {listed}.")
    for group in ratios:
        shares = run.course("diagnostics", "groups", group, "unchanged_share").values
        if shares and (share := median(shares[-8:])) > UNCHANGED:
            why = "a step changes nothing, since float32 rounds their updates away, or there are none"
            yield Sentence(f"In {percent(share)} of the parameters of {group} {why}.")
    if run.lines and not any(line.get("diagnostics") for line in run.lines):
        switch = "--diagnostics.every_steps=10 turns them on"
        yield Sentence(f"Noise scale, coherence and sizes of updates were not measured: {switch}.")


def ratio(run: Run, *place: str) -> Course:
    """Return the norm of the update over the parameter's: of ("groups", GROUP) or ("blocks", BLOCK)."""
    updates, parameters = (run.course("diagnostics", *place, f"{what}_norm") for what in ("update", "parameter"))
    sizes = dict(zip(*parameters))
    return course_of((step, update / sizes[step]) for step, update in zip(*updates) if sizes.get(step))


def counted(count: int, what: str) -> str:
    """Return 1 step, 2 steps."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def quantity(value: float) -> str:
    """Return a count as people write it: 65,536; 1.23 M; 4.5 B."""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:,.0f}"


def percent(share: float) -> str:
    """Return a share as text: 62%, 3.1%, 0.0042%."""
    return f"{100 * share:.0f}%" if abs(share) >= 0.1 else f"{100 * share:.2g}%"


def duration(seconds: float) -> str:
    """Return a time as people say it: 45 s, 12 min, 3.4 h, 2.1 days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
