"""API keys: who may use the server."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING

from .errors import ApiError

if TYPE_CHECKING:  # the command line needs no framework
    from litestar import Request
    from litestar.types import ASGIApp, Receive, Scope, Send

API_KEY_ENV = "FOREWORD_API_KEY"
ADMIN_API_KEY_ENV = "FOREWORD_ADMIN_API_KEY"

# Whoever watches a server has no key, and learns nothing here that is worth one.
WATCHED_PATHS = frozenset({"/health", "/version", "/metrics"})

# In the state of a request's scope.
_CALLER = "foreword_caller"
_MAY_ADMINISTER = "foreword_may_administer"

_KEY = re.compile(r"[!-+\--~]+")  # visible ASCII but the comma


def check_api_key(key: str) -> str:
    """Returns `key`. Raises ValueError, without repeating it, if no client could send it."""
    if _KEY.fullmatch(key) is None:
        raise ValueError("an API key must not be empty and consists of visible ASCII characters other than the comma")
    return key


def take_api_keys(variable: str = API_KEY_ENV) -> tuple[str, ...]:
    """The keys in this environment variable, separated by commas, which is removed there.

    So no child process inherits them unasked. Raises ValueError as `check_api_key`.
    """
    text = os.environ.pop(variable, "")
    return tuple(check_api_key(key.strip()) for key in text.split(",")) if text.strip() else ()


def api_key_environment(keys: Iterable[str], variable: str = API_KEY_ENV) -> dict[str, str]:
    """What makes `take_api_keys` find `keys` in a child process. Unlike arguments, others cannot see it."""
    text = ",".join(keys)
    return {variable: text} if text else {}


def caller_id(key: str) -> str:
    """Who sends `key`: the same on every server at any time. It leads nobody back to a key that cannot be guessed."""
    return hmac.new(key.encode(), b"foreword caller", hashlib.sha256).hexdigest()


def caller_of(request: Request) -> str:
    """The `caller_id` of who sends `request`; empty where no key is needed."""
    caller: str = request.scope["state"].get(_CALLER, "")
    return caller


def check_may_administer(request: Request) -> None:
    """Whether who sends `request` may do what concerns everybody's requests. Raises ApiError (403)."""
    if not request.scope["state"].get(_MAY_ADMINISTER, True):
        raise ApiError(
            403,
            f"{request.url.path} concerns everybody's requests and needs an admin key ({ADMIN_API_KEY_ENV})",
            kind="invalid_request_error",
            code="admin_api_key_needed",
        )


class ApiKeyGuard:
    """Answers 401 to every request without one of `keys` or `admin_keys`, but to those for `open_paths`; passes the
    others on. Without `keys` all are passed on.

    Those behind it learn by `caller_of` which key it was, and by `check_may_administer` what it is good for: if there
    are `admin_keys` it must be one of them; else `all_administer` decides.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        admin_keys: Sequence[str],
        refuse: ASGIApp,
        *,
        open_paths: Set[str],
        all_administer: bool,
    ) -> None:
        """`refuse` answers in place of `app`."""
        self._app = app
        self._refuse = refuse
        self._open_paths = open_paths
        self._callers = [(_digest(key.encode()), caller_id(key)) for key in (*admin_keys, *keys)]
        self._needs_key = bool(keys)
        self._admins = {caller_id(key) for key in admin_keys}
        self._all_administer = all_administer and not admin_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            caller = self._caller(scope)
            if caller is None and self._needs_key:
                await self._refuse(scope, receive, send)
                return
            state = scope.setdefault("state", {})
            state[_CALLER] = caller or ""
            state[_MAY_ADMINISTER] = self._all_administer or caller in self._admins
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
