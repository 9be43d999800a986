"""ChatCORE: a network's knowledge in conversations, as measured by nanochat's scripts/chat_eval.py.

ARC and MMLU are questions with letters: the likeliest letter as the answer's first token is chosen. GSM8K's answers are
written, with the calculator, and right if the number after #### is. HumanEval's answers are programs, and right if they
pass their problem's test. The items are the hub's files in a folder.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow
import pyarrow.parquet

from data.conversation import render, require_chat_tokens
from data.prepare.chat_formats import FORMATS, Row, multiple_choice, of_gsm8k, of_mmlu
from evaluation.core import Core, Task
from evaluation.execution import succeeds
from evaluation.scorer import Question, Scorer
from generation.engine import Engine
from hosts.distributed import on_first_process
from model.sampling import Sampling
from run.network import Network
from system.errors import UserError
from system.progress import progress
from training.mesh import batch_devices

NEW_TOKENS = 512  # most tokens of a written answer
CODE = re.compile(r"```(?:python)?\s*\n(.*?)\n```", re.DOTALL)
NUMBER = re.compile(r"#### (-?[0-9.,]+)")


def arc_item(row: Row) -> dict[str, Any]:
    letters, answer = row["choices"]["label"], row["answerKey"]
    question = multiple_choice(row["question"], letters, row["choices"]["text"])
    messages = [question, {"role": "assistant", "content": answer}]
    return {"messages": messages, "letters": letters, "gold": letters.index(answer)}


def mmlu_item(row: Row) -> dict[str, Any]:
    return {"messages": of_mmlu(row), "letters": list("ABCD"), "gold": row["answer"]}


def gsm8k_item(row: Row) -> dict[str, Any]:
    messages = of_gsm8k(row)
    if (number := number_of(messages[-1]["content"][-1]["text"])) is None:
        raise ValueError("no number after ####")
    return {"messages": messages, "gold": number}


def human_eval_item(row: Row) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": f"{row['prompt']}\n{row['canonical_solution']}"},
    ]
    return {"messages": messages, "test": row["test"], "entry_point": row["entry_point"]}


ARC_COLUMNS = ("question", "choices", "answerKey")
CODE_COLUMNS = ("prompt", "canonical_solution", "test", "entry_point")
SETS: dict[str, tuple[str, tuple[str, ...], Callable[[Row], dict[str, Any]], str]] = {
    "ARC-Easy": ("arc/ARC-Easy/test*", ARC_COLUMNS, arc_item, "letters"),
    "ARC-Challenge": ("arc/ARC-Challenge/test*", ARC_COLUMNS, arc_item, "letters"),
    "MMLU": ("mmlu/all/test*", FORMATS["MMLU"][0], mmlu_item, "letters"),
    "GSM8K": ("gsm8k/main/test*", FORMATS["GSM8K"][0], gsm8k_item, "number"),
    "HumanEval": ("humaneval/openai_humaneval/test*", CODE_COLUMNS, human_eval_item, "program"),
}
"""Each task's files, their columns, the function from a row to an item, and its kind."""
BASELINES = {"letters": 0.25, "number": 0.0, "program": 0.0}
"""The accuracy of guessing, as in nanochat."""
WITHOUT_PROGRAMS = tuple(label for label, (_, _, _, kind) in SETS.items() if kind != "program")


def read_chat_tasks(folder: str, items: int | None, labels: Sequence[str] = tuple(SETS)) -> list[Task]:
    """Return the tasks of a folder, each with all of its items or the first `items`, in nanochat's order. Raise
    UserError, naming the file or row, for anything missing or of another schema."""
    return [_read_task(folder, label, items) for label in labels]


def _read_task(folder: str, label: str, items: int | None) -> Task:
    kind, made = SETS[label][-1], read_items(folder, label)
    if not made:
        raise UserError(f"{folder}/{SETS[label][0]} has no item of {label}")
    order = np.random.default_rng(42).permutation(len(made))[:items]
    return Task(label, kind, 0, "", BASELINES[kind], [made[place] for place in order])


def read_items(folder: str, label: str, part: str = "test") -> list[dict[str, Any]]:
    """Return a set's items: of its test, or of another part. Raise UserError as `read_chat_tasks`."""
    files, columns, item_of, _ = SETS[label]
    files = files.replace("test", part)
    paths = sorted(Path(folder).glob(files))
    if not paths:
        raise UserError(f"the bundle {folder} has no file {files}; docs/evaluation.md says how to download it")
    try:
        rows = [row for path in paths for row in pyarrow.parquet.read_table(path, columns=[*columns]).to_pylist()]
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{folder}/{files} cannot be read with the columns {', '.join(columns)}: {error}") from error
    made = []
    for number, row in enumerate(rows, 1):
        try:
            made.append(item_of(row))
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(f"{folder}/{files}: row {number} is no item of {label} ({error!r})") from error
    return made


def program_of(item: dict[str, Any], answer: str) -> str:
    """Return the program that ends without an exception if an answer is right: the imports that a problem of HumanEval
    begins with, the answer's first block of code (or all of it), and the problem's test."""
    imports = []
    for line in item["messages"][0]["content"].split("\n"):
        if line.strip().startswith(("import ", "from ")):
            imports.append(line.strip())
        elif line.strip() and not line.strip().startswith("#"):
            break
    block = CODE.search(answer)
    code = (block[1] if block else answer).strip()
    return "\n".join([*imports, "", code, "", item["test"], f"check({item['entry_point']})"])


def number_of(text: str) -> str | None:
    """Return the number after ####, without commas; None if there is none."""
    match = NUMBER.search(text)
    return match[1].replace(",", "") if match else None


class ChatCore(Core):
    """ChatCORE on a mesh. Called with the network's parameters, it returns `figures`."""

    def __init__(self, name: str, tasks: Sequence[Task], network: Network, scorer: Scorer):
        """Raise UserError for a tokenizer that cannot encode the conversations, or a letter as one token."""
        require_chat_tokens(network.tokenizer)
        super().__init__(name, tasks, network.tokenizer, scorer)
        self.network = network
        letters = sorted({letter for task in tasks for item in task.items for letter in item.get("letters", ())})
        self.letters = dict(zip(letters, network.tokenizer.encode(letters)))
        if several := [letter for letter, ids in self.letters.items() if len(ids) != 1]:
            raise UserError(f"the tokenizer takes several tokens for {', '.join(several)}; an answer is one token")

    def answered(self, params: dict, task: Task, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
        return (super().answered if task.kind == "letters" else self.written)(params, task, indices)

    def prompt(self, task: Task, index: int) -> list[int]:
        """Return the tokens of an item's question."""
        return render(self.tokenizer, task.items[index]["messages"][:-1], ask=True)

    def questions(self, task: Task, indices: Sequence[int]) -> list[Question]:
        """Return items whose options are the letters. A longer prompt loses its end, as nanochat's."""
        made = []
        for index in indices:
            prompt = self.prompt(task, index)
            kept = [*prompt[: self.scorer.longest - 1], prompt[-1]] if len(prompt) > self.scorer.longest else prompt
            rows = [np.array([*kept, *self.letters[letter]], np.int32) for letter in task.items[index]["letters"]]
            spans = [(len(kept), len(kept) + 1)] * len(rows)
            made.append(Question(index, rows, spans, len(prompt) - len(kept)))
        return made

    def written(self, params: dict, task: Task, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield the lines of items as their greedy answers end. A question that leaves no room in the row is wrong."""
        together = self.network.config.batch.rows * batch_devices(self.network.sharded.mesh)  # as rows in training
        engine = Engine(replace(self.network, params=params), min(together, len(indices)))
        prompts = {index: self.prompt(task, index) for index in indices}
        fit = [index for index, prompt in prompts.items() if len(prompt) < engine.capacity]
        yield from (
            self.line(task, index, [], cut=True) for index, prompt in prompts.items() if len(prompt) >= engine.capacity
        )
        answers = engine.answers([(prompts[index], Sampling(temperature=0.0), NEW_TOKENS) for index in fit])
        hidden = jax.process_index() > 0
        bar = progress(answers, total=len(fit), unit="answers", desc="writing", leave=False, disable=hidden)
        for place, answer in bar:
            yield self.line(task, fit[place], answer.tokens, cut=answer.finished == "length")

    def line(self, task: Task, index: int, tokens: Sequence[int], cut: bool) -> dict[str, Any]:
        """Return the line of a written answer."""
        text = self.tokenizer.library.decode(list(tokens), skip_special_tokens=False)  # as in nanochat
        item = task.items[index]
        if task.kind == "program":
            result = {"correct": on_first_process(lambda: succeeds(program_of(item, text)))}
        else:
            number = number_of(text)
            result = {"correct": number == item["gold"], "number": number, "gold": item["gold"]}
        return {
            **{"task": task.label, "item": index, **result},
            **{"text": text, "tokens": len(tokens), "tie": False, "cut": int(cut), "unscored": 0},
        }
