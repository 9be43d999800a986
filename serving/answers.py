"""Answers in the forms of OpenAI's API: in events while they are written, or whole."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from data.tokenizer import TextTokenizer
from serving.batcher import Job
from serving.request import AnswerRequest
from serving.text import AnswerText, Piece, calls, parts, shown

UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that let proxies pass on an answer's events at once."""


class Form(Protocol):
    """How the API writes the answers of one of its addresses."""

    prefix: str
    """Of an answer's id."""
    whole: str
    """The `object` of a whole answer."""
    chunk: str
    """The `object` of an event."""

    def first(self) -> list[dict[str, Any]]:
        """Return the events before an answer's first."""
        ...

    def event(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return what an event says of new pieces."""
        ...

    def answer(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return what a whole answer says."""
        ...


class ChatForm:
    """The answers of /v1/chat/completions. Those with calls of the calculator have `parts`, which are not OpenAI's."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self) -> None:
        self.unsent: list[Piece] = []
        """Pieces of text before the first call: with it, all parts are sent."""
        self.has_calls = False

    def first(self) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": ""}}]

    def event(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        self.unsent += pieces
        self.has_calls = self.has_calls or calls(pieces)
        delta: dict[str, Any] = {"content": shown(pieces)} if pieces else {}
        if self.has_calls and self.unsent:
            delta["parts"] = parts(self.unsent)
            self.unsent = []
        return {"delta": delta}

    def answer(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": shown(pieces)}
        if calls(pieces):
            message["parts"] = parts(pieces)
        return {"message": message}


class TextForm:
    """The answers of /v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def first(self) -> list[dict[str, Any]]:
        return []

    def event(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {"text": shown(pieces)}

    def answer(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {"text": shown(pieces)}


@dataclass
class Writer:
    """Writes the answer to one request, in one form."""

    job: Job
    asked: AnswerRequest
    form: Form
    tokenizer: TextTokenizer
    model: str
    count: int = 0
    """Tokens so far."""

    head: dict[str, Any] = field(init=False)
    """What every event says first."""

    def __post_init__(self) -> None:
        self.head = {"id": f"{self.form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model}

    async def events(self) -> AsyncIterator[str]:
        """Yield an answer's server-sent events: the last but one with `finish_reason`, the last with `usage`."""
        with_usage = self.asked.stream_options.include_usage
        head = self.head | {"object": self.form.chunk} | ({"usage": None} if with_usage else {})
        for content in self.form.first():
            yield _event(head | {"choices": [_choice(content)]})
        async for pieces, reason in self._pieces():
            if pieces:
                yield _event(head | {"choices": [_choice(self.form.event(pieces))]})
            if reason:
                yield _event(head | {"choices": [_choice(self.form.event([]), reason)]})
        if with_usage:
            yield _event(head | {"choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    async def whole(self) -> AsyncIterator[str]:
        """Yield an answer when it is complete."""
        pieces: list[Piece] = []
        reason = ""
        async for new, reason in self._pieces():  # noqa: B007
            pieces += new
        choice = _choice(self.form.answer(pieces), reason)
        yield json.dumps(self.head | {"object": self.form.whole, "choices": [choice], "usage": self._usage()})

    async def _pieces(self) -> AsyncIterator[tuple[list[Piece], str]]:
        """Yield an answer's new pieces, and with the last ones why it ended."""
        text = AnswerText(self.tokenizer, self.asked.stops)
        reason = ""
        while not reason:
            match await self.job.events.get():
                case int(token):
                    self.count += 1
                    pieces = text.add(token)
                    reason = "stop" if text.stopped else ""
                case end:
                    pieces = text.add(None)
                    reason = "stop" if text.stopped else end
            if pieces or reason:
                yield pieces, reason

    def _usage(self) -> dict[str, Any]:
        answer, prompt = self.job.answer, self.job.prompt
        assert answer and prompt
        return {
            "prompt_tokens": len(prompt),
            "completion_tokens": self.count,
            "total_tokens": len(prompt) + self.count,
            "prompt_tokens_details": {"cached_tokens": len(prompt) - answer.read},
        }


def _choice(content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


class AnswerResponse(StreamingResponse):
    """Sends an answer. Its slot becomes free when the answer is sent, or when its client has gone."""

    def __init__(self, writer: Writer):
        if writer.asked.stream:
            super().__init__(writer.events(), headers=UNBUFFERED, media_type="text/event-stream")
        else:
            super().__init__(writer.whole(), media_type="application/json")
        self.job = writer.job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(asyncio.CancelledError):  # when the server stops, which it reports
                await super().__call__(scope, receive, send)
        finally:
            self.job.dropped = True
