"""Improves a network that answers, by reinforcement: python reinforce.py --config=configs/reinforce.py --init_from=RUN

RUN is one of configs/chat.py, or another with the tokens of conversations. Its network, row, tokenizer and
optimizer are followed, as configs/chat.py does, but for the rates and the moments.

The recipe is nanochat's chat_rl: 0.05 of pretraining's rates, which fall to 0, and no weight decay.
docs/reinforcement.md has what it reaches.
"""

from math import ceil

from configs import chat
from configs.schema import Config, ReinforceConfig, with_options
from system.errors import UserError

ROWS = 8  # a multiple of rows divides over micro-batches and devices
TOKENS = {"sums": 14, "gsm8k": 768}
"""Each task's most tokens of a question with its answer."""
TOKENS_OF_DIGIT = 14
"""More tokens for each digit that `difficulty` allows in `sums`."""


def get_config() -> Config:
    values: dict[str, object] = {"name": "reinforce", "steps": 60, "batch.rows_per_device": ROWS}
    values |= {"optimizer.rate_factor": 0.0625}  # of a run of configs/chat.py, which has 0.8 of pretraining's rates
    values |= {"optimizer.schedule.warmdown": 1.0, "log.every_steps": 1}
    values |= {"checkpoint.every_steps": 20, "eval.every_steps": 20}
    return with_options(chat.get_config(), values)


def derive(config: Config, given: set[str]) -> Config:
    """Return the config for the run in `init_from`. Raise UserError if it is empty or no run."""
    if not config.init_from:
        raise UserError(
            "--init_from is missing: configs/reinforce.py improves a network that answers; --init_from=runs/chat is "
            "the one from `make chat`"
        )
    options = config.reinforce
    config = chat.derive(config, given | {"batch.tokens_per_step", "init_optimizer"})
    length = config.batch.sequence_length
    tokens = min(options.tokens or tokens_of(options), length)
    values: dict[str, object] = {"reinforce.tokens": tokens}
    if "batch.tokens_per_step" not in given:
        rows = options.prompts * options.samples / max(length // tokens, 1)
        values["batch.tokens_per_step"] = ceil(rows / ROWS) * ROWS * length
    return with_options(config, values)


def tokens_of(options: ReinforceConfig) -> int:
    """Return the most tokens of a question of the task with its answer. Raise UserError for a task without them."""
    if options.task not in TOKENS:
        raise UserError(
            f"--reinforce.task={options.task}: TOKENS in configs/reinforce.py has no most tokens of a question with "
            f"its answer for this task; it has {', '.join(TOKENS)}"
        )
    return TOKENS[options.task] + (TOKENS_OF_DIGIT * options.difficulty if options.task == "sums" else 0)
