"""What stands between the web server and the endpoints: bodies with limits, streams that end with their client.

Owns no state. A client that leaves is noticed while a request is computed and while its answer is sent, and the
request is cancelled at once, whether it streams or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http_errors import (
    BodyTimeout,
    BodyTooLarge,
    ClientGone,
    TooManyRequests,
    Unauthorized,
    UnsupportedMedia,
    error_body,
    shape_of,
)

GUARDED_PREFIXES = ("/v1", "/v2", "/inference")

_BODIES_AT_ONCE = 4
"""How many bodies of the largest size may be in memory while they are read."""

_PATIENCE_S = 2.0
"""How long bytes of a refused body are still read and thrown away."""

_encode = msgspec.json.Encoder().encode


class JsonResponse(Response):
    """A JSON body, encoded without validation."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return _encode(content)


class EarlyResponse(JsonResponse):
    """An answer to a request whose body may still be on its way.

    Closing a connection on unread bytes resets it, and many clients would never see the answer. So the answer goes out
    first, then what still comes is thrown away for a while.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, then read to the end of the body or of patience."""
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def error_response(error: Exception, retry_after_s: int | None = None) -> Response:
    """The response of an error."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    is_unread = isinstance(error, BodyTooLarge | BodyTimeout | UnsupportedMedia | TooManyRequests)
    if is_unread:
        headers["Connection"] = "close"
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    kind = EarlyResponse if is_unread else JsonResponse
    return kind(error_body(error), status_code=shape_of(error).status, headers=headers)


class BodyReader:
    """Reads request bodies within limits: bytes and time each, bytes of all that are being read."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._room_bytes = _BODIES_AT_ONCE * max_bytes

    async def read(self, request: Request) -> bytes:
        """The request's body, refused before it is read where its head already tells."""
        _check_media(request)
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise BodyTooLarge(
                f"the request body has {declared} bytes; at most {self._max_bytes} are taken"
            )
        data = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                async for piece in request.stream():
                    self._take(data, piece)
            return bytes(data)
        except TimeoutError:
            message = f"the request body did not arrive within {self._timeout_s:g} s"
            raise BodyTimeout(message) from None
        except ClientDisconnect:
            raise ClientGone("the client left while it sent its request") from None
        finally:
            self._room_bytes += len(data)

    def _take(self, data: bytearray, piece: bytes) -> None:
        if len(data) + len(piece) > self._max_bytes:
            raise BodyTooLarge(
                f"the request body has more than {self._max_bytes} bytes, which is the limit"
            )
        if len(piece) > self._room_bytes:
            raise TooManyRequests("too many large request bodies are being read at once")
        data += piece
        self._room_bytes -= len(piece)


def _check_media(request: Request) -> None:
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":
        message = f"Content-Type must be application/json, got {media[:80] or 'none'}"
        raise UnsupportedMedia(message)
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise UnsupportedMedia(f"Content-Encoding must be identity, got {coding[:80]}")


@asynccontextmanager
async def cancel_on_disconnect(
    receive: Receive, cancel: Callable[[], None]
) -> AsyncGenerator[None, None]:
    """Call `cancel` as soon as the client is gone. The body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])


class EventStream(Response):
    """A stream of server-sent events whose first piece is already made.

    cancel: ends the work behind it. done: called once, however the stream ends. limit_s: after this a client that does
    not read is given up; None for never.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        *,
        cancel: Callable[[], None],
        done: Callable[[], None],
        limit_s: float | None = None,
    ) -> None:
        self._first = first
        self._rest = rest
        self._cancel = cancel
        self._done = done
        self._limit_s = limit_s
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client is gone."""
        try:
            async with (
                asyncio.timeout(self._limit_s),
                cancel_on_disconnect(receive, self._cancel),
                aclosing(self._rest) as rest,
            ):
                await self._send_all(rest, send)
        except (ClientGone, OSError):
            # TimeoutError is an OSError, too. The web server closes a connection whose answer has no end.
            self._cancel()
        finally:
            self._done()

    async def _send_all(self, rest: AsyncGenerator[bytes, None], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _send_piece(send, self._first)
        async for piece in rest:
            await _send_piece(send, piece)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})


def bears_key(scope: Scope, api_key: str) -> bool:
    """Whether a request bears this key, found out in a time that tells nothing of it."""
    expected = f"Bearer {api_key}".encode()
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    return any(hmac.compare_digest(value, expected) for value in given)


class ApiKeyGuard:
    """Answers 401 to requests under the guarded paths that bear no valid key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is open or bears the key."""
        is_open = scope["type"] != "http" or not self._is_guarded(scope)
        if is_open or bears_key(scope, self._api_key):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("the Authorization header must be `Bearer` and a valid API key")
        await error_response(error)(scope, receive, send)

    @staticmethod
    def _is_guarded(scope: Scope) -> bool:
        path: str = scope["path"]
        return scope["method"] != "OPTIONS" and any(
            path == prefix or path.startswith(prefix + "/") for prefix in GUARDED_PREFIXES
        )
