"""What a request may say of the prefix cache, whatever API it comes through: use it or not, and what to keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from ipc.vocabulary import MAX_KEPT_PREFIXES, MAX_KEPT_PRIORITY, MAX_KEPT_TTL_S, KeepPrefix

from .errors import PromptError

# By what `cache_control` calls them.
_TTLS_S = {"5m": 300.0, "1h": 3600.0}


class CacheOptions(Struct, forbid_unknown_fields=True, frozen=True):
    """The field `cache` of a request."""

    read: Annotated[
        bool | None, Meta(description="Use what is cached of the prompt; default true. With false it is computed anew.")
    ] = None
    write: Annotated[
        bool | None,
        Meta(
            description="Leave what is computed in the cache; default true. With false nobody finds it, and its blocks"
            " are the first to be used again."
        ),
    ] = None
    ttl_s: Annotated[
        Annotated[float, Meta(gt=0, le=MAX_KEPT_TTL_S)] | None,
        Meta(
            description="Keep the whole prompt cached for so many seconds after each use, at most a day"
            f" ({MAX_KEPT_TTL_S})."
        ),
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_KEPT_PRIORITY)] | None,
        Meta(
            description="With `ttl_s`: of what you keep, the lowest is given up first where your share of the cache"
            f" is used up; 0 (default) to {MAX_KEPT_PRIORITY}."
        ),
    ] = None


class CacheControl(Struct, forbid_unknown_fields=True, frozen=True):
    """`cache_control` of a part of a prompt: keep the prompt up to the end of that part."""

    type: Literal["ephemeral"]
    ttl: Annotated[
        Literal["5m", "1h"] | None, Meta(description="How long after each use; default `5m`, five minutes.")
    ] = None

    @property
    def ttl_s(self) -> float:
        return _TTLS_S[self.ttl or "5m"]


def check_cache_options(options: CacheOptions | None, breakpoints: Sequence[str] = ()) -> None:
    """Whether `cache` makes sense, beside the fields with a `cache_control`, which are named in `breakpoints`.

    Raises PromptError naming the field that makes none beside another, or is one too many to be kept.
    """
    options = options or CacheOptions()
    if options.priority is not None and options.ttl_s is None:
        raise PromptError("cache.priority is for what is kept: it needs cache.ttl_s", "cache.priority")
    kept = [*breakpoints, *([] if options.ttl_s is None else ["cache.ttl_s"])]
    if options.write is False and kept:
        raise PromptError(f"{kept[0]} asks to keep what cache.write = false does not leave in the cache", kept[0])
    if len(kept) > MAX_KEPT_PREFIXES:
        raise PromptError(
            f"{len(kept)} prefixes are to be kept (cache_control and cache.ttl_s); at most {MAX_KEPT_PREFIXES} are"
            " allowed",
            kept[MAX_KEPT_PREFIXES],
        )


def whole_prompt_kept(options: CacheOptions | None, num_tokens: int) -> tuple[KeepPrefix, ...]:
    """What `options` ask to keep of a prompt of `num_tokens`."""
    if options is None or options.ttl_s is None:
        return ()
    return (KeepPrefix(num_tokens, options.ttl_s, options.priority or 0),)
