"""Make questions in ChatCORE's schemas, and a network that calls the calculator."""

import random
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from data.prepare.selection import train_tokenizer
from data.tokenizer import TextTokenizer
from run.network import Network
from tests.evaluation import core_bundle
from tests.evaluation.core_bundle import CONFIG, LONGEST, network_of, words

FOLDERS = {"ARC-Easy": "arc/ARC-Easy", "ARC-Challenge": "arc/ARC-Challenge", "MMLU": "mmlu/all", "GSM8K": "gsm8k/main"}
FOLDERS |= {"HumanEval": "humaneval/openai_humaneval"}


def columns(label: str) -> dict[str, list]:
    """Return a task's columns as on the hub, with the same words each time."""
    rng = random.Random(label)
    some = lambda least, most: " ".join(rng.choices(words(), k=rng.randint(least, most)))
    rows = []
    for i in range(9):
        if label == "GSM8K":
            problem = {"question": some(3, 30) + "?", "answer": f"It is <<1+2=3>>3.\n#### {[3, 1_000][i % 3 == 0]:,}"}
            rows.append(problem | ({"question": some(200, 200)} if i == 8 else {}))  # longer than the row
        elif label == "HumanEval":
            problem = {
                "prompt": f'def first(xs):\n    """{some(3, 9)}"""\n',
                "canonical_solution": "    return xs[0]\n",
            }
            test = "def check(candidate):\n    assert candidate([7, 8]) == 7\n"
            rows.append(problem | {"test": test, "entry_point": "first"})
        elif label == "MMLU":
            choices = [some(1, 4) for _ in "ABCD"]
            rows.append({"question": some(3, 40), "subject": "", "choices": choices, "answer": rng.randrange(4)})
        else:
            letters = [*(["ABCD", "ABCDE", "1234", "ABC"][i % 4])]
            choices = {"text": [some(1, 4) for _ in letters], "label": letters}
            rows.append({"question": some(3, 40), "choices": choices, "answerKey": rng.choice(letters)})
    return {name: [row[name] for row in rows] for name in rows[0]}


def make_sets(folder: Path) -> Path:
    """Write the sets that read_chat_tasks reads."""
    for label, inside in FOLDERS.items():
        (folder / inside).mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.table(columns(label)), folder / inside / "test-00000-of-00001.parquet")
    return folder


@cache
def tokenizer() -> TextTokenizer:
    """Return a tokenizer with a token for ####."""
    return train_tokenizer([" ".join(words()), "#### 3\n" * 999], CONFIG.vocab_size)


def params() -> dict:
    """Return the parameters of the tests of CORE, with a head that answers <|python_start|>1+2<|python_end|>, and ####
    3 after the calculator's output."""
    params, special = core_bundle.params(), tokenizer().special_tokens
    spelled = lambda *names: [special[name] if name in special else tokenizer().encode([name])[0][0] for name in names]
    chains = [
        spelled("<|assistant_start|>", "<|python_start|>", "1", "+", "2", "<|python_end|>", "<|assistant_end|>"),
        spelled("<|output_end|>", "####", " ", "3", "<|assistant_end|>"),
    ]
    table, head = np.asarray(params["embed"]["table"]), np.array(params["lm_head"]["kernel"])
    head[:, tokenizer().encode(["3"])[0]] *= 0.7  # some answers are 3, others 33...
    for chain in chains:
        for token, following in pairwise(chain):
            head[:, following] += 5 * table[token] / np.linalg.norm(table[token])
    params["lm_head"]["kernel"] = head
    return params


def network(devices: int = 1) -> Network:
    return network_of(CONFIG, params(), tokenizer(), LONGEST, devices)
