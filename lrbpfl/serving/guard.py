"""What a request must bring before anything looks at it: a known host, the token, and a body of bounded size."""

import hashlib
import hmac
from collections.abc import Collection

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN = ("/", "/health")  # the page says nothing of anybody: it asks with the token that its reader gives


class Guard:
    """A layer around an application; everything inside sees the whole body at once."""

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: Collection[str] | None, max_bytes: int) -> None:
        self.app, self.hosts, self.max_bytes = app, hosts, max_bytes
        self.digest = _digest(token.encode()) if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.hosts and (host := _host(scope)) not in self.hosts:
            await _told(400, f"this service does not answer to the name {ascii(host)[:60]}")(scope, receive, send)
            return
        if self.digest and scope["path"] not in OPEN and not self._has_token(scope):
            await _told(401, "this needs the header Authorization: Bearer TOKEN")(scope, receive, send)
            return
        body = await self._body(scope, receive)
        if body is None:
            await _told(413, f"the body is larger than {self.max_bytes} bytes")(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replayed, send)

    def _has_token(self, scope: Scope) -> bool:
        """Whether one of its headers is the token; how long this takes tells nothing about it."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return kind.lower() == b"bearer" and hmac.compare_digest(_digest(token.strip()), self.digest or b"")

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if it is too large, of which no more is read than that takes."""
        said = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if said.isdigit() and int(said[:18]) > self.max_bytes:
            return None
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self.max_bytes:
                return None
            if not message.get("more_body", False):
                return bytes(body)


def _host(scope: Scope) -> str:
    """The name that the sender took this place for, without its port."""
    said: bytes = next((value for name, value in scope["headers"] if name == b"host"), b"")
    return said.decode("latin-1").rpartition(":")[0].strip("[]") if b":" in said else said.decode("latin-1")


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _told(status: int, sentence: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {"Connection": "close"}
    return JSONResponse({"detail": sentence}, status, headers)
