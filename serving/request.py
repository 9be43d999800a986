"""Requests of OpenAI's API, for an answer to a conversation or a text to continue."""

import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from data.conversation import Message, messages_of, render, require_chat_tokens
from data.prompts import encode_prompts
from data.tokenizer import TextTokenizer
from model.sampling import Sampling
from options.schema import NotNegative, Positive
from serving.fields import advice, used
from serving.refusal import Refused
from system.errors import UserError

NO_LIMIT = {"top_k": 0, "max_tokens": None, "max_completion_tokens": None}
"""What -1 means, as in other servers."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class AnswerRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that change an answer. `top_k` is not OpenAI's; other servers have it too."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: NotNegative[int] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    max_tokens: Positive[int] | None = None
    stop: str | Annotated[list[str], Meta(max_length=4)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Return the request in a JSON body. Raise Refused, with the field, for anything wrong or not supported."""
        try:
            given = msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(f"the body is no JSON object: {error}") from error
        fields = used(given)
        fields |= {name: value for name, value in NO_LIMIT.items() if fields.get(name) == -1}
        for name in sorted(fields.keys() - set(cls.__struct_fields__)):
            raise Refused(f"{name} is not supported here; {advice(name)}", name)
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            where = re.search(r"(?:\$\.|field `)(\w+)", str(error))
            raise Refused(str(error), where and where[1]) from error

    @property
    def most(self) -> int | None:
        """Return the most tokens of the answer; None if the row's room limits it."""
        return self.max_tokens

    @property
    def stops(self) -> Sequence[str]:
        """Return the texts before which the answer ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def sampling(self, default: Sampling) -> Sampling:
        """Return the options of sampling. Without a seed, draw one."""
        given = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        given["seed"] = secrets.randbits(31) if self.seed is None else self.seed % (1 << 31)
        if self.top_p == 0:  # the likeliest token, as in other servers
            given |= {"temperature": 0.0, "top_p": None}
        return default._replace(**{name: value for name, value in given.items() if value is not None})

    def tokens(self, tokenizer: TextTokenizer, capacity: int) -> list[int]:
        """Return the tokens before the answer. Raise Refused if they are none, or fill the row."""
        raise NotImplementedError


class ChatRequest(AnswerRequest, kw_only=True, forbid_unknown_fields=True):
    """A conversation to answer."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Positive[int] | None = None

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def tokens(self, tokenizer: TextTokenizer, capacity: int) -> list[int]:
        try:
            require_chat_tokens(tokenizer)
        except UserError as error:
            raise Refused(f"{error}; POST /v1/completions continues a text", code="no_conversations") from error
        try:
            messages = messages_of([_as_learned(message) for message in self.messages if not _is_empty_system(message)])
        except ValueError as error:
            raise Refused(f"messages: {error}", "messages") from error
        if messages[-1]["role"] != "user":
            raise Refused("messages: the last one is the assistant's; an answer follows one of the user", "messages")
        tokens = render(tokenizer, messages, ask=True)
        if len(tokens) >= capacity:
            problem = f"messages: they have {len(tokens)} tokens; the network's sequence has {capacity}, so at most "
            remedy = f"{capacity - 1} leave room for an answer; shorten them or start a new conversation"
            raise Refused(problem + remedy, "messages", code="context_length_exceeded")
        return tokens


def _is_empty_system(message: Message) -> bool:
    return message.get("role") == "system" and message.get("content") in ("", None)


def _as_learned(message: Message) -> Message:
    """Return a message with the content that a network learns. Clients may send a text in parts; an assistant's are
    learned one by one, and those that this server has sent as `parts` have its calls."""
    if message.get("role") == "assistant":
        return message | {"content": message.get("parts") or message.get("content") or ""}
    content = message.get("content")
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return message
    texts = [part.get("text") for part in content if part.get("type") == "text"]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        return message
    return message | {"content": "".join(map(str, texts))}


class TextRequest(AnswerRequest, kw_only=True, forbid_unknown_fields=True):
    """A text to continue, or its tokens."""

    prompt: str | list[Any] = ""
    max_tokens: Positive[int] | None = 16
    """As OpenAI's."""

    def tokens(self, tokenizer: TextTokenizer, capacity: int) -> list[int]:
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]  # as some clients send one prompt
        if isinstance(prompt, str):
            try:
                return encode_prompts(tokenizer, [prompt], capacity)[0]
            except UserError as error:
                raise Refused(f"prompt: {error}", "prompt", code="context_length_exceeded") from error
        if not all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in prompt):
            most = tokenizer.vocab_size - 1
            raise Refused(f"prompt: give one text, or one list of tokens from 0 to {most}, in a request", "prompt")
        if len(prompt) >= capacity:
            problem = f"prompt: it has {len(prompt)} tokens; the network's sequence has {capacity}"
            raise Refused(problem, "prompt", code="context_length_exceeded")
        return prompt or [tokenizer.bos]
