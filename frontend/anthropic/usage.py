"""What an answer cost: tokens read from the cache, tokens that are kept there now, and the others."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from frontend.prepared import TokenCounts
from ipc.vocabulary import KeepPrefix

_HOUR_S = 3600


class CacheCreation(Struct):
    """Tokens that were computed and are kept, by how long: less than an hour, or more."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Struct):
    """`input_tokens`, `cache_creation_input_tokens` and `cache_read_input_tokens` are together the prompt's tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int


class DeltaUsage(Struct):
    """The same at the end of a stream."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


def delta_usage(usage: MessageUsage) -> DeltaUsage:
    return DeltaUsage(
        usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens, usage.output_tokens
    )


def usage_of(counts: TokenCounts, keep: Sequence[KeepPrefix]) -> MessageUsage:
    """Of an answer to one prompt whose first token is known. `keep` is what was to be kept of the prompt."""
    read = counts.cached_tokens
    report = counts.cache_reports.get(0)
    created = _created(read, keep, () if report is None else report.num_kept_tokens)
    num_created = created.ephemeral_5m_input_tokens + created.ephemeral_1h_input_tokens
    return MessageUsage(
        input_tokens=counts.prompt_tokens - read - num_created,
        cache_creation_input_tokens=num_created,
        cache_read_input_tokens=read,
        cache_creation=created,
        output_tokens=counts.completion_tokens,
    )


def _created(read: int, keep: Sequence[KeepPrefix], num_kept_tokens: Sequence[int]) -> CacheCreation:
    """Each token that was not read counts once, for the first prefix that holds and keeps it."""
    created = CacheCreation(0, 0)
    counted = read
    for prefix, num_kept in sorted(zip(keep, num_kept_tokens), key=lambda pair: pair[0].num_tokens):
        num_new = max(num_kept - counted, 0)
        if prefix.ttl_s < _HOUR_S:
            created.ephemeral_5m_input_tokens += num_new
        else:
            created.ephemeral_1h_input_tokens += num_new
        counted += num_new
    return created
