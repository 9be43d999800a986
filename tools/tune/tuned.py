"""tuned.py: a config that train.py takes, made of what the stages decided."""

import time
from collections.abc import Sequence
from typing import Any

from configs.files import write_whole
from configs.schema import Config, options, with_options
from tools.tune.branch import fitting
from tools.tune.tune_json import Record
from training.scaling import with_batch, with_rates


def tuned(config: Config, record: Record, devices: Sequence[Any] | None) -> Config:
    """The config with what was decided: of speed as it was timed, else as it fits; the rates' factor; and the batch's,
    as `branch` measured it."""
    decided: dict[str, Any] = {}
    for decision in record.decisions.values():  # of a later stage, over an earlier one's
        decided |= decision.options
    factor, rule, rates = decided.pop("batch", 1.0), decided.pop("rule", "root"), decided.pop("rate", 1.0)
    changed = with_batch(with_rates(with_options(config, decided), rates), factor, rule)
    return fitting(changed, devices) or changed


def source(config: Config, result: Config, record: Record, command: str) -> str:
    """The file's text. Every option that is not the schema's default stands in it, those that were tuned apart."""
    name = f"{config.name}-tuned"
    default, before, after = options(Config(name=name)), options(config), options(result)
    hidden = ("name", "run_dir", "resume")
    same = {key: value for key, value in after.items() if value == before[key] and value != default[key]}
    new = {key: value for key, value in after.items() if value != before[key]}
    decisions = [f"{made.stage} ({made.kind}): {made.says}" for made in record.decisions.values()]
    says = "\n".join(decisions).replace("\\", "/").replace('"""', "'''")
    lines = [
        f'"""{config.name}, as tools.tune would have it ({time.strftime("%Y-%m-%d")}).',
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
    """Writes tuned.py beside tune.json, for all devices here, or those given."""
    result = tuned(config, record, devices)
    write_whole(record.path.with_name("tuned.py"), source(config, result, record, command))
