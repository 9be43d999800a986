"""When something that a run does every so many steps is due."""

from options.schema import Config


def is_due(step: int, every: int) -> bool:
    """Return whether something that happens every `every` steps (0: never), and before the first, is due at `step`."""
    return every > 0 and step % every == 0


def is_logged(step: int, config: Config) -> bool:
    """Return whether metrics.jsonl has a line of a step's metrics."""
    return is_due(step, config.log.every_steps) or step == config.steps
