"""API keys: who may use the server."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .errors import ApiError

if TYPE_CHECKING:  # the command line needs no framework
    from litestar import Request
    from litestar.types import ASGIApp, Receive, Scope, Send

API_KEY_ENV = "FOREWORD_API_KEY"

# Whoever watches a server has no key, and learns nothing here that is worth one.
OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})

_CALLER = "foreword_caller"  # in the state of a request's scope

_KEY = re.compile(r"[!-+\--~]+")  # visible ASCII but the comma


def check_api_key(key: str) -> str:
    """Returns `key`. Raises ValueError, without repeating it, if no client could send it."""
    if _KEY.fullmatch(key) is None:
        raise ValueError("an API key must not be empty and consists of visible ASCII characters other than the comma")
    return key


def take_api_keys() -> tuple[str, ...]:
    """The keys in the environment variable `FOREWORD_API_KEY`, separated by commas, which is removed there.

    So no child process inherits them unasked. Raises ValueError as `check_api_key`.
    """
    text = os.environ.pop(API_KEY_ENV, "")
    return tuple(check_api_key(key.strip()) for key in text.split(",")) if text.strip() else ()


def api_key_environment(keys: Iterable[str]) -> dict[str, str]:
    """What makes `take_api_keys` find `keys` in a child process. Unlike arguments, others cannot see it."""
    text = ",".join(keys)
    return {API_KEY_ENV: text} if text else {}


def caller_id(key: str) -> str:
    """Who sends `key`: the same on every server at any time. It leads nobody back to a key that cannot be guessed."""
    return hmac.new(key.encode(), b"foreword caller", hashlib.sha256).hexdigest()


def caller_of(request: Request) -> str:
    """The `caller_id` of who sends `request`; empty where no key is needed."""
    caller: str = request.scope["state"].get(_CALLER, "")
    return caller


class ApiKeyGuard:
    """Answers 401 to every request without one of `keys`, but to those for `OPEN_PATHS`; passes the others on.

    Those behind it learn by `caller_of` which key it was.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], refuse: ASGIApp) -> None:
        """`refuse` answers in place of `app`."""
        self._app = app
        self._refuse = refuse
        self._callers = [(_digest(key.encode()), caller_id(key)) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            caller = self._caller(scope)
            if caller is None:
                await self._refuse(scope, receive, send)
                return
            scope.setdefault("state", {})[_CALLER] = caller
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> str | None:
        """None: it sends none of the keys."""
        digests = [_digest(key) for key in _given_keys(scope)]
        # All of them, so that time tells neither how much of a key was right nor which one.
        callers = [
            caller for digest in digests for known, caller in self._callers if hmac.compare_digest(digest, known)
        ]
        return callers[0] if callers else None


def _given_keys(scope: Scope) -> list[bytes]:
    """What a request brings as a key: `Authorization: Bearer KEY`, `x-api-key: KEY`, or both; the first of each."""
    headers = dict(reversed(list(scope["headers"])))
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    keys = [bearer.strip()] if scheme.lower() == b"bearer" else []
    if b"x-api-key" in headers:
        keys.append(headers[b"x-api-key"].strip())
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def unauthorized() -> ApiError:
    """401: no key, or a wrong one."""
    return ApiError(
        401,
        "an API key is needed: send the header 'Authorization: Bearer KEY', or 'x-api-key: KEY', with a right KEY",
        kind="invalid_request_error",
        code="invalid_api_key",
    )
