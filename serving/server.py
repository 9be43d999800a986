"""OpenAI's API, and a page to chat on: python chat.py --run_dir=runs/chat --serve."""

import asyncio
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from data.tokenizer import TextTokenizer
from model.sampling import Sampling
from run.checkpoint_files import outside_event_loop
from serving.access import KeyHolders, KnownHosts
from serving.answers import AnswerResponse, ChatForm, Form, TextForm, Writer
from serving.batcher import Batcher, Job
from serving.model import Model
from serving.refusal import Refused
from serving.request import AnswerRequest, ChatRequest, TextRequest
from system.errors import UserError

MOST_BYTES = 1 << 20  # of a request
SECONDS_TO_FINISH = 10  # for unfinished answers when the server is to stop


class Service:
    """The server's answers, by address."""

    def __init__(self, batcher: Batcher, tokenizer: TextTokenizer, model: Model, sampling: Sampling):
        self.batcher, self.tokenizer, self.model, self.sampling = batcher, tokenizer, model, sampling
        self.routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.one_model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
        ]

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
        facts |= {"about": self.model.about, "examples": self.model.examples, "converses": self.model.converses}
        return facts | {"max_model_len": self.batcher.engine.capacity}

    def _require_model(self, model: str | None) -> None:
        if model not in (None, self.model.name):
            message = f"model: there is no {model!r} here; this server answers with {self.model.name!r}"
            raise Refused(message, "model", 404, "model_not_found")

    async def chat(self, request: Request) -> Response:
        return await self._answer(ChatRequest.read(await _body(request)), ChatForm())

    async def complete(self, request: Request) -> Response:
        return await self._answer(TextRequest.read(await _body(request)), TextForm())

    async def _answer(self, asked: AnswerRequest, form: Form) -> Response:
        self._require_model(asked.model)
        job = Job(asked.sampling(self.sampling), asked.most)
        if not self.batcher.admit(job):
            message = f"{self.batcher.slots} requests are being answered and {self.batcher.queue} wait, as many as may"
            raise Refused(f"{message}; try again later", status=429, code="queue_full")
        try:
            # In a thread: encoding a long text would stop all other answers.
            prompt = await asyncio.to_thread(asked.tokens, self.tokenizer, self.batcher.engine.capacity)
        except BaseException:
            job.dropped = True
            raise
        self.batcher.start(job, prompt)
        return AnswerResponse(Writer(job, asked, form, self.tokenizer, self.model.name))

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Return an error in the form of OpenAI's API. For an address that does not exist it names those that do."""
        if isinstance(error, ClientDisconnect):
            return Response()  # nobody reads it
        assert isinstance(error, HTTPException)
        if isinstance(error, Refused):
            return error.response()
        there = ", ".join(
            f"{'POST' if 'POST' in (route.methods or ()) else 'GET'} {route.path}" for route in self.routes
        )
        message = f"{request.method} {request.url.path}: {error.detail}; this server has {there}"
        return Refused(message, status=error.status_code, code="unknown_url").response()


async def _body(request: Request) -> bytes:
    """Return a request's JSON. Raise Refused for another type, or for too much."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # pages of other sites cannot send this without permission
        raise Refused("the header Content-Type must be application/json", status=415)
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise Refused(f"the request has more than {MOST_BYTES:,} bytes", status=413)
    return body


@dataclass(frozen=True)
class Access:
    """Who may use a server."""

    allowed: Sequence[str] = ()
    """Names of hosts that requests may be for, besides this machine's own (`serving.access.KnownHosts`)."""
    key: str = ""
    """What programs must send; empty: nothing."""


def make_server(service: Service, access: Access) -> uvicorn.Server:
    """Return a server, not yet started."""
    handlers = {HTTPException: service.refuse, ClientDisconnect: service.refuse}
    app: ASGIApp = Starlette(routes=service.routes, exception_handlers=handlers)
    if access.key:
        app = KeyHolders(app, access.key)
    quiet = {"log_level": "warning", "access_log": False, "lifespan": "off"}
    known = KnownHosts(app, access.allowed)
    return uvicorn.Server(uvicorn.Config(known, timeout_graceful_shutdown=SECONDS_TO_FINISH, **quiet))


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


def serve(service: Service, access: Access, bound: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    server = make_server(service, access)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)  # uvicorn calls it for both, and again at its end
    outside_event_loop(lambda: asyncio.run(run_server(server, service.batcher, bound)))
