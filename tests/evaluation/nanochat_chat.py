"""Make questions in ChatCORE's schemas, and a network that calls the calculator, and answer them with nanochat. As a
program, write nanochat's answers, item by item, to nanochat_chat.json.

NANOCHAT_DIR=... python -m tests.evaluation.nanochat_chat
"""

import importlib
import json
import random
import re
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow
import pyarrow.parquet

from data.tokenizer import TextTokenizer, train_tokenizer
from evaluation.network import Network
from tests.evaluation import core_bundle
from tests.evaluation.core_bundle import CONFIG, LONGEST, words
from tests.evaluation.nanochat_core import their_network
from tests.nanochat_checkout import import_nanochat
from training.state import abstract_params, stored_as

RESULTS = Path(__file__).with_name("nanochat_chat.json")
FOLDERS = {"ARC-Easy": "arc/ARC-Easy", "ARC-Challenge": "arc/ARC-Challenge", "MMLU": "mmlu/all", "GSM8K": "gsm8k/main"}


def columns(label: str) -> dict[str, list]:
    """Return a task's columns as on the hub, with the same words each time."""
    rng = random.Random(label)
    some = lambda least, most: " ".join(rng.choices(words(), k=rng.randint(least, most)))
    rows = []
    for i in range(9):
        if label == "GSM8K":
            problem = {"question": some(3, 30) + "?", "answer": f"It is <<1+2=3>>3.\n#### {[3, 1_000][i % 3 == 0]:,}"}
            rows.append(problem | ({"question": some(200, 200)} if i == 8 else {}))  # longer than the row
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
    like = core_bundle.network(devices)
    return replace(like, tokenizer=tokenizer(), params=stored_as(params(), abstract_params(CONFIG, like.mesh)))


def their_answers(patch) -> dict[str, list]:
    """Return for each item whether it is right, and the chosen letter or the generated text."""
    patch.setitem(sys.modules, "rustbpe", ModuleType("rustbpe"))  # used only to train tokenizers
    gpt, engine, spelling = import_nanochat(patch, "gpt", "engine", "tokenizer")
    chat_eval, common = (importlib.import_module(name) for name in ("scripts.chat_eval", "tasks.common"))
    model = their_network(gpt, CONFIG, params(), LONGEST)

    ours = tokenizer()
    methods = {
        "__init__": lambda self: None,
        "encode": lambda self, text: ours.encode([text])[0],
        "encode_special": lambda self, name: ours.special_tokens[name],
        "get_bos_token_id": lambda self: ours.bos,
        "decode": lambda self, ids: ours.library.decode(ids, skip_special_tokens=False),
    }
    theirs = type("Ours", (spelling.RustBPETokenizer,), methods)()  # nanochat's rendering with our tokens
    answers = {}
    for label in FOLDERS:
        kind = getattr(chat_eval, label.partition("-")[0])
        data = common.HubDataset(pyarrow.table(columns(label)))
        patch.setattr(importlib.import_module(kind.__module__), "load_hub_dataset", lambda *a, data=data, **k: data)
        answers[label] = kept = []
        judge = lambda self, item, answer, judge=kind.evaluate, kept=kept: (
            kept.append([bool(judge(self, item, answer)), answer]) or kept[-1][0]
        )
        with patch.context() as inner:
            inner.setattr(kind, "evaluate", judge)
            chat_eval.run_chat_eval(label, model, theirs, engine.Engine(model, theirs), batch_size=4)
    return answers


if __name__ == "__main__":
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        computed = their_answers(patch)
    RESULTS.write_text(re.sub(r"(\[\[|\],|\]\])", r"\1\n", json.dumps(computed)) + "\n")
