"""Who may use the server: pages of the names that it is known by, and programs that have its key."""

import hmac
import ipaddress
import platform
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.refusal import Refused
from system.errors import UserError


def require_names(allowed: Sequence[str]) -> None:
    """Raise UserError for what is neither the name of a host, nor `*.` before one, nor `*`."""
    for name in allowed:
        plain = name.removeprefix("*.") if name != "*" else "any"
        if not plain or set(plain) & set("*:/ "):
            problem = f"--allowed_hosts={name} is no name of a host"
            raise UserError(f"{problem}; give chat.example.com, *.example.com for all below it, or * for any")


class KnownHosts:
    """An ASGI application that answers 403 if the header `Host` is neither an address, nor this machine's name, nor one
    of `allowed`, where `*.example.com` stands for all names below it, and `*` for any. A page of another site can lead
    its own name here (DNS rebinding), and would read the answers.

    Starlette's TrustedHostMiddleware has the same patterns, but none for addresses, and does not say what to do."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]):
        node = platform.node()
        self.app = app
        self.allowed = [name.lower() for name in ("", "localhost", node, f"{node}.local", *allowed)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        name = host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
        if _is_address(name) or any(_matches(name.lower(), pattern) for pattern in self.allowed):
            await self.app(scope, receive, send)
            return
        message = f"Host: {host} is not known here; use localhost or an address, or start chat.py with "
        refused = Refused(f"{message}--allowed_hosts={name}", status=403, code="unknown_host")
        await refused.response()(scope, receive, send)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _matches(name: str, pattern: str) -> bool:
    return pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))


class KeyHolders:
    """An ASGI application that answers 401 to a request below /v1/ without `Authorization: Bearer KEY`. The page and
    /health say nothing of the network or its users."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        is_same = hmac.compare_digest(given.strip().encode("latin-1"), self.key.encode())
        if (scheme.lower() == "bearer" and is_same) or not scope["path"].startswith("/v1/"):
            await self.app(scope, receive, send)
            return
        problem = "the API key is not this server's" if given else "this server asks for an API key"
        refused = Refused(f"{problem}: Authorization: Bearer KEY", status=401, code="invalid_api_key")
        await refused.response()(scope, receive, send)
