"""`cache_salt`: requests share cached prefixes only with requests that carry the same salt."""

from __future__ import annotations

from ipc.messages import ExtraKeySpan

from .errors import PromptError

MAX_SALT_CHARACTERS = 128
# Peers and their routers put salts into cache keys and paths, where these have a meaning.
_FORBIDDEN = "@/\\\0"


def cache_salt_spans(salt: str | None) -> tuple[ExtraKeySpan, ...]:
    """The extra keys that isolate a request by `salt`: the first block mixes it in, chaining does the rest.

    Raises PromptError for an empty or too long salt and for one that holds `@`, `/`, a backslash or NUL.
    """
    if salt is None:
        return ()
    if not salt:
        raise PromptError("cache_salt must not be empty; leave it out to share the cache", "cache_salt")
    if len(salt) > MAX_SALT_CHARACTERS:
        raise PromptError(
            f"cache_salt has {len(salt)} characters; at most {MAX_SALT_CHARACTERS} are allowed", "cache_salt"
        )
    if any(character in _FORBIDDEN for character in salt):
        raise PromptError("cache_salt must not contain '@', '/', '\\' or NUL", "cache_salt")
    return (ExtraKeySpan(0, 1, "cache_salt", salt),)
