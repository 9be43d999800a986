"""Serve the part of Google Cloud Storage's JSON API that gcsfs and tensorstore use."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class FakeGCS(ThreadingHTTPServer):
    """One bucket named `bucket`, in memory. `objects` maps names to (generation, content)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.generation = 0
        self.lock = threading.Lock()
        self.reset()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def reset(self) -> None:
        """Empty the bucket, and remove all faults."""
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.uploads: dict[str, str] = {}
        self.asked: list[str] = []
        self.full = False
        """Answers each write with an error."""
        self.forbidden = False
        self.keeps = False
        """Lets nothing be deleted, and so nothing be overwritten."""
        self.page: tuple[int, bytes] | None = None
        """Status and content of what a proxy answers in the store's place."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, name: str, content: bytes) -> None:
        """Write an object."""
        self.generation += 1
        self.objects[name] = (self.generation, content)

    def handle_error(self, *_):
        """Ignore a client that hung up."""

    def environment(self) -> dict[str, str]:
        """Return the variables that make gcsfs and tensorstore use this server, without credentials."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GCE_METADATA_ROOT": "127.0.0.1:9",  # no server
            "NO_GCE_CHECK": "true",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # or gcsfs asks Google for the kind of bucket
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # small answers are sent at once
    server: FakeGCS

    def log_message(self, *_):
        pass

    def answer(self, status: int, content: bytes | dict = b"", **headers: str):
        if isinstance(content, dict):
            content = json.dumps(content).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        address = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(address.query).items()}
        self.server.asked.append(f"{self.command} {self.path}")
        if self.server.page:
            return self.answer(*self.server.page)
        if self.server.forbidden:
            return self.answer(403, {"error": {"code": 403, "message": "you may not read this"}})
        with self.server.lock:
            if (
                match := re.fullmatch(r"/(?:(upload|download)/)?storage/v1/b/bucket/o(?:/(.*))?", address.path)
            ) is None:
                if address.path == "/storage/v1/b/bucket":
                    return self.answer(200, {"kind": "storage#bucket", "name": "bucket"})
                return self.answer(404, {"error": {"code": 404, "message": "no such address"}})
            kind, name = match[1], unquote(match[2] or "")
            if self.command in ("POST", "PUT") and self.server.full:
                return self.answer(403, {"error": {"code": 403, "message": "quota exceeded"}})
            if self.command == "GET" and not name:
                return self.list(asked)
            if kind == "upload":
                return self.upload(asked, body)
            if self.command == "POST" and (move := re.fullmatch(r"(.*)/moveTo/o/(.*)", match[2])):
                source = unquote(move[1])
                if source not in self.server.objects:
                    return self.answer(404, {"error": {"code": 404, "message": f"no object {source}"}})
                return self.answer(200, self.write(unquote(move[2]), self.server.objects.pop(source)[1]))
            if name not in self.server.objects:
                return self.answer(404, {"error": {"code": 404, "message": f"no object {name}"}})
            if self.command == "DELETE" and self.server.keeps:
                return self.answer(403, {"error": {"code": 403, "message": "storage.objects.delete is missing"}})
            if self.command == "DELETE":
                del self.server.objects[name]
                return self.answer(204)
            generation, content = self.server.objects[name]
            if kind != "download" and asked.get("alt") != "media":
                return self.answer(200, self.resource(name))
            if asked.get("ifGenerationNotMatch") == str(generation):
                return self.answer(304)
            headers = {"x-goog-generation": str(generation), "x-goog-stored-content-length": str(len(content))}
            if bounds := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
                first = int(bounds[1]) if bounds[1] else len(content) - int(bounds[2])
                last = min(int(bounds[2]) if bounds[1] and bounds[2] else len(content) - 1, len(content) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                return self.answer(206, content[first : last + 1], **headers)
            return self.answer(200, content, **headers)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = handle_any

    def resource(self, name: str) -> dict:
        generation, content = self.server.objects[name]
        return {
            **{"kind": "storage#object", "bucket": "bucket", "name": name, "size": str(len(content))},
            **{"generation": str(generation), "metageneration": "1", "id": f"bucket/{name}/{generation}"},
            **{"timeCreated": "2026-01-01T00:00:00.000Z", "updated": "2026-01-01T00:00:00.000Z"},
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
            "contentType": "application/octet-stream",
        }

    def write(self, name: str, content: bytes) -> dict:
        self.server.put(name, content)
        return self.resource(name)

    def list(self, asked: dict):
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter")
        first, end = asked.get("startOffset", ""), asked.get("endOffset")
        items, prefixes = [], set()
        for name in sorted(self.server.objects):
            if not name.startswith(prefix) or name < first or (end and name >= end):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                items.append(self.resource(name))
        return self.answer(200, {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})

    def upload(self, asked: dict, body: bytes):
        if "upload_id" in asked:  # a resumable upload, in one part
            return self.answer(200, self.write(self.server.uploads[asked["upload_id"]], body))
        name, wanted = asked.get("name") or json.loads(body)["name"], asked.get("ifGenerationMatch")
        if self.server.keeps and name in self.server.objects:
            return self.answer(403, {"error": {"code": 403, "message": "storage.objects.delete is missing"}})
        if asked.get("uploadType") == "resumable":
            identity = str(len(self.server.uploads))
            self.server.uploads[identity] = name
            where = f"{self.server.url}/upload/storage/v1/b/bucket/o?uploadType=resumable&upload_id={identity}"
            return self.answer(200, Location=where)
        if wanted is not None and int(wanted) != self.server.objects.get(name, (0, b""))[0]:
            return self.answer(412, {"error": {"code": 412, "message": "another generation"}})
        return self.answer(200, self.write(name, body))
