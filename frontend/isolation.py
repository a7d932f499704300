"""`--cache-isolation`: whose requests share what is cached, and whose share of the cache they count to."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .api_key import API_KEY_ENV
from .prompt.cache_salt import AskedSalt, CacheSalt, PlacedSalt, asked_salt, salt_spans
from .prompt.chat import Chat
from .prompt.errors import PromptError
from .prompt.places import Place, check_place, place_named
from .prompt.prompt import Prompt

IsolationMode = Literal["none", "salt", "api-key"]

SALT_FROM = "cache_salt.from"


@dataclass(frozen=True, slots=True)
class Isolation:
    """What keeps a request apart from others.

    `salts` do so in the prefix cache. `tenant` is as in `EngineRequest`: who is counted. What the frontend remembers of
    prompts is kept for `memory_tenant`, those who have all of the salts in common.
    """

    salts: tuple[AskedSalt, ...] = ()
    tenant: str = ""
    memory_tenant: str = ""


def check_isolation(mode: IsolationMode, api_keys: Sequence[str]) -> None:
    """Raises ValueError if `mode` can isolate nobody on a server with `api_keys`."""
    if mode == "api-key" and not api_keys:
        raise ValueError(
            "--cache-isolation api-key keeps those apart who send different API keys, and this server asks for none:"
            f" set {API_KEY_ENV}"
        )


def isolate(mode: IsolationMode, caller: str, cache_salt: CacheSalt | None) -> Isolation:
    """Of a request with `cache_salt` that `caller` (see `api_key.caller_of`) sends.

    Raises PromptError: see `asked_salt`; for a salt where nobody is isolated, and for a place without one where no
    other is given.
    """
    asked = asked_salt(cache_salt)
    if mode == "none":
        if cache_salt is not None:
            raise PromptError(
                "cache_salt: on this server all requests share the cache (--cache-isolation none); leave it out",
                "cache_salt",
            )
        return Isolation(tenant=caller)
    if mode == "salt":
        if asked.salt is None:
            if cache_salt is not None:
                raise PromptError("cache_salt.salt is needed: there is no other salt here", "cache_salt.salt")
            return Isolation()
        return Isolation((asked,), asked.salt, asked.salt)
    if not caller:
        raise ValueError("a caller without an API key cannot be isolated by it")
    if asked.salt is None:
        return Isolation((AskedSalt(caller, asked.start),), caller, caller)
    divided = _divided(caller, asked.salt)
    if asked.start in (None, 0):
        return Isolation((AskedSalt(divided, asked.start),), caller, divided)
    return Isolation((AskedSalt(caller), asked), caller, divided)


def salts_in_chat(salts: Iterable[AskedSalt], chat: Chat) -> list[PlacedSalt]:
    """Raises PromptError naming `cache_salt.from`: it is no place of `chat`."""

    def find(name: str) -> Place:
        check_place(place := place_named(name, SALT_FROM), chat, SALT_FROM)
        return place

    return salts_in_places(salts, find)


def salts_in_places(salts: Iterable[AskedSalt], find: Callable[[str], Place]) -> list[PlacedSalt]:
    """`find` tells the place of a name. Raises what it raises, and PromptError for a number of a token."""
    placed = []
    for asked in salts:
        start: Place | int = 0
        if isinstance(asked.start, int):
            raise PromptError(
                f"cache_salt.from is the number {asked.start}; in a chat it names a place, such as 'messages[1]'",
                SALT_FROM,
            )
        if asked.start is not None:
            start = find(asked.start)
        placed.append(PlacedSalt(_salt_of(asked), start))
    return placed


def salts_in_tokens(salts: Iterable[AskedSalt]) -> list[PlacedSalt]:
    """Raises PromptError naming `cache_salt.from`: it is no number of a token."""
    placed = []
    for asked in salts:
        if isinstance(asked.start, str):
            raise PromptError(
                f"cache_salt.from is {asked.start[:100]!r}; without messages it is the number of a token", SALT_FROM
            )
        placed.append(PlacedSalt(_salt_of(asked), asked.start or 0))
    return placed


def places_of_salts(salts: Iterable[PlacedSalt]) -> list[Place]:
    """Those that a prompt is to have its tokens found of."""
    return [placed.start for placed in salts if not isinstance(placed.start, int)]


def isolated(prompt: Prompt, salts: Sequence[PlacedSalt]) -> Prompt:
    """`prompt` salted, which knows the places of `salts`. Raises as `salt_spans`."""
    spans = salt_spans(salts, len(prompt.token_ids), prompt.places)
    return replace(prompt, extra_key_spans=(*spans, *prompt.extra_key_spans))


def _salt_of(asked: AskedSalt) -> str:
    assert asked.salt is not None  # of those of an `Isolation`
    return asked.salt


def _divided(caller: str, cache_salt: str) -> str:
    """The salt of a part of what is the caller's. One salt, since consumers of KV events expect one."""
    return hmac.new(caller.encode(), b"foreword cache_salt\0" + cache_salt.encode(), hashlib.sha256).hexdigest()
