"""Write invented run folders, as train.py would leave them."""

import dataclasses
import json
import math
import random
from pathlib import Path

from options.schema import BatchConfig, Config, DataConfig

GROUPS = ("embed", "lm_head", "matrices")
BEGAN = 1_800_000_000.0


def write_run(
    folder: Path,
    *,
    name: str = "made-up",
    logged: int | None = None,
    diagnostics: bool = True,
    complete: bool = True,
    slope: float = 1.0,
    batch: int = 65_536,
    length: int = 2048,
    data: DataConfig | None = None,
    line: dict | None = None,
) -> Path:
    """Write a run of `logged` of its 400 steps, with a line every ten. `line` overrides fields of each logged line."""
    steps = 400
    folder.mkdir(parents=True)
    config = Config(name=name, steps=steps, batch=BatchConfig(length, batch), data=data or DataConfig())
    devices = {"kind": "NVIDIA H200", "count": 8, "processes": 1}
    versions = {"python": "3.12.1", "jax": "0.12.0.1"}
    record = {"config": dataclasses.asdict(config), "dataset": "5220a8abef52476f", "versions": versions}
    (folder / "config.json").write_text(json.dumps(record | {"devices": devices, "changes": []}))
    chance, lines, last = random.Random(0), [], steps if logged is None else logged
    loss_at = lambda step: 3.2 + 5.1 * math.exp(-slope * 6 * step / steps)
    for step in range(0, last + 1, 10):
        tokens, when = step * batch, {"time": BEGAN + 30 + step}
        noise = 4000 + 60 * step
        if step:
            loss = loss_at(step) + chance.gauss(0, 0.04)
            lines.append(
                {"step": step, "tokens": tokens, "loss": loss, "grad_norm": 1.5 / math.sqrt(step) + 0.2}
                | {"grad_norms": {group: (i + 1) / math.sqrt(step) / 3 for i, group in enumerate(GROUPS)}}
                | {"learning_rate": dict.fromkeys(GROUPS, 0.01 * (1 - step / steps) + 1e-4)}
                | {"epochs": {"web": step / steps / 2, "code": 1.5 * step / steps}}
                | {"valid_tokens": batch, "skipped_steps": 0, "data_wait": 0.01, "mfu": 0.41 + chance.gauss(0, 0.004)}
                | {"tokens_per_second": batch * (1 + chance.gauss(0, 0.01)), "seconds": float(step), **when}
                | (line or {})
            )
            if diagnostics:
                lines.append({"step": step, "tokens": tokens, "diagnostics": _diagnostics(step, noise, chance), **when})
        if step % 50 == 0:
            val = loss_at(step) + 0.03
            samples = [f"The {step}th sample <b>is</b> text.", "def main():\n    return 0"]
            lines.append(
                {"step": step, "tokens": tokens, "val_loss": val, "val_bpb": val / 2.46, "samples": samples, **when}
            )
        if step == 200:
            texts = ["for k in </script><script>alert(1)</script>", "0x00 " * 60]
            facts = {"loss": 6.1, "median": 3.9, "batch": 204, "rows": [[0, 17], [0, 4]], "texts": texts}
            lines.append({"step": step + 5, "spike": facts, **when})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    events: list[dict] = [{"event": "start", "step": 0, "tokens": 0, "tokens_per_step": batch}]
    if complete:
        events.append({"event": "stop", "step": last, "code": 0})
    stamped = ({**event, "time": BEGAN + 30 + event["step"]} for event in events)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in stamped))
    if complete:
        summary = {"steps": steps, "tokens": steps * batch, "seconds": float(steps)}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _diagnostics(step: int, noise: float, chance: random.Random) -> dict:
    """Return diagnostics as in training/diagnostics.py."""
    norms = {"gradient_norm": 0.1 + 1 / step, "parameter_norm": 20.0}
    return {
        "signal": {"all": 1e-4 * (1 + chance.gauss(0, 0.2))},
        "noise": {"all": 1e-4 * noise},
        "coherence_running": 0.7 * math.exp(-step / 100) + 0.2 + chance.gauss(0, 0.01),
        "clipped": 0.1,
        "groups": {
            group: norms
            | {"update_norm": (0.02, 0.6, 0.03)[i] * (1.1 - step / 400)}
            | {"snr": 0.3 + 0.1 * i, "unchanged_share": 0.25 if group == "embed" else 0.001}
            for i, group in enumerate(GROUPS)
        },
    }
