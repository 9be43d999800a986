"""Tasks for reinforcement: questions whose answers can be checked. An answer ends with #### and a number, as in GSM8K.

python -m reinforcement.tasks [TASK] > sums.jsonl prints conversations to fine-tune on before, by default of `sums`. One
in three of these calls the calculator, so a network learns two ways to answer.
"""

import argparse
import json
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from data.conversation import Message
from evaluation.chat_core import number_of, read_items
from options.schema import ReinforceConfig
from system.errors import UserError

UNITS = "zero,one,two,three,four,five,six,seven,eight,nine,ten,eleven,twelve,thirteen,fourteen,fifteen,sixteen"
UNITS += ",seventeen,eighteen,nineteen"
TENS = "twenty,thirty,forty,fifty,sixty,seventy,eighty,ninety"


class Problem(NamedTuple):
    """A question, and the number that is its answer."""

    question: str
    answer: str


class Task:
    """A source of problems, to learn from or held out: problem `number` is a function of the seed."""

    def __init__(self, options: ReinforceConfig, seed: int, bundle: str):
        self.options, self.seed = options, seed

    def problem(self, number: int, held_out: bool) -> Problem:
        raise NotImplementedError

    def reward(self, problem: Problem, text: str) -> float:
        """Return the reward of an answer, whose text has its special tokens."""
        return float(number_of(text) == problem.answer)


class Sums(Task):
    """Additions asked in words, of numbers of at most `difficulty` digits. A tenth of the pairs is held out."""

    def pair(self, number: int, held_out: bool) -> tuple[int, int]:
        """Return the numbers of a problem."""
        generator = np.random.default_rng([self.seed, number, held_out])
        while True:
            a, b = generator.integers(10**self.options.difficulty, size=2).tolist()
            if (crc32(f"{a}+{b}".encode()) % 10 == 0) == held_out:
                return a, b

    def problem(self, number: int, held_out: bool) -> Problem:
        a, b = self.pair(number, held_out)
        return Problem(f"What is {in_words(a)} plus {in_words(b)}?", str(a + b))

    def conversation(self, number: int) -> list[Message]:
        """Return a problem to learn from, with its answer."""
        (a, b), (question, result) = self.pair(number, False), self.problem(number, False)
        call: list[Message] = [{"type": "python", "text": f"{a}+{b}"}, {"type": "python_output", "text": result}]
        answer = [*call * (number % 3 == 0), {"type": "text", "text": f"#### {result}"}]
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


class GSM8K(Task):
    """GSM8K (arXiv:2110.14168) in the folder of ChatCORE's bundle: `train` to learn from, `test` held out."""

    def __init__(self, options: ReinforceConfig, seed: int, bundle: str):
        super().__init__(options, seed, bundle)
        if not bundle:
            raise UserError("--reinforce.task=gsm8k needs --eval.bundle=DIR, with gsm8k/ in it (docs/evaluation.md)")
        self.parts = [read_items(bundle, "GSM8K", part) for part in ("train", "test")]

    def problem(self, number: int, held_out: bool) -> Problem:
        items = self.parts[held_out]
        epoch, place = divmod(number, len(items))
        item = items[np.random.default_rng([self.seed, epoch]).permutation(len(items))[place]]
        return Problem(item["messages"][0]["content"], item["gold"])


TASKS: dict[str, type[Task]] = {"sums": Sums, "gsm8k": GSM8K}


def in_words(number: int) -> str:
    """Return a number below a million in words."""
    if number < 20:
        return UNITS.split(",")[number]
    if number < 100:
        return TENS.split(",")[number // 10 - 2] + (f"-{in_words(number % 10)}" if number % 10 else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    return f"{in_words(number // size)} {name}" + (f" {in_words(number % size)}" if number % size else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m reinforcement.tasks", description="Print conversations of a task.")
    known = [name for name, kind in TASKS.items() if hasattr(kind, "conversation")]
    parser.add_argument("task", nargs="?", default="sums", choices=known)
    task: Any = TASKS[parser.parse_args().task](ReinforceConfig(), 0, "")
    for number in range(4000):
        print(json.dumps(task.conversation(number)))
