"""Conversations: their contents, and their tokens, as nanochat renders them.

    <|bos|> <|user_start|> text <|user_end|> <|assistant_start|> text <|assistant_end|> <|user_start|> ...

A system message goes before the first user's text. An assistant's content may have parts: text, a call of Python
between <|python_start|> and <|python_end|>, and its output between <|output_start|> and <|output_end|>. A network
learns an assistant's tokens: its text, its calls and its ends. The tokens determine which targets count
(`data.packing.learned`); no mask is stored.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from data.tokenizer import CHAT_TOKENS, TextTokenizer

PARTS = {"text": ("", ""), "python": CHAT_TOKENS[4:6], "python_output": CHAT_TOKENS[6:8]}
NOT_KEPT = ("tool_calls", "function_call", "reasoning_content")
Message = dict[str, Any]


def messages_of(conversation: object) -> list[Message]:
    """Return the messages of a conversation: a list of them, or an object that has it as `messages`. The system's is
    merged into the first user's. Raise ValueError, with what is wrong, if they are no conversation."""
    messages = conversation.get("messages") if isinstance(conversation, dict) else conversation
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("no list of messages")
    for number, message in enumerate(messages, 1):
        role = message.get("role")
        if role not in ("system", "user", "assistant"):
            raise ValueError(f"message {number} has the role {role!r}, not system, user or assistant")
        if (problem := _problem(message)) is not None:
            raise ValueError(f"message {number} ({role}) {problem}")
    messages = [{"role": message["role"], "content": message["content"]} for message in messages]
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    if not messages:
        raise ValueError("no message of a user")
    for number, message in enumerate(messages):
        if message["role"] != ("user", "assistant")[number % 2]:
            turn = "begins with the" if number == 0 else f"has, after the {messages[number - 1]['role']}'s, another"
            raise ValueError(f"the conversation {turn} message of {message['role']}; roles alternate from the user's")
    if system is not None:
        messages[0]["content"] = f"{system}\n\n{messages[0]['content']}"
    return messages


def _problem(message: Message) -> str | None:
    """Return what is wrong with a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return None if content.strip() else "is empty"
    if message["role"] != "assistant" or not isinstance(content, list):
        return "has no text as its content"
    for part in content:
        if not (isinstance(part, dict) and part.get("type") in (*PARTS,) and isinstance(part.get("text"), str)):
            return f"has a part other than {', '.join(PARTS)} with a text"
    return None if any(part["text"].strip() for part in content) else "is empty"


def document_of(conversation: object) -> str:
    """Return a conversation as a document of a dataset: its messages, in one spelling of JSON. Raise ValueError as
    `messages_of`, if there is no answer in it, and if a message has what a document cannot keep."""
    messages = messages_of(conversation)
    if len(messages) < 2:
        raise ValueError("no message of an assistant")
    given: Any = conversation["messages"] if isinstance(conversation, dict) else conversation
    for number, message in enumerate(given, 1):
        if lost := [name for name in NOT_KEPT if message.get(name)]:
            raise ValueError(f"message {number} ({message['role']}) has {', '.join(lost)}, which cannot be learned")
        if message["role"] == "assistant" and message.get("weight") not in (None, 1):
            raise ValueError(f"message {number} (assistant) has another weight than 1: every answer is learned")
    return json.dumps(messages, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def texts_of(document: str) -> list[str]:
    """Return the texts of what `document_of` returns."""
    return [part["text"] for message in json.loads(document) for part in _parts(message["content"])]


def _parts(content: str | list[Message]) -> list[Message]:
    """Return a message's content as parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def render(
    tokenizer: TextTokenizer,
    messages: Sequence[Message],
    ask: bool = False,
    encode: Callable[[list[str]], Iterable[list[int]]] | None = None,
) -> list[int]:
    """Return the tokens of what `messages_of` returns, and with `ask` the <|assistant_start|> of an answer to them.
    `encode` replaces the tokenizer's own. Raise KeyError if the tokenizer has no such tokens."""
    special = tokenizer.special_tokens
    pieces: list[str | int] = [tokenizer.bos]
    for message in messages:
        role = message["role"]
        pieces.append(special[f"<|{role}_start|>"])
        for part in _parts(message["content"]):
            before, after = PARTS[part["type"]]
            pieces += [special[before], part["text"], special[after]] if before else [part["text"]]
        pieces.append(special[f"<|{role}_end|>"])
    if ask:
        pieces.append(special["<|assistant_start|>"])
    encoded = iter((encode or tokenizer.encode)([piece for piece in pieces if isinstance(piece, str)]))
    return [token for piece in pieces for token in (next(encoded) if isinstance(piece, str) else [piece])]
