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
    from litestar.types import ASGIApp, Receive, Scope, Send

API_KEY_ENV = "FOREWORD_API_KEY"

# Whoever watches a server has no key, and learns nothing here that is worth one.
OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})

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


class ApiKeyGuard:
    """Answers 401 to every request without one of `keys`, but to those for `OPEN_PATHS`; passes the others on."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], refuse: ASGIApp) -> None:
        """`refuse` answers in place of `app`."""
        self._app = app
        self._refuse = refuse
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._has_key(scope):
            await self._refuse(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest = _digest(key.strip())
        # All of them, so that time tells neither how much of a key was right nor which one.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def unauthorized() -> ApiError:
    """401: no key, or a wrong one."""
    return ApiError(
        401,
        "an API key is needed: send the header 'Authorization: Bearer KEY' with a right KEY",
        kind="invalid_request_error",
        code="invalid_api_key",
    )
