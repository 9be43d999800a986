"""What a person should know of a run, in sentences with figures; those that ask for something are marked."""

import itertools
import math
from statistics import mean, median, stdev
from typing import NamedTuple

from configs.exit_codes import Exit
from tools.report.runs import Course, Run, number

ALIVE = 300  # seconds without a line after which a run that has not stopped is reported, or three times the usual
WAITING = 0.05  # share of the time that waiting for data, or steps done again, may take before it is worth a thought
SLOWER = 0.85  # of its first rate: the run has become slower
UNCHANGED = 0.1  # share of a group's parameters that an update is too small for


class Sentence(NamedTuple):
    """A sentence, or two."""

    text: str
    heed: bool = False
    """Whether somebody may want to do something about it."""


def sentences(run: Run, now: float) -> list[Sentence]:
    """What a person should know of one run, at the time `now` (seconds since 1970)."""
    said = state(run, now)
    for part in (sizes, made_with, losses, benchmarks, jumps, sources, speed, time_spent, noise, coherence, updates):
        said += part(run)
    if run.lines and not run.measured:
        switch = "--diagnostics.every_steps=10 switches them on"
        said.append(Sentence(f"Noise scale, coherence and sizes of updates were not measured: {switch}."))
    return said


def state(run: Run, now: float) -> list[Sentence]:
    """How far the run is, and how it stands."""
    steps, step = run.options.get("steps", 0), run.last_step
    if run.summary:
        tokens, seconds = (number(run.summary, name) or 0 for name in ("tokens", "seconds"))
        text = f"Complete: {steps:,} steps, {quantity(tokens)} tokens in {duration(seconds)} of training."
        return [Sentence(text)]
    last = next((event for event in reversed(run.events) if event["event"] in ("start", "stop")), {})
    if last.get("event") == "stop":
        code = last.get("code")
        name = Exit(code).name.lower().replace("_", " ") if code in set(Exit) else "of another version"
        again = code in (Exit.INTERRUPTED, Exit.PREEMPTED)
        mend = "; the same command continues it" if again else ""
        return [Sentence(f"Stopped after step {step:,} of {steps:,} with exit code {code} ({name}){mend}.", not again)]
    if not run.lines:
        return [Sentence("Nothing has been logged yet.")]
    silence = now - run.last_sign
    times = [line["time"] for line in run.lines[-16:]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    if silence > max(ALIVE, *(3 * gap for gap in gaps), 0):
        text = (
            f"Nothing was written for {duration(silence)}, after step {step:,} of {steps:,}: it was killed, or hangs."
        )
        return [Sentence(text, True)]
    rates = run.course("tokens_per_second").values
    left = (run.ramp.tokens(steps) - run.ramp.tokens(step)) / median(rates[-8:]) if rates else 0
    rest = f"; {duration(left)} of training are left at its present rate" if left else ""
    return [Sentence(f"Running: step {step:,} of {steps:,} ({percent(step / max(steps, 1))}){rest}.")]


def sizes(run: Run) -> list[Sentence]:
    """Return the sizes of the network and of a step, and the text."""
    known = [event["parameters"] for event in run.events if "parameters" in event]
    count = f"{known[-1]:,} parameters, " if known else ""
    depth, width = run.options.get("model.depth"), run.options.get("model.width")
    tokens, source = run.options.get("batch.tokens_per_step", 0), run.options.get("data.source") or "stdlib"
    return [
        Sentence(f"The network has {count}depth {depth} and width {width}; a step has {tokens:,} tokens of {source}.")
    ]


def made_with(run: Run) -> list[Sentence]:
    """What later starts were made with that differs from the one before."""
    starts = [event for event in run.events if event["event"] == "start" and "code_hash" in event]
    said = []
    for before, after in itertools.pairwise(starts):
        flat = [
            {"code": f"{at['code_hash']}{' (git: changed files)' * at.get('dirty', False)}", "devices": at["devices"]}
            | {"mesh": " ".join(f"{axis} {size}" for axis, size in at["mesh"].items())}
            | at["versions"]
            for at in (before, after)
        ]
        differ = [
            f"{name} {flat[0].get(name)} -> {flat[1].get(name)}"
            for name in flat[1]
            if flat[0].get(name) != flat[1][name]
        ]
        if differ:
            said.append(
                Sentence(f"From step {after['step']:,} on it was made with other things: {'; '.join(differ)}.", True)
            )
    return said


def losses(run: Run) -> list[Sentence]:
    """Where the losses are, and where they go."""
    said = []
    loss, val, bpb = run.course("loss"), run.course("val_loss"), run.course("val_bpb")
    if val.values:
        errors = run.course("val_bpb_stderr").values
        of_error = f" +- {errors[-1]:.3f}" if errors else ""
        (tokens,), bits = (
            run.along("tokens", val.steps[-1:]),
            f" ({bpb.values[-1]:.3f}{of_error} bits per byte)" * bool(bpb.values),
        )
        text = f"Validation loss is {val.values[-1]:.3f} nats a token{bits} after {quantity(tokens)} tokens"
        said.append(Sentence(text + (f"; it began at {val.values[0]:.3f}." if len(val.values) > 1 else ".")))
        best = min(val.values)
        if val.values[-1] > 1.005 * best:
            where = f"Validation loss was lowest, {best:.3f}, at step {val.steps[val.values.index(best)]:,}"
            said.append(Sentence(f"{where}, and is {val.values[-1] - best:.3f} above that now.", True))
    tenth = len(loss.values) // 10
    if tenth >= 4:
        newest, before = loss.values[-tenth:], loss.values[-2 * tenth : -tenth]
        fell, noise = mean(before) - mean(newest), math.hypot(stdev(newest), stdev(before)) / math.sqrt(tenth)
        changed = f"{'fell' if fell > 0 else 'rose'} by {abs(fell):.3f} nats"
        text = changed if abs(fell) > 2 * noise else f"changed by less than its noise ({2 * noise:.3f} nats)"
        rising = fell < -2 * noise
        said.append(Sentence(f"In the newest tenth of the steps the training loss {text}.", rising))
        if val.values and (gap := val.values[-1] - mean(newest)) > 0.1 and val.steps[-1] >= loss.steps[-tenth]:
            learned = "the network knows what it was trained on better than other text"
            said.append(Sentence(f"Validation loss is {gap:.2f} nats above training loss: {learned}.", gap > 0.3))
    return said


def benchmarks(run: Run) -> list[Sentence]:
    """CORE, where the run measured it."""
    core, errors = run.course("core"), run.course("core_stderr").values
    if not core.values:
        return []
    first = f"; it was {core.values[0]:.4f} at step {core.steps[0]:,}" * (len(core.values) > 1)
    error = f" +- {errors[-1]:.4f}" if errors else ""
    guessing = ", where guessing gives 0"
    return [Sentence(f"CORE is {core.values[-1]:.4f}{error} at step {core.steps[-1]:,}{guessing}{first}.")]


def jumps(run: Run) -> list[Sentence]:
    """Spikes, rollbacks, skipped steps, and how often the gradient was clipped."""
    said = []
    for rolled_back in (False, True):
        if found := sorted({spike.step for spike in run.spikes if spike.rolled_back == rolled_back}):
            shown = ", ".join(f"{step:,}" for step in found[:6]) + (", ..." if len(found) > 6 else "")
            what = f"The loss jumped at {counted(len(found), 'step')} ({shown}); the text of each stands below."
            back = f"A jump of the loss made the run go back {counted(len(found), 'time')}, to step {shown}."
            said.append(Sentence(back if rolled_back else what, True))
    if skipped := int(max(run.course("skipped_steps").values, default=0)):
        why = "for want of a finite gradient, or of a valid token"
        said.append(Sentence(f"{counted(skipped, 'step')} changed nothing, {why}.", True))
    norms, bound = run.course("grad_norm").values, number(run.options, "optimizer.clip_norm")
    if bound and norms and (share := sum(norm > bound for norm in norms) / len(norms)) >= 0.1:
        said.append(
            Sentence(f"The gradient was clipped to a norm of {bound:g} at {percent(share)} of the logged steps.")
        )
    return said


def sources(run: Run) -> list[Sentence]:
    """How often the run went through its text."""
    courses = {name: run.course("epochs", name).values for name in run.names("epochs")}
    epochs = {name: values[-1] for name, values in courses.items() if values}
    if not epochs:
        return []
    said = ", ".join(f"{name} {taken:.3g} times" for name, taken in epochs.items())
    again = [name for name, taken in epochs.items() if taken > 1]
    return [Sentence(f"It went through {said}" + (f": rows of {', '.join(again)} came again." if again else "."))]


def speed(run: Run) -> list[Sentence]:
    """Tokens a second, MFU and memory."""
    rates, mfu = run.course("tokens_per_second").values, run.course("mfu").values
    if not rates:
        return []
    of_peak = f", an MFU of {percent(median(mfu))}" if mfu else "; the device's peak is not known, so there is no MFU"
    said = [Sentence(f"It trains on {quantity(median(rates))} tokens a second{of_peak}.")]
    quarter = len(rates) // 4
    if quarter >= 4 and median(rates[-quarter:]) < SLOWER * median(rates[:quarter]):
        early, late = (quantity(median(part)) for part in (rates[:quarter], rates[-quarter:]))
        said.append(
            Sentence(f"It has become slower: {late} tokens a second in its last quarter, {early} before.", True)
        )
    if memory := run.course("peak_memory_bytes").values:
        said.append(Sentence(f"A device held {max(memory) / 2**30:.1f} GiB at most."))
    return said


def time_spent(run: Run) -> list[Sentence]:
    """Where the wall time went."""
    said, spent = [], run.goodput
    if wall := sum(spent.values()):
        rest = sorted(((seconds / wall, part) for part, seconds in spent.items() if part != "steps"), reverse=True)
        parts = ", ".join(f"{part} {percent(share)}" for share, part in rest[:3] if share >= 0.005)
        others = f"; the rest is mostly {parts}" if parts else ""
        steps = f"Steps took {percent(spent['steps'] / wall)} of {duration(wall)} of wall time"
        said.append(Sentence(f"{steps}{others}."))
        lost, down = spent["lost"] / wall, spent["down"] / wall
        if lost + down > WAITING:
            text = f"{percent(lost)} of the wall time went to steps that were done again, {percent(down)} to no process"
            said.append(Sentence(f"{text} (--checkpoint.every_minutes bounds the first).", True))
    if (waits := run.course("data_wait").values) and (waited := mean(waits)) > WAITING:
        workers = f"--data.workers ({run.options.get('data.workers')} now)"
        mend = f"more {workers}, or text on a faster disk, would help"
        said.append(Sentence(f"Waiting for data took {percent(waited)} of the time: {mend}.", True))
    return said


def noise(run: Run) -> list[Sentence]:
    """The batch against the gradient noise scale, by the rule of arXiv:1812.06162: with batch b and noise scale B a
    loss takes 1 + B/b times the fewest possible steps, and 1 + b/B times the fewest possible tokens."""
    measured = lambda name: [line for line in run.lines if number(line, "diagnostics", name) is not None]
    name = "noise_scale" if measured("noise_scale_low") or measured("noise_scale") else "noise_scale_moments"
    lines = measured(f"{name}_low") or measured(name)
    if not lines:
        return []
    line, rough = lines[-1], ", roughly, from AdamW's moments" if name == "noise_scale_moments" else ""
    scale, least, most = (number(line, "diagnostics", f"{name}{end}") for end in ("", "_low", "_high"))
    batch = (run.course("valid_tokens").values or [run.ramp.stage(line["step"] - 1).tokens_per_step])[-1]
    size = f"The batch of {quantity(batch)} tokens is"
    if scale is None or scale <= 0 or (least is not None and most is None):
        if not least or least <= 0:
            return [Sentence("What was measured so far does not give the noise scale.")]
        where = "smaller" if batch < least else "larger: whether it is too large is not known yet"
        at_least = f"The noise scale is at least {quantity(least)} tokens{rough}"
        return [Sentence(f"{at_least}; the batch, {quantity(batch)}, is {where}.")]
    interval = f", between {quantity(least)} and {quantity(most)}" if least is not None and most is not None else ""
    ratio, known = batch / scale, f"the noise scale ({quantity(scale)}{interval}{rough})"
    if ratio >= 2:
        steps, tokens = (1 + 2 / ratio) / (1 + 1 / ratio) - 1, 1 - (1 + ratio / 2) / (1 + ratio)
        cost = f"{percent(steps)} more steps and {percent(tokens)} fewer tokens"
        half = f"half of it would lose little: by arXiv:1812.06162, {cost} for the same loss"
        return [Sentence(f"{size} {ratio:.2g} times {known}: {half}.", True)]
    if ratio <= 0.5:
        steps, tokens = 1 - (1 + 0.5 / ratio) / (1 + 1 / ratio), (1 + 2 * ratio) / (1 + ratio) - 1
        cost = f"{percent(steps)} fewer steps for {percent(tokens)} more tokens"
        return [Sentence(f"{size} {ratio:.2g} times {known}: twice of it would take, by arXiv:1812.06162, {cost}.")]
    return [Sentence(f"{size} {ratio:.2g} times {known}: neither steps nor tokens are wasted.")]


def coherence(run: Run) -> list[Sentence]:
    """How far the micro-batches of a step agree."""
    cosines = run.course("diagnostics", "coherence_running").values
    if not cosines:
        return []
    cosine = median(cosines[-8:])
    if cosine > 0.9:
        meaning = "they say nearly the same, and further micro-batches in a step add little"
    else:
        meaning = "each is mostly noise, which summing them reduces" if cosine < 0.3 else "they agree in part"
    between = "a micro-batch's and the sum of those before it"
    return [Sentence(f"The cosine between gradients, {between}, is {cosine:.2f}: {meaning}.", cosine > 0.9)]


def updates(run: Run) -> list[Sentence]:
    """Sizes of updates against those of their parameters, by group, after the first tenth of the measured steps.

    They come without a verdict: what is usual depends on the group, the optimizer and the network.
    """
    said, shares_of_size = [], {}
    for group in run.names("diagnostics", "groups"):
        if ratios := ratio(run, "groups", group).values:
            shares_of_size[group] = median(ratios[len(ratios) // 10 :])
        shares = run.course("diagnostics", "groups", group, "unchanged_share").values
        if shares and (share := median(shares[-8:])) > UNCHANGED:
            why = "a step changes nothing, since float32 rounds their updates away, or there are none"
            said.append(Sentence(f"In {percent(share)} of the parameters of {group} {why}."))
    if shares_of_size:
        of_each = ", ".join(f"{group} {percent(share)}" for group, share in shares_of_size.items())
        said.insert(0, Sentence(f"A step's update over the size of its parameters, by group (medians): {of_each}."))
    return said


def ratio(run: Run, *place: str) -> Course:
    """Norm of the update over that of the parameters: of ("groups", GROUP) or ("blocks", BLOCK)."""
    found = [
        (line["step"], update / parameter)
        for line in run.lines
        if (update := number(line, "diagnostics", *place, "update_norm")) is not None
        and (parameter := number(line, "diagnostics", *place, "parameter_norm"))
    ]
    return Course([step for step, _ in found], [value for _, value in found])


def counted(count: int, what: str) -> str:
    """1 step, 2 steps."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def quantity(value: float) -> str:
    """A count as people write it: 65,536; 1.23 M; 4.5 B."""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:,.0f}"


def percent(share: float) -> str:
    """A share: 62%, 3.1%, 0.0042%."""
    return f"{100 * share:.0f}%" if abs(share) >= 0.1 else f"{100 * share:.2g}%"


def duration(seconds: float) -> str:
    """As people say it: 45 s, 12 min, 3.4 h, 2.1 days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
