"""Conversations in the columns, or keys, of published sets, as lists of messages."""

import json
import re
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any

from data.conversation import Message

Row = dict[str, Any]
MESSAGES = "messages"  # the default name of the messages' own column
OTHERWISE = "data.prepare's --text_column names another, and its --conversations reads messages"  # than `text`
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


def parsed(value: Any) -> Any:
    """Return the messages in a text of JSON, which a .csv needs, and others write, too; another value as it is. Raise
    ValueError for a text of something else, such as Python's `str(messages)`."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError("its messages are text, and not in JSON; write them with json.dumps") from error


def of_question(question: object, answer: object) -> list[Message]:
    """Return a question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def of_instruction(row: Row) -> list[Message]:
    """Return an instruction, followed by its input or context if there is one, and the output or response."""
    given = [row["instruction"], row.get("input") or row.get("context") or ""]
    return of_question("\n\n".join(filter(None, given)), row["output"] if "output" in row else row["response"])


def as_messages(turns: list) -> list:
    """Return the turns, with `role` and `content` for ShareGPT's `from` and `value`."""
    return [
        {"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}
        if isinstance(turn, dict) and "role" not in turn and isinstance(turn.get("from"), str)
        else turn
        for turn in turns
    ]


def of_mmlu(row: Row) -> list[Message]:
    """Return a question, and the letter of its answer."""
    letter = dict(enumerate("ABCD"))[int(row["answer"])]  # a .csv has it as text
    choices = parsed(row["choices"])
    return [multiple_choice(row["question"], "ABCD", choices), {"role": "assistant", "content": letter}]


def multiple_choice(question: str, letters: Sequence[str], choices: Sequence[str]) -> Message:
    """Return a question with its choices before their letters: nanochat's `render_mc`."""
    lines = "".join(f"- {choice}={letter}\n" for letter, choice in zip(letters, choices, strict=True))
    content = f"Multiple Choice question: {question}\n{lines}\nRespond only with the letter of the correct answer."
    return {"role": "user", "content": content}


def of_gsm8k(row: Row) -> list[Message]:
    """Return a problem, and its solution. <<EXPRESSION=RESULT>> becomes a call of Python and its output, as in
    nanochat's `GSM8K.get_example`."""
    parts = []
    for number, text in enumerate(re.split("<<([^>]+)>>", row["answer"])):
        if number % 2:
            expression, equals, result = text.rpartition("=")
            parts.append({"type": "python", "text": expression if equals else text})
            parts.append({"type": "python_output", "text": result if equals else ""})
        else:
            parts.append({"type": "text", "text": text})
    return of_question(row["question"], parts)


FORMATS: dict[str, tuple[tuple[str, ...], Callable[[Row], list[Message]]]] = {
    "ShareGPT": (("conversations",), itemgetter("conversations")),
    "Alpaca": (("instruction", "output"), of_instruction),
    "Dolly": (("instruction", "response"), of_instruction),
    "MMLU": (("question", "choices", "answer"), of_mmlu),
    "GSM8K": (("question", "answer"), of_gsm8k),
}
"""Each format's columns, and the function that makes a row's messages. The first that fits is taken."""
ALSO = ("input", "context")  # columns that a row may have besides


def format_of(columns: Collection[str]) -> str:
    """Return the name of the format with these columns; "" if there is none."""
    return next((name for name, (needed, _) in FORMATS.items() if set(needed) <= set(columns)), "")


def messages_in(row: Row) -> list[Message] | str:
    """Return the messages of a row without the messages' own column; as a text of JSON if the row has them so. Raise
    ValueError if it is of none of the formats, or has other values."""
    if not (name := format_of(row)):
        raise ValueError(unknown(row))
    needed, convert = FORMATS[name]
    try:
        return convert(row)
    except (TypeError, LookupError, ValueError) as error:
        raise ValueError(f"{', '.join(needed)} are not as in {name}") from error


def unknown(columns: Collection[str]) -> str:
    """Return a text on columns that are no conversation."""
    known = "; ".join(", ".join(needed) for needed, _ in FORMATS.values())
    found = ", ".join(columns) or "none"
    return f"no conversation in the columns {found}; known are messages; {known}; --text_column names another"
