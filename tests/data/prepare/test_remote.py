"""Test text on the Hugging Face hub, with a small server for the part of its API that the client uses."""

import hashlib
import io
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi

from configs.files import StorageLost
from configs.schema import UserError
from data.prepare.listing import find_corpus
from data.prepare.preparation import Preparation, prepare

SHA = "1234567890abcdef1234567890abcdef12345678"


def shard(first: int) -> bytes:
    """Return 99 rows."""
    table = io.BytesIO()
    texts = [f"row {i} with some words of its own {i * i}" for i in range(first, first + 99)]
    pq.write_table(pa.table({"text": texts}), table)
    return table.getvalue()


FILES = {
    "README.md": b"no text to train on",
    "other/000.parquet": shard(9000),
    **{f"sample/10BT/{i:03d}.parquet": shard(100 * i) for i in range(3)},
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


def ask(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the hub's client at `endpoint`."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture(scope="module")
def endpoint():
    with serving(Hub) as url:
        yield url


def test_a_folder_of_a_dataset_comes_file_by_file_at_one_revision_and_grows(endpoint, tmp_path, monkeypatch):
    ask(endpoint, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    source = Preparation(source="hf:owner/name:sample/10BT", vocab_size=280, val_fraction=0.1)
    Hub.asked.clear()
    prepare(source, tmp_path / "out", max_files=1, workers=1)
    assert Hub.asked == ["sample/10BT/000.parquet"]
    prepare(source, tmp_path / "out", workers=1)
    facts = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert facts["made_from"]["version"] == f"{SHA}/sample/10BT" and facts["complete"]
    assert facts["train"]["documents"] + facts["val"]["documents"] == 3 * 99
    assert len(Hub.asked) == 3  # no file twice
    with pytest.raises(UserError, match="3 files already"):
        prepare(source, tmp_path / "out", max_files=1)


def test_a_glob_and_a_revision_are_requested_and_a_given_commit_is_kept(endpoint, monkeypatch):
    ask(endpoint, monkeypatch)
    revisions, info = [], HfApi.dataset_info
    monkeypatch.setattr(HfApi, "dataset_info", lambda *a, revision, **k: revisions.append(revision) or info(*a, **k))
    corpus = find_corpus("hf:owner/name@v1.0:*/*BT/00[01]*", revision=SHA)
    assert [file.name for file in corpus.files] == ["sample/10BT/000.parquet", "sample/10BT/001.parquet"]
    assert {file.url.partition(":sample")[0] for file in corpus.files} == {f"hf:owner/name@{SHA}"}
    find_corpus("hf:owner/name", revision=SHA)
    assert revisions == ["v1.0", SHA] and "1 .md" in corpus.left_out + find_corpus("hf:owner/name").left_out


def test_a_dataset_missing_on_the_hub_is_a_user_error(endpoint, monkeypatch):
    ask(endpoint, monkeypatch)
    with pytest.raises(UserError, match="nothing found there"):
        find_corpus("hf:owner/name:sample/99BT")
    for source in ("hf:owner/missing", "hf:no name at all"):
        with pytest.raises(UserError, match=f"{source}: the hub refuses this"):
            find_corpus(source)


def test_an_unreachable_network_is_retried_and_no_user_error(monkeypatch):
    """Retry, although the client's errors are no OSErrors."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("configs.files.RETRY_SECONDS", 0)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    with pytest.raises(StorageLost, match=r"hf:owner/name: .*refused"):
        find_corpus("hf:owner/name")
