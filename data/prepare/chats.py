"""Convert conversations of other schemas to a .jsonl of messages for `python -m data.prepare --conversations`.

    python -m data.prepare.chats mmlu --source='hf:cais/mmlu:all/auxiliary_train*' --out=mmlu.jsonl
    python -m data.prepare.chats gsm8k --source='hf:openai/gsm8k:main/train*' --out=gsm8k.jsonl

    mmlu       rows with `question`, four `choices` and the `answer`'s index: its letter is the answer, as in nanochat
    gsm8k      rows with `question` and `answer`: <<EXPRESSION=RESULT>> becomes a call of Python and its output

docs/fine-tuning.md mixes these as nanochat does.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow
import pyarrow.parquet
import tyro

from configs.command_line import parse_arguments
from configs.files import write_whole
from configs.schema import FilePath, UserError
from data.conversation import Message
from data.prepare.corpus import open_source
from data.prepare.listing import find_corpus

COLUMNS = {"mmlu": ("question", "choices", "answer"), "gsm8k": ("question", "answer")}
Row = dict[str, Any]


@dataclass(frozen=True)
class Arguments:
    """Convert conversations of another schema to a .jsonl of messages."""

    schema: Annotated[Literal["mmlu", "gsm8k"], tyro.conf.Positional]
    """The rows' schema."""
    out: FilePath
    """The .jsonl."""
    source: str
    """.parquet files, as in `python -m data.prepare`."""


def of_mmlu(row: Row) -> list[Message]:
    """Return a question, and the letter of its answer."""
    letter = dict(enumerate("ABCD"))[row["answer"]]
    return [multiple_choice(row["question"], "ABCD", row["choices"]), {"role": "assistant", "content": letter}]


def multiple_choice(question: str, letters: Sequence[str], choices: Sequence[str]) -> Message:
    """Return a question with its choices before their letters: nanochat's `render_mc`."""
    lines = "".join(f"- {choice}={letter}\n" for letter, choice in zip(letters, choices, strict=True))
    content = f"Multiple Choice question: {question}\n{lines}\nRespond only with the letter of the correct answer."
    return {"role": "user", "content": content}


def of_gsm8k(row: Row) -> list[Message]:
    """Return a problem, and its solution with calls of Python: nanochat's `GSM8K.get_example`."""
    parts = []
    for number, text in enumerate(re.split("<<([^>]+)>>", row["answer"])):
        if number % 2:
            expression, equals, result = text.rpartition("=")
            parts.append({"type": "python", "text": expression if equals else text})
            parts.append({"type": "python_output", "text": result if equals else ""})
        else:
            parts.append({"type": "text", "text": text})
    return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": parts}]


def parquet_rows(source: str, columns: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows of a source's .parquet files. Raise UserError if one cannot be read or lacks a column."""
    for file in find_corpus(source).files:
        try:
            with open_source(file) as opened:
                table = pyarrow.parquet.ParquetFile(opened)
                if missing := [name for name in columns if name not in table.schema_arrow.names]:
                    raise UserError(f"{file.url}: no column {', '.join(missing)}; {table.schema_arrow.names} are there")
                for batch in table.iter_batches(1024, columns=columns):
                    yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{file.url}: cannot be read as .parquet: {error}") from error


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    schema, out = arguments.schema, Path(arguments.out)
    convert = {"mmlu": of_mmlu, "gsm8k": of_gsm8k}[schema]
    lines = []
    for number, row in enumerate(parquet_rows(arguments.source, COLUMNS[schema]), 1):
        try:
            lines.append(json.dumps({"messages": convert(row)}) + "\n")
        except (TypeError, ValueError, KeyError) as error:
            raise UserError(f"{arguments.source}: row {number} is not of the schema {schema}: {error!r}") from error
    try:
        write_whole(out, "".join(lines))
    except OSError as error:
        raise UserError(f"--out={out} cannot be written: {error}") from error
    print(json.dumps({"out": str(out), "conversations": len(lines)}))
    return 0


if __name__ == "__main__":
    from hosts.runtime import run_command

    run_command(main)
