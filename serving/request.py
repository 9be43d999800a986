"""Requests of OpenAI's chat completions API. What is not supported is refused by name."""

import re
import secrets
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.exceptions import HTTPException

from data.conversation import messages_of, render
from data.tokenizer import TextTokenizer
from model.sampling import Sampling
from options.schema import NotNegative, Positive

# Fields that change no answer, and values that ask for nothing: many clients send them with every request.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
NOTHING = {"n": 1, "frequency_penalty": 0, "presence_penalty": 0, "logprobs": False, "tools": [], "tool_choice": "none"}
NOTHING |= {"logit_bias": {}, "response_format": {"type": "text"}, "modalities": ["text"], "top_logprobs": 0}
NOTHING |= {"max_tokens": -1, "max_completion_tokens": -1}  # no limit, as in other servers


class Refused(HTTPException):
    """A refused request, because of the field `param`."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(status, message, {"Retry-After": "1"} if status == 429 else None)
        self.param, self.code = param, code


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class ChatRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The fields that change an answer. `top_k` is not OpenAI's; other servers have it too."""

    messages: list[dict[str, Any]]
    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: NotNegative[int] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    max_tokens: Positive[int] | None = None
    max_completion_tokens: Positive[int] | None = None
    stop: str | Annotated[list[str], Meta(max_length=4)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def sampling(self, default: Sampling) -> Sampling:
        """Return the options of sampling. Without a seed, draw one."""
        given = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        given["seed"] = secrets.randbits(31) if self.seed is None else self.seed % (1 << 31)
        if self.top_p == 0:  # the likeliest token, as in other servers
            given |= {"temperature": 0.0, "top_p": None}
        return default._replace(**{name: value for name, value in given.items() if value is not None})

    def prompt(self, tokenizer: TextTokenizer, capacity: int) -> list[int]:
        """Return the tokens before an answer. Raise Refused if the messages are not a conversation, or fill the row."""
        for message in self.messages:  # clients may send a text in parts; an assistant's are learned one by one
            parts = message.get("content") if message.get("role") != "assistant" else None
            if isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
                texts = [part.get("text") for part in parts]
                message["content"] = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        is_empty = lambda message: message.get("role") == "system" and message.get("content") in ("", None)
        try:
            messages = messages_of([message for message in self.messages if not is_empty(message)])
        except ValueError as error:
            raise Refused(f"messages: {error}", "messages") from error
        if messages[-1]["role"] != "user":
            raise Refused("messages: the last one is the assistant's; an answer follows one of the user", "messages")
        tokens = render(tokenizer, messages, ask=True)
        if len(tokens) >= capacity:
            problem = f"messages: they have {len(tokens)} tokens; the network's sequence has {capacity}, so at most "
            advice = f"{capacity - 1} leave room for an answer; shorten them or start a new conversation"
            raise Refused(problem + advice, "messages", code="context_length_exceeded")
        return tokens


def read_request(body: bytes) -> ChatRequest:
    """Return the request in a JSON body. Raise Refused, with the field, for anything wrong or not supported."""
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"the body is no JSON object: {error}") from error
    fields = {name: value for name, value in given.items() if value is not None and name not in IGNORED}
    fields = {name: value for name, value in fields.items() if name not in NOTHING or value != NOTHING[name]}
    if fields.get("top_k") == -1:  # no limit
        fields["top_k"] = 0
    if "tools" not in fields and fields.get("tool_choice") == "auto":
        del fields["tool_choice"]
    for name in sorted(fields.keys() - set(ChatRequest.__struct_fields__)):
        value = f"give {msgspec.json.encode(NOTHING[name]).decode()} or " if name in NOTHING else ""
        raise Refused(f"{name} is not supported by this server; {value}leave it out", name)
    try:
        return msgspec.convert(fields, ChatRequest)
    except msgspec.ValidationError as error:
        where = re.search(r"(?:\$\.|field `)(\w+)", str(error))
        raise Refused(str(error), where and where[1]) from error
