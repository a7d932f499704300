"""`cache_salt`: requests share cached prefixes only with requests that carry the same salt.

A salt counts from the beginning of the prompt, or from a later place: what comes before that is shared by all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ipc.vocabulary import ExtraKeySpan

from .errors import PromptError
from .places import Place, TokenRange

MAX_SALT_CHARACTERS = 128
# Peers and their routers put salts into cache keys and paths, where these have a meaning.
_FORBIDDEN = "@/\\\0"


class RangedSalt(Struct, forbid_unknown_fields=True, frozen=True):
    """A salt that counts from a place on."""

    salt: Annotated[str | None, Meta(description="As the string alone.")] = None
    from_: Annotated[
        str | Annotated[int, Meta(ge=0, le=2**63 - 1)] | None,
        Meta(
            description="What comes before is shared by all. In a chat `messages[1]`, `messages[1].content[0]` or"
            " `tools[0]`; in a completion the number of a token. Default: the beginning."
        ),
    ] = msgspec.field(name="from", default=None)


CacheSalt = str | RangedSalt


@dataclass(frozen=True, slots=True)
class AskedSalt:
    """What a request says of its salt. `start` is None at the beginning; else as in `RangedSalt`."""

    salt: str | None = None
    start: str | int | None = None


@dataclass(frozen=True, slots=True)
class PlacedSalt:
    """A salt, and the place or the token of the prompt from which on it counts."""

    salt: str
    start: Place | int = 0


def asked_salt(cache_salt: CacheSalt | None) -> AskedSalt:
    """What `cache_salt` says.

    Raises PromptError for an empty or too long salt and for one that holds `@`, `/`, a backslash or NUL.
    """
    if isinstance(cache_salt, RangedSalt):
        _check(cache_salt.salt, "cache_salt.salt")
        return AskedSalt(cache_salt.salt, cache_salt.from_)
    _check(cache_salt, "cache_salt")
    return AskedSalt(cache_salt)


def salt_spans(
    salts: Sequence[PlacedSalt], num_tokens: int, places: Mapping[Place, TokenRange]
) -> tuple[ExtraKeySpan, ...]:
    """The extra keys that isolate a prompt of `num_tokens` tokens by `salts`, which `places` has the places of.

    One token mixes a salt in; chaining does the rest. A place that begins behind the last token, since it shows none,
    begins there: a prompt whose salt is in none of its blocks would be isolated from nobody.

    Raises PromptError: a salt is to count from a token that the prompt has not.
    """
    return tuple(
        ExtraKeySpan(start, start + 1, "cache_salt", placed.salt)
        for placed in salts
        for start in [_start(placed.start, num_tokens, places)]
    )


def _start(start: Place | int, num_tokens: int, places: Mapping[Place, TokenRange]) -> int:
    if not isinstance(start, int):
        return max(0, min(places[start].start, num_tokens - 1))
    if start and start >= num_tokens:
        raise PromptError(
            f"cache_salt.from is {start}, but the prompt has {num_tokens} tokens; they are counted from 0",
            "cache_salt.from",
        )
    return start


def _check(salt: str | None, field: str) -> None:
    if salt is None:
        return
    if not salt:
        raise PromptError(f"{field} must not be empty; leave it out to share the cache", field)
    if len(salt) > MAX_SALT_CHARACTERS:
        raise PromptError(f"{field} has {len(salt)} characters; at most {MAX_SALT_CHARACTERS} are allowed", field)
    if any(character in _FORBIDDEN for character in salt):
        raise PromptError(f"{field} must not contain '@', '/', '\\' or NUL", field)
