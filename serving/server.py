"""OpenAI's chat completions API, and a page to chat on: python chat.py --run_dir=runs/chat --serve."""

import asyncio
import ipaddress
import json
import platform
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from data.tokenizer import TextTokenizer
from generation.engine import Answer, Engine
from model.sampling import Sampling
from run.checkpoint_files import outside_event_loop
from serving.model import Model
from serving.request import ChatRequest, Refused, read_request
from serving.text import AnswerText
from system.errors import UserError

MOST_BYTES = 1 << 20  # of a request
SECONDS_TO_FINISH = 10  # for unfinished answers when the server is to stop


@dataclass(eq=False)
class Job:
    """A request, which waits for a slot and then for its answer's tokens."""

    prompt: list[int]
    sampling: Sampling
    most: int | None
    answer: Answer | None = None
    dropped: bool = False
    """True once nobody waits for the answer."""
    sent: int = 0
    events: asyncio.Queue[int | str] = field(default_factory=asyncio.Queue)
    """The answer's tokens, then why it ended: "stop" or "length"."""


class Batcher:
    """Answers as many jobs at once as the engine has slots, first come, first served; `queue` more may wait."""

    def __init__(self, engine: Engine, queue: int):
        self.engine, self.slots, self.queue = engine, engine.free, queue
        self.jobs: list[Job] = []
        self.submitted = asyncio.Event()
        self.thread = ThreadPoolExecutor(1)  # long texts that become tokens may take all threads of asyncio

    @property
    def outstanding(self) -> int:
        """Return the number of jobs that are being answered or wait."""
        return sum(not job.dropped for job in self.jobs)

    def submit(self, job: Job) -> bool:
        """Queue the job. Return False if too many wait already."""
        if accepted := self.outstanding < self.slots + self.queue:
            self.jobs.append(job)
            self.submitted.set()
        return accepted

    async def run(self) -> None:
        """Answer jobs until it is cancelled."""
        while True:
            if not self.jobs:
                self.submitted.clear()
                await self.submitted.wait()
            for job in [job for job in self.jobs if job.dropped]:
                self.jobs.remove(job)
                if job.answer:
                    self.engine.drop(job.answer)
            # One prompt is read between two steps: many new ones do not interrupt the other answers for long.
            if self.engine.free and (job := next((job for job in self.jobs if not job.answer), None)):
                job.answer = self.engine.begin(job.prompt, job.sampling, job.most)
            await asyncio.get_running_loop().run_in_executor(self.thread, self.engine.step)
            for job, answer in [(job, job.answer) for job in self.jobs if job.answer]:
                for token in answer.tokens[job.sent :]:
                    job.events.put_nowait(token)
                job.sent = len(answer.tokens)
                if answer.finished:
                    self.jobs.remove(job)
                    job.events.put_nowait(answer.finished)


class AnswerResponse(StreamingResponse):
    """Streams an answer. Its slot becomes free when the answer is sent, or when its client has gone."""

    def __init__(self, job: Job, content: AsyncIterator[str], media_type: str):
        super().__init__(content, media_type=media_type)
        self.job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(asyncio.CancelledError):  # when the server stops, which it reports
                await super().__call__(scope, receive, send)
        finally:
            self.job.dropped = True


class Service:
    """The server's answers, by address."""

    def __init__(self, batcher: Batcher, tokenizer: TextTokenizer, model: Model, sampling: Sampling):
        self.batcher, self.tokenizer, self.model, self.sampling = batcher, tokenizer, model, sampling

    async def page(self, _: Request) -> Response:
        return FileResponse(Path(__file__).parent / "page.html")

    async def health(self, _: Request) -> Response:
        outstanding, slots = self.batcher.outstanding, self.batcher.slots
        return JSONResponse({"slots": slots, "busy": min(outstanding, slots), "waiting": max(outstanding - slots, 0)})

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._facts()]})

    async def one_model(self, request: Request) -> Response:
        self._require_model(request.path_params["model"])
        return JSONResponse(self._facts())

    def _facts(self) -> dict[str, Any]:
        facts = {"id": self.model.name, "object": "model", "created": 0, "owned_by": "tokensum"}
        facts |= {"about": self.model.about, "examples": self.model.examples}  # for the page
        return facts | {"max_model_len": self.batcher.engine.capacity}

    def _require_model(self, model: str | None) -> None:
        if model not in (None, self.model.name):
            message = f"model: there is no {model!r} here; this server answers with {self.model.name!r}"
            raise Refused(message, "model", 404, "model_not_found")

    async def chat(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # pages of other sites cannot send this without permission
            raise Refused("the header Content-Type must be application/json", status=415)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise Refused(f"the request has more than {MOST_BYTES:,} bytes", status=413)
        asked = read_request(body)
        self._require_model(asked.model)
        # In a thread: encoding a long text would stop all other answers.
        prompt = await asyncio.to_thread(asked.prompt, self.tokenizer, self.batcher.engine.capacity)
        job = Job(prompt, asked.sampling(self.sampling), asked.max_completion_tokens or asked.max_tokens)
        if not self.batcher.submit(job):
            message = f"{self.batcher.slots} requests are being answered and {self.batcher.queue} wait, as many as may"
            raise Refused(f"{message}; try again later", status=429, code="queue_full")
        if asked.stream:
            return AnswerResponse(job, self._events(job, asked), "text/event-stream")
        return AnswerResponse(job, self._completion(job, asked), "application/json")

    async def _chunks(self, job: Job, asked: ChatRequest) -> AsyncIterator[dict[str, Any]]:
        """Yield an answer's chunks: the first with its role, the last but one with `finish_reason`, the last with
        `usage`."""
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model.name}
        head["object"] = "chat.completion.chunk"

        def chunk(delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
            return head | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

        yield chunk({"role": "assistant", "content": ""})
        text = AnswerText(self.tokenizer, [asked.stop] if isinstance(asked.stop, str) else asked.stop)
        count, reason = 0, ""
        while not reason:
            match await job.events.get():
                case int(token):
                    new, count = text.add(token), count + 1
                    reason = "stop" if text.stopped else ""
                case end:
                    new = text.add(None)
                    reason = "stop" if text.stopped else end
            if new:
                yield chunk({"content": new})
        yield chunk({}, reason)
        assert job.answer
        prompt, cached = len(job.prompt), len(job.prompt) - job.answer.read
        usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        yield head | {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}}

    async def _events(self, job: Job, asked: ChatRequest) -> AsyncIterator[str]:
        """Yield a streamed answer."""
        async for chunk in self._chunks(job, asked):
            if chunk["choices"] or asked.stream_options.include_usage:
                yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    async def _completion(self, job: Job, asked: ChatRequest) -> AsyncIterator[str]:
        """Yield an answer when it is complete."""
        *chunks, last, usage = [chunk async for chunk in self._chunks(job, asked)]
        content = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        choice = {"index": 0, "message": {"role": "assistant", "content": content}}
        choice["finish_reason"] = last["choices"][0]["finish_reason"]
        yield json.dumps(usage | {"object": "chat.completion", "choices": [choice]})


async def refuse(request: Request, error: Exception) -> Response:
    """Return an error in the form of OpenAI's API."""
    if isinstance(error, ClientDisconnect):
        return Response()  # nobody reads it
    assert isinstance(error, HTTPException)
    facts = {"type": "rate_limit_error" if error.status_code == 429 else "invalid_request_error"}
    facts |= {"param": getattr(error, "param", None), "code": getattr(error, "code", None)}
    message = error.detail if isinstance(error, Refused) else f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse({"error": facts | {"message": message}}, error.status_code, error.headers)


class KnownHosts:
    """An ASGI application that answers 403 if the header `Host` is neither an address, nor this machine's name, nor
    `given`. A page of another site can lead its own name here (DNS rebinding), and would read the answers."""

    def __init__(self, app: ASGIApp, given: str):
        node = platform.node().lower()
        self.app, self.known = app, {"", "localhost", node, f"{node}.local", given.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host, app = Headers(scope=scope).get("host", ""), self.app
        name = host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            if name.lower() not in self.known:
                message = f"Host: {host} is not known here; use localhost, an address, or --host=NAME at the start"
                app = JSONResponse({"error": {"type": "invalid_request_error", "message": message}}, 403)
        await app(scope, receive, send)


def make_server(service: Service, host: str) -> uvicorn.Server:
    """Return a server, not yet started, for requests to `host` or an address."""
    routes = [
        Route("/", service.page),
        Route("/health", service.health),
        Route("/v1/models", service.models),
        Route("/v1/models/{model:path}", service.one_model),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: refuse, ClientDisconnect: refuse})
    quiet = {"log_level": "warning", "access_log": False, "lifespan": "off"}
    return uvicorn.Server(uvicorn.Config(KnownHosts(app, host), timeout_graceful_shutdown=SECONDS_TO_FINISH, **quiet))


def listener(host: str, port: int) -> socket.socket:
    """Return a socket with this address. Raise UserError if it is not available."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()  # until then another server may bind it, too
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--host={host} --port={port}: no server can listen there: {error}; try another port"
        ) from error
    return bound


async def run_server(server: uvicorn.Server, batcher: Batcher, bound: socket.socket) -> None:
    """Serve until the server is to stop; unfinished answers then have some seconds. An exception of the engine stops
    the server at once, and is raised."""
    answering = asyncio.create_task(batcher.run())
    answering.add_done_callback(lambda _: vars(server).update(should_exit=True, force_exit=True))
    try:
        await server.serve([bound])
    finally:
        answering.cancel()
        with suppress(asyncio.CancelledError):
            await answering


def serve(
    engine: Engine,
    tokenizer: TextTokenizer,
    model: Model,
    sampling: Sampling,
    bound: socket.socket,
    host: str,
    queue: int,
) -> None:
    """Serve until SIGTERM or Ctrl-C. `sampling`: the default of requests; `host`: the name that requests may use."""
    batcher = Batcher(engine, queue)
    server = make_server(Service(batcher, tokenizer, model, sampling), host)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)  # uvicorn calls it for both, and again at its end
    outside_event_loop(lambda: asyncio.run(run_server(server, batcher, bound)))
