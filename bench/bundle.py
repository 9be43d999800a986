"""A bundle like CORE's, of this repository's own code, to try `evaluate.py --tasks=core` without a download:

python -m bench.bundle --out=DIR

Four small tasks that ask how well a network knows Python, which configs/small.py trains on. They are none of DCLM's,
and their mean can be compared with that of another network on this bundle alone.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import yaml

from configs.command_line import parse_arguments
from configs.schema import FilePath, Positive, UserError
from hosts.runtime import run_command

ROOT = Path(__file__).parents[1]
LINES = 4  # of code that are shown before a question
KEYWORDS = ("import", "in", "else")
TASKS = [  # label, kind, shots, delimiter, percentage that guessing reaches
    ("next_line", "multiple_choice", 0, "\n", 25),
    ("next_line_1_shot", "multiple_choice", 1, "\n", 25),
    ("lines_before", "schema", 0, "\n", 50),
    ("keywords", "language_modeling", 0, " ", 0),
]


@dataclass(frozen=True)
class Arguments:
    """Write a bundle."""

    out: FilePath
    """A new folder."""
    items: Positive[int] = 200
    """Of each task."""


def programs() -> list[list[str]]:
    """Of each of this repository's larger programs, the lines that hold something."""
    files = (file for room in ("data", "model", "run", "training") for file in sorted((ROOT / room).glob("*.py")))
    texts = ([line for line in file.read_text().splitlines() if line.strip()] for file in files)
    return [text for text in texts if len(text) > 8 * LINES]


def item(kind: str, texts: list[list[str]], rng: random.Random) -> dict:
    """One of a task of this kind: what stands after, or before, some lines; or the keyword that goes on with a line."""
    text = rng.choice(texts)
    places = range(LINES, len(text))
    before = lambda i: "\n".join(text[i - LINES : i])
    if kind == "language_modeling":
        found = [(i, word) for i in places for word in KEYWORDS if f" {word} " in text[i]]
        i, word = rng.choice(found)
        return {"context": f"{before(i)}\n{text[i].split(f' {word} ')[0]}", "continuation": word}
    i = rng.choice(places)
    if kind == "schema":
        others = [before(j) for j in rng.sample([j for j in places if abs(j - i) > LINES], 1)]
        right, field, more = before(i), "context_options", {"continuation": text[i]}
    else:
        others = rng.sample(sorted({*text} - {text[i]}), 3)
        right, field, more = text[i], "choices", {"query": before(i)}
    options = rng.sample([right, *others], 1 + len(others))
    return {field: options, "gold": options.index(right), **more}


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    out = Path(arguments.out)
    if out.exists():
        raise UserError(f"--out={out} is there already; give a new folder")
    (out / "eval_data").mkdir(parents=True)
    entries = []
    for label, kind, shots, delimiter, _ in TASKS:
        rng, texts = random.Random(label), programs()
        lines = [json.dumps(item(kind, texts, rng)) + "\n" for _ in range(arguments.items)]
        (out / "eval_data" / f"{label}.jsonl").write_text("".join(lines))
        entry = {"label": label, "dataset_uri": f"{label}.jsonl", "num_fewshot": [shots], "icl_task_type": kind}
        entries.append(entry | {"continuation_delimiter": delimiter})
    (out / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    rows = "".join(f"{label},{percent}\n" for label, *_, percent in TASKS)
    (out / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n" + rows)
    print(f"{len(TASKS)} tasks of {arguments.items} items are in {out}")
    return 0


if __name__ == "__main__":
    run_command(main)
