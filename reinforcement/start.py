"""The start and the log of a run of reinforcement, where they differ from a run on text."""

import hashlib
from dataclasses import asdict, dataclass

from configs.schema import Config
from configs.validation import require_steps
from data.dataset import Text
from data.loader import Mixture
from data.tokenizer import TextTokenizer, load_tokenizer
from evaluation.network import require_chat_tokens
from hosts.distributed import check_hosts_agree, on_every_process
from reinforcement.rollouts import answers_of_step, powers_of_two, prompt_of
from reinforcement.tasks import TASKS, Task
from run.init_from import require_same_network
from run.log import MetricsLog
from run.start import begins_from_another
from system.errors import UserError
from system.messages import LOGGER
from training.build import Build, build

TRIED = 64  # questions whose lengths are checked at the start


@dataclass(frozen=True)
class Questions(Text):
    """A task's questions in the place of a text: a run of reinforcement reads no rows."""

    def outlook_message(self, rows: int, length: int) -> str:
        return f"reinforcement on {self.names[0]}"

    def epochs(self, rows: int) -> dict[str, float]:
        return {}


def open_task(config: Config) -> tuple[Build, Text, Task]:
    """Return the run's build, the questions in the place of its text, and its task. Raise UserError for a mistake in
    either."""
    require_steps(config)
    options, length = config.reinforce, config.batch.sequence_length
    rows = -(-answers_of_step(config) // max(length // options.tokens, 1))
    if options.tokens > length:
        raise UserError(f"reinforce.tokens={options.tokens} must fit a row of --batch.sequence_length={length}")
    if config.batch.tokens_per_step < rows * length:
        raise UserError(
            f"--batch.tokens_per_step={config.batch.tokens_per_step} cannot work: a step's {answers_of_step(config)} "
            f"answers need {rows} rows, which is {rows * length}"
        )
    starts_from = begins_from_another(config)

    def opened() -> tuple[TextTokenizer, Task]:
        if starts_from:
            require_same_network(config)
        tokenizer = load_tokenizer(config.data.tokenizer)
        require_chat_tokens(tokenizer)
        task = TASKS[options.task](options, config.seed, config.eval.bundle)
        longest = max(len(prompt_of(tokenizer, task.problem(number, False))) for number in range(TRIED))
        if longest >= options.tokens:
            raise UserError(f"reinforce.tokens={options.tokens} leaves no room: a question has {longest} tokens")
        return tokenizer, task

    tokenizer, task = on_every_process("their task", opened)
    built = build(config)
    if starts_from:
        LOGGER.info(f"starting from the network in {config.init_from}")
    facts = [asdict(options), config.seed, task.problem(0, False), task.problem(0, True)]
    fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    check_hosts_agree("their task", fingerprint)
    return built, Questions([options.task], [], [], Mixture([]), tokenizer, tokenizer.bos, fingerprint, 0), task


class RewardLog(MetricsLog):
    """The log of a run of reinforcement. Its loss is no measure: it compares answers with each other."""

    SCORE, SIGN = "pass_at_1", -1

    def shown(self, line: dict) -> str:
        return f"reward {line['reward']:.3f}"

    def evaluation(self, step: int, results: dict) -> None:
        """Write the results of an evaluation on held-out questions."""
        self.write(step, results)
        self.scores[step] = self.SIGN * results[self.SCORE]
        most = powers_of_two(self.config.reinforce.samples)[-1]

        def with_interval(name: str) -> str:
            interval = results[f"{name}_interval"]
            return f"{results[name]:.3f} ({interval['low']:.3f} to {interval['high']:.3f})"

        LOGGER.info(
            f"step {step}: greedy accuracy {with_interval('greedy_accuracy')}, pass@1 {with_interval('pass_at_1')}, "
            f"pass@{most} {with_interval(f'pass_at_{most}')}"
        )

    def _report_spike(self, step: int, loss: float) -> None:
        """Report nothing: advantages sum to zero, so a loss has no size."""

    def _count_skipped(self, step: int, values: dict) -> None:
        """Report a step whose advantages are all 0. It is no failure, however many follow each other."""
        if values["valid_tokens"]:
            super()._count_skipped(step, values)
            return
        self.skipped = values["skipped_steps"]
        LOGGER.warning(f"step {step} changed nothing: each question's answers have one reward")
