"""Write tuned.py: a config for train.py with the stages' decisions."""

import time
from collections.abc import Sequence
from typing import Any

from configs.files import write_whole
from configs.schema import Config, options, with_options
from tools.tune.branch import fitting
from tools.tune.tune_json import Record
from training.schedule import with_batch, with_rates


def tuned(config: Config, record: Record, devices: Sequence[Any] | None) -> Config:
    """Return the config with the decisions: options of speed by `time`, otherwise by `fit`; the factor of the rates;
    and the batch that `branch` chose."""
    decided: dict[str, Any] = {}
    for decision in record.decisions.values():  # a later stage's replace an earlier one's
        decided |= decision.options
    factor, rule, rates = decided.pop("batch", 1.0), decided.pop("rule", "root"), decided.pop("rate", 1.0)
    changed = with_batch(with_rates(with_options(config, decided), rates), factor, rule)
    return fitting(changed, devices) or changed


def source(config: Config, result: Config, record: Record, command: str) -> str:
    """Return the file's text. It lists every option that differs from the schema's default; tuned ones separately."""
    name = f"{config.name}-tuned"
    default, before, after = options(Config(name=name)), options(config), options(result)
    hidden = ("name", "run_dir", "resume")
    same = {key: value for key, value in after.items() if value == before[key] and value != default[key]}
    new = {key: value for key, value in after.items() if value != before[key]}
    decisions = [f"{made.stage} ({made.kind}): {made.says}" for made in record.decisions.values()]
    says = "\n".join(decisions).replace("\\", "/").replace('"""', "'''")
    lines = [
        f'"""{config.name}, as tools.tune chose it ({time.strftime("%Y-%m-%d")}).',
        "",
        f"{command}",
        "",
        *says.splitlines(),
        '"""',
        "",
        "# ruff: noqa: E501",
        "from configs.schema import Config, with_options",
        "",
        "CONFIG = {",
        *(f"    {key!r}: {value!r}," for key, value in same.items() if key not in hidden),
        "}",
        "TUNED = {",
        *(f"    {key!r}: {value!r},  # it was {before[key]!r}" for key, value in new.items()),
        "}",
        "",
        "",
        "def get_config() -> Config:",
        f"    return with_options(Config(name={name!r}), CONFIG | TUNED)",
        "",
    ]
    return "\n".join(lines)


def write(config: Config, record: Record, command: str, devices: Sequence[Any] | None) -> None:
    """Write tuned.py next to tune.json, for all devices here or those given."""
    result = tuned(config, record, devices)
    write_whole(record.path.with_name("tuned.py"), source(config, result, record, command))
