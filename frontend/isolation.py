"""`--cache-isolation`: whose requests share what is cached, and whose share of the cache they count to."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ipc.messages import ExtraKeySpan

from .api_key import API_KEY_ENV
from .prompt.cache_salt import cache_salt_spans
from .prompt.errors import PromptError

IsolationMode = Literal["none", "salt", "api-key"]


@dataclass(frozen=True, slots=True)
class Isolation:
    """What keeps a request apart from others.

    `extra_key_spans` do so in the prefix cache. `tenant` is as in `EngineRequest`: who is counted. What the frontend
    remembers of prompts is kept for `memory_tenant`: those whose requests share all that is cached.
    """

    extra_key_spans: tuple[ExtraKeySpan, ...] = ()
    tenant: str = ""
    memory_tenant: str = ""


def check_isolation(mode: IsolationMode, api_keys: Sequence[str]) -> None:
    """Raises ValueError if `mode` can isolate nobody on a server with `api_keys`."""
    if mode == "api-key" and not api_keys:
        raise ValueError(
            "--cache-isolation api-key keeps those apart who send different API keys, and this server asks for none:"
            f" set {API_KEY_ENV}"
        )


def isolate(mode: IsolationMode, caller: str, cache_salt: str | None) -> Isolation:
    """Of a request with `cache_salt` that `caller` (see `api_key.caller_of`) sends.

    Raises PromptError: see `cache_salt_spans`; and for a salt where nobody is isolated.
    """
    spans = cache_salt_spans(cache_salt)
    if mode == "salt":
        return Isolation(spans, cache_salt or "", cache_salt or "")
    if mode == "none":
        if cache_salt is not None:
            raise PromptError(
                "cache_salt: on this server all requests share the cache (--cache-isolation none); leave it out",
                "cache_salt",
            )
        return Isolation(tenant=caller)
    if not caller:
        raise ValueError("a caller without an API key cannot be isolated by it")
    salt = caller if cache_salt is None else _divided(caller, cache_salt)
    return Isolation(cache_salt_spans(salt), caller, salt)


def _divided(caller: str, cache_salt: str) -> str:
    """The salt of a part of what is the caller's. One salt, since consumers of KV events expect one."""
    return hmac.new(caller.encode(), b"foreword cache_salt\0" + cache_salt.encode(), hashlib.sha256).hexdigest()
