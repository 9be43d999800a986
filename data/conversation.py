"""Conversations: their contents, and their tokens, as nanochat renders them.

    <|bos|> <|user_start|> text <|user_end|> <|assistant_start|> text <|assistant_end|> <|user_start|> ...

A system message goes before the first user's text. An assistant's content may have parts: text, a call of Python
between <|python_start|> and <|python_end|>, and its output between <|output_start|> and <|output_end|>. OpenAI's tools
become such parts: a call is its arguments as JSON, and a tool's message is an output in the assistant's turn. A network
learns an assistant's tokens: its text, its calls and its ends. The tokens determine which targets count
(`data.packing.learned`); no mask is stored.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from data.tokenizer import CHAT_TOKENS, TextTokenizer
from system.errors import UserError

PARTS = {"text": ("", ""), "python": CHAT_TOKENS[4:6], "python_output": CHAT_TOKENS[6:8]}
ROLES = {"developer": "system", "function": "tool"} | {role: role for role in ("system", "user", "assistant", "tool")}
Message = dict[str, Any]


def messages_of(conversation: object) -> list[Message]:
    """Return the messages of a conversation: a list of them, or an object that has it as `messages`. The system's is
    merged into the first user's, and a tool's into the assistant's. Raise ValueError, with what is wrong, if they are
    no conversation."""
    messages: list[Message] = []
    is_output = False  # the message before is a tool's: the assistant's turn continues
    for number, given in enumerate(_listed(conversation), 1):
        name = given.get("role")
        role = ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise ValueError(f"message {number} has the role {name!r}, not {', '.join(ROLES)}")
        try:
            content = _content(given, role)
        except ValueError as error:
            raise ValueError(f"message {number} ({name}) {error}") from error
        before = messages[-1]["role"] if messages else ""
        if before == "assistant" and (role == "tool" or (role == "assistant" and is_output)):
            messages[-1]["content"] = [*_parts(messages[-1]["content"]), *_parts(content)]
        elif role == "tool":
            raise ValueError(f"message {number} ({name}) is no answer to an assistant's call")
        elif role == before or (role == "system" and before):
            raise ValueError(
                f"the conversation has, after the {before}'s, another message of {name}; roles alternate from the "
                "user's"
            )
        else:
            messages.append({"role": role, "content": content})
        is_output = role == "tool"
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    if not messages:
        raise ValueError("no message of a user")
    if messages[0]["role"] != "user":
        raise ValueError("the conversation begins with the message of assistant; roles alternate from the user's")
    if system is not None:
        messages[0]["content"] = f"{system}\n\n{messages[0]['content']}"
    return messages


def _listed(conversation: object) -> list[Message]:
    """Return the messages as they were given."""
    messages = conversation.get("messages") if isinstance(conversation, dict) else conversation
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("no list of messages")
    return messages


def _content(message: Message, role: str) -> str | list[Message]:
    """Return a message's text; for a tool, and for an assistant that does not only write text, its parts. Raise
    ValueError, with what is wrong."""
    content, calls = message.get("content"), _calls(message)
    if calls and role != "assistant":
        raise ValueError("has tool_calls, which only an assistant makes")
    if content is None and (calls or role == "tool"):
        content = ""
    if not isinstance(content, str | list):
        raise ValueError("has no text as its content")
    parts = []
    for part in content if isinstance(content, list) else _parts(content):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if kind not in ((*PARTS,) if role == "assistant" else ("text",)) or not isinstance(text, str):
            raise ValueError(f"has a part of the type {kind!r}, which is no text")
        parts.append({"type": kind, "text": text})
    text = "".join(part["text"] for part in parts)
    if role == "tool":
        return [{"type": "python_output", "text": text}]
    if role != "assistant" and not text.strip():
        raise ValueError("is empty")
    if role != "assistant" or (isinstance(content, str) and not calls):
        return text
    return [part for part in parts if part["text"] or not calls] + calls


def _calls(message: Message) -> list[Message]:
    """Return the calls of tools in a message of OpenAI's format as parts: their arguments as JSON."""
    given, old = message.get("tool_calls"), message.get("function_call")
    if given is not None and not isinstance(given, list):
        raise ValueError("has tool_calls that are no list")
    parts = []
    for call in given or ([old] if old else []):
        function = call.get("function", call) if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        try:
            is_object = isinstance(json.loads(arguments), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise ValueError("has a call of a tool whose arguments are no object of JSON")
        parts.append({"type": "python", "text": arguments})
    return parts


def _is_empty_answer(message: Message) -> bool:
    """Return whether an assistant's message has neither text nor calls. A network may write one; none is learned."""
    parts = _parts(_content(message, "assistant"))
    return not _calls(message) and not "".join(part["text"] for part in parts).strip()


def document_of(conversation: object) -> str:
    """Return a conversation as a document of a dataset: its messages, in one spelling of JSON. Raise ValueError as
    `messages_of`, if there is no answer in it, and if a message has what a document cannot keep."""
    messages = messages_of(conversation)
    if len(messages) < 2:
        raise ValueError("no message of an assistant")
    for number, message in enumerate(_listed(conversation), 1):
        if message["role"] == "assistant" and _is_empty_answer(message):
            raise ValueError(f"message {number} (assistant) is empty")
        if message.get("reasoning_content"):
            raise ValueError(f"message {number} ({message['role']}) has reasoning_content, which cannot be learned")
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


def require_chat_tokens(tokenizer: TextTokenizer, run: str = "RUN") -> None:
    """Raise UserError if the tokenizer of `run` cannot encode conversations."""
    if missing := tokenizer.missing_chat_tokens:
        raise UserError(
            f"the network's tokenizer has no {', '.join(missing)}: it was not trained on conversations; fine-tune it: "
            f"python train.py --config=configs/chat.py --init_from={run}"
        )
