"""Count the right answers to held-out questions: python -m bench.answers --run_dir=runs/chat

Each of the first held-out conversations asks one question, after its true turns before. The greedy answer is right if
it has the words of the true one. A true answer of more than three words must be met by half: an F1 of words of 0.5 or
more (arXiv:1606.05250). The last line has the share of right answers, and its interval of 95%.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from data.dataset_folder import open_dataset
from data.prepare.chat_stdlib import GREETING, THANKS
from generation.engine import Engine
from hosts.runtime import run_command, start_jax
from model.sampling import Sampling
from options.command_line import parse_arguments
from options.schema import AnyPath, MeshConfig, Positive
from reinforcement.rollouts import figures_of
from run.network import Network, open_network
from system.files import cache_dir
from training.mesh import mesh_of_first

POLITE = {GREETING[1], THANKS[1]}  # answers that say nothing about the library
SHORT = 3  # words of a true answer that must be met completely


@dataclass(frozen=True)
class Arguments:
    """Count the right answers to held-out questions."""

    run_dir: AnyPath
    """Folder of a run of conversations."""
    questions: Positive[int] = 100
    """Held-out questions."""
    tokens: Positive[int] = 128
    """Most tokens of an answer."""


def held_out_questions(network: Network, tokens: int) -> Iterator[tuple[list[int], str]]:
    """Yield a question's tokens, with the turns before it, and its true answer, for each held-out conversation that
    leaves room for `tokens` tokens of an answer."""
    config, tokenizer = network.config, network.tokenizer
    dataset = open_dataset(config.data.source, config.data, config.model.vocab_size, cache_dir())
    stream, starts = dataset.stream("val"), dataset.document_starts("val")
    begin, end = (tokenizer.special_tokens[name] for name in ("<|assistant_start|>", "<|assistant_end|>"))
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(stream)])):
        ids = stream.read(int(start), int(stop))
        turns = list(zip(np.flatnonzero(ids == begin), np.flatnonzero(ids == end)))
        first, last = turns[number % len(turns)]
        truth = tokenizer.decode(ids[first + 1 : last].tolist())
        if truth not in POLITE and first + 1 + tokens <= config.batch.sequence_length:
            yield ids[: first + 1].tolist(), truth


def is_right(answer: str, truth: str) -> bool:
    """Compare the words of an answer with those of the true one."""
    words, true = (Counter(re.findall(r"\w+", text.lower())) for text in (answer, truth))
    if true.total() <= SHORT:
        return words == true
    return 4 * (words & true).total() >= words.total() + true.total()  # an F1 of 0.5


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    start_jax()
    network = open_network(arguments.run_dir, mesh_of_first(MeshConfig(data=1)))
    asked = list(islice(held_out_questions(network, arguments.tokens), arguments.questions))
    right = np.zeros(len(asked))
    wanted = [(question, Sampling(0.0), arguments.tokens) for question, _ in asked]
    for number, answer in Engine(network, slots=16).answers(wanted):
        (question, truth), text = asked[number], network.tokenizer.decode(answer.tokens)
        right[number] = is_right(text, truth)
        shown = network.tokenizer.decode(question[-30:])
        print(f"{'right' if right[number] else 'wrong'}: ...{shown!r} -> {text[:100]!r} (true: {truth[:100]!r})")
    print(figures_of("right", right))
    return 0


if __name__ == "__main__":
    run_command(main)
