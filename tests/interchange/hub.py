"""A stand-in for the part of the Hugging Face hub that has networks."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar

from tests.data.prepare.hub import Hub

TOKEN = "hf_secret"
CUT = 1000
"""Bytes that `ModelHub.cut` lets through."""


def sha(revision: str) -> str:
    """Return the commit of a branch; a commit is its own."""
    return revision if len(revision) == 40 else hashlib.sha1(revision.encode()).hexdigest()


class ModelHub(Hub):
    """Serve /api/models/..., /OWNER/NAME/resolve/..., and what an upload asks for."""

    branches: ClassVar[dict[str, dict[str, dict[str, bytes]]]] = {}
    """Files of each branch of each repository."""
    private: ClassVar[dict[str, bool]] = {}
    stored: ClassVar[dict[str, bytes]] = {}
    """Large files by their SHA-256, not yet in a commit."""
    cut: ClassVar[set[str]] = set()
    """Files whose first answer ends after CUT bytes."""
    ranges: ClassVar[list[str]] = []

    @classmethod
    def clear(cls) -> None:
        for kept in (cls.branches, cls.private, cls.stored, cls.cut, cls.ranges, cls.asked):
            kept.clear()

    def say(self, content: bytes | dict | list, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for header, value in (headers or {}).items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self) -> None:
        """Answer as the hub does for what is not there, or not for this user."""
        if self.is_known():
            self.say({"error": "not found"}, HTTPStatus.NOT_FOUND, {"X-Error-Code": "RepoNotFound"})
        else:
            self.say({"error": "Invalid username or password."}, HTTPStatus.UNAUTHORIZED)

    def is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        return content

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        if found := re.fullmatch(r"/api/models/(\w+/[\w.-]+)(?:/(revision|tree)/([^/]+).*)?", path):
            self.describe(found[1], found[2] or "revision", found[3] or "main")
        elif found := re.fullmatch(r"/(\w+/[\w.-]+)/resolve/([^/]+)/(.*)", path):
            self.send_file(self.files(found[1], found[2]) or {}, found[3], found[2])
        else:
            self.refuse()

    def files(self, repository: str, revision: str) -> dict[str, bytes] | None:
        branches = self.branches.get(repository, {})
        return branches.get(next((name for name in branches if revision in (name, sha(name))), ""))

    def describe(self, repository: str, kind: str, revision: str) -> None:
        files = self.files(repository, revision)
        if repository not in self.branches:
            self.refuse()
        elif files is None:
            self.say({"error": "no revision"}, HTTPStatus.NOT_FOUND, {"X-Error-Code": "RevisionNotFound"})
        elif kind == "tree":
            self.say([{"type": "file", "path": name, "size": len(files[name]), "oid": "0"} for name in files])
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            self.say({"id": repository, "modelId": repository, "sha": sha(revision), "siblings": siblings})

    def send_file(self, files: dict[str, bytes], name: str, revision: str) -> None:
        if name not in files:
            self.say({}, HTTPStatus.NOT_FOUND, {"X-Error-Code": "EntryNotFound"})
            return
        content = files[name]
        tag = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": sha(revision),
            "Accept-Ranges": "bytes",
        }
        if self.command == "HEAD":
            self.say(content, headers=tag)
            return
        self.asked.append(name)
        if asked := self.headers.get("Range"):
            self.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            of = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            self.say(content[start:], HTTPStatus.PARTIAL_CONTENT, tag | of)
        elif name in self.cut:
            self.cut.discard(name)
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:CUT])
            self.close_connection = True
        else:
            self.say(content, headers=tag)

    def do_PUT(self) -> None:
        content = self.body()
        self.stored[hashlib.sha256(content).hexdigest()] = content
        self.say(b"")

    def do_POST(self) -> None:
        content = self.body()
        routes: dict[str, Callable[..., None]] = {
            "/api/validate-yaml": lambda: self.say({"errors": [], "warnings": []}),
            "/api/repos/create": lambda: self.create(json.loads(content)),
            r"/api/models/(\w+/[\w.-]+)/branch/(.*)": self.add_branch,
            r"/api/models/(\w+/[\w.-]+)/preupload/(.*)": lambda *_: self.choose(json.loads(content)),
            r"/(\w+/[\w.-]+)\.git/info/lfs/objects/batch": lambda _: self.take(json.loads(content)),
            r"/api/models/(\w+/[\w.-]+)/commit/(.*)": lambda *at: self.commit(content, *at),
        }
        path = self.path.split("?")[0]
        for route, act in routes.items():
            if self.is_known() and (found := re.fullmatch(route, path)):
                act(*found.groups())
                return
        self.refuse()

    def create(self, asked: dict[str, Any]) -> None:
        repository = "/".join(asked[part] for part in ("organization", "name"))
        address = {"url": f"https://huggingface.co/{repository}"}
        if repository in self.branches:
            self.say(address, HTTPStatus.CONFLICT)
            return
        self.branches[repository] = {"main": {".gitattributes": b""}}
        self.private[repository] = asked.get("visibility") == "private"
        self.say(address)

    def add_branch(self, repository: str, branch: str) -> None:
        known = branch in self.branches[repository]
        self.branches[repository].setdefault(branch, dict(self.branches[repository]["main"]))
        self.say({}, HTTPStatus.CONFLICT if known else HTTPStatus.OK)

    def choose(self, asked: dict[str, Any]) -> None:
        mode = lambda path: "lfs" if path.endswith(".safetensors") else "regular"
        of = [{"path": one["path"], "uploadMode": mode(one["path"]), "shouldIgnore": False} for one in asked["files"]]
        self.say({"files": of})

    def take(self, asked: dict[str, Any]) -> None:
        address = {"href": f"http://{self.headers['Host']}/upload"}
        of = [
            {**{key: one[key] for key in ("oid", "size")}, "actions": {"upload": address}} for one in asked["objects"]
        ]
        self.say({"objects": of, "transfer": "basic"})

    def commit(self, content: bytes, repository: str, revision: str) -> None:
        files = self.branches[repository][revision]
        for line in map(json.loads, content.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.say(
            {
                "commitUrl": f"https://huggingface.co/{repository}/commit/{sha(revision)}",
                "commitOid": sha(revision),
                "success": True,
            }
        )
