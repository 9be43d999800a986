"""A stand-in for the Hugging Face hub and other servers of text."""

import hashlib
import io
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SHA = "1234567890abcdef1234567890abcdef12345678"


def text(i: int) -> str:
    """Return the text of document `i`."""
    return f"Document {i} has some words of its own, {i * i} and {i**3}, and is \u2014 like the web \u2014 no ASCII."


def parquet(first: int, compression: str) -> bytes:
    """Return 20 rows in groups of 8, with another column next to the text."""
    rows = {"url": ["http://a.b"] * 20, "text": [text(i) for i in range(first, first + 20)]}
    content = io.BytesIO()
    pq.write_table(pa.table(rows), content, compression=compression, row_group_size=8)
    return content.getvalue()


FILES = {
    "README.md": b"no text to train on",
    "other/000.parquet": parquet(900, "snappy"),
    **{f"sample/10BT/{i:03d}.parquet": parquet(20 * i, "snappy") for i in range(3)},
}


class Hub(BaseHTTPRequestHandler):
    """Serve /api/datasets/... and /datasets/.../resolve/..."""

    asked: ClassVar[list[str]] = []
    repositories: ClassVar[dict[str, dict[str, bytes]]] = {"owner/name": FILES}

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool):
        path = self.path.split("?")[0]
        repository = "/".join(path.removeprefix("/api").split("/")[2:4])
        files, name = self.repositories.get(repository, {}), re.sub(rf".*/resolve/(main|{SHA})/", "", path)
        if files and path.startswith("/api/datasets/"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            facts = {"id": repository, "sha": SHA, "siblings": siblings}
            content, status, headers = json.dumps(facts).encode(), 200, {}
        elif name in files:
            content, status = files[name], 200
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": SHA}
            if body:
                self.asked.append(name)
        else:
            content, status, headers = b"{}", 404, {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextmanager
def serving(handler: type[Hub]) -> Iterator[str]:
    """Serve the hub, and yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def ask(endpoint: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Point the hub's client at `endpoint`, with a cache in a folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
