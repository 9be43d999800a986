"""What a run of reinforcement learns from: the questions of a task."""

import hashlib
from dataclasses import asdict, dataclass
from typing import ClassVar

from data.conversation import render, require_chat_tokens
from data.tokenizer import TextTokenizer, load_tokenizer
from hosts.distributed import check_hosts_agree, on_every_process
from options.schema import Config
from options.validation import require_steps
from reinforcement.tasks import TASKS, Problem, Task
from run.folder import RunFolder
from run.init_from import origin_of, require_same_network
from system.errors import UserError
from system.messages import LOGGER
from training.build import Build, build

TRIED = 64  # questions whose lengths are checked at the start


@dataclass(frozen=True)
class Questions:
    """A task, and the tokenizer of the network that answers its questions."""

    name: str
    task: Task
    tokenizer: TextTokenizer
    fingerprint: str
    row_order: ClassVar[int] = 0

    def outlook_message(self, rows: int, length: int, tokens: int, mixture: None) -> str:
        """Return a line on the task."""
        return f"reinforcement on {self.name}"


def open_questions(config: Config, folder: RunFolder) -> tuple[Build, Questions]:
    """Return the run's build, and its questions. Raise UserError for a mistake in either. Every process must call
    it."""
    require_steps(config)
    require_room_for_answers(config)
    options = config.reinforce
    origin = origin_of(config, folder)

    def opened() -> tuple[TextTokenizer, Task]:
        if origin:
            require_same_network(config, origin)
        tokenizer = load_tokenizer(config.data.tokenizer)
        require_chat_tokens(tokenizer)
        task = TASKS[options.task](options, config.seed, config.eval.bundle)
        longest = max(len(prompt_of(tokenizer, task.problem(number, False))) for number in range(TRIED))
        if longest >= options.tokens:
            raise UserError(f"reinforce.tokens={options.tokens} leaves no room: a question has {longest} tokens")
        return tokenizer, task

    tokenizer, task = on_every_process("their task", opened)
    built = build(config)
    if origin:
        LOGGER.info(f"starting from the network in {origin}")
    facts = [asdict(options), config.seed, task.problem(0, False), task.problem(0, True)]
    fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    check_hosts_agree("their task", fingerprint)
    return built, Questions(options.task, task, tokenizer, fingerprint)


def require_room_for_answers(config: Config) -> None:
    """Raise UserError if a row has no room for an answer, or a step for all of them."""
    options, length = config.reinforce, config.batch.sequence_length
    if options.tokens > length:
        raise UserError(f"reinforce.tokens={options.tokens} must fit a row of --batch.sequence_length={length}")
    rows = -(-answers_of_step(config) // (length // options.tokens))
    if config.batch.tokens_per_step < rows * length:
        raise UserError(
            f"--batch.tokens_per_step={config.batch.tokens_per_step} cannot work: a step's {answers_of_step(config)} "
            f"answers need {rows} rows, which is {rows * length}"
        )


def prompt_of(tokenizer: TextTokenizer, problem: Problem) -> list[int]:
    """Return the tokens of a question, up to the place of its answer."""
    return render(tokenizer, [{"role": "user", "content": problem.question}], ask=True)


def answers_of_step(config: Config) -> int:
    """Return the number of answers of a step."""
    return config.reinforce.prompts * config.reinforce.samples
