"""Limits of what a request may ask of its output, whatever API it comes through."""

from __future__ import annotations

from collections.abc import Sequence

from ipc.vocabulary import EngineCapabilities

from .errors import invalid_request

MAX_STOP_STRINGS = 16


def context_limit(capabilities: EngineCapabilities) -> str:
    """What bounds the tokens of a request, with the true numbers."""
    limit, num_blocks, block_size = capabilities.max_model_len, capabilities.num_blocks, capabilities.block_size
    if capabilities.is_limited_by_pool:
        holder = f"this server's KV cache holds {limit} tokens ({num_blocks} blocks of {block_size})"
    else:
        holder = f"the context holds {limit} tokens (max_model_len)"
    return f"{holder}, prompt and output together"


def check_max_tokens(max_tokens: int, field: str, capabilities: EngineCapabilities, *, least: int) -> None:
    """Raises ApiError (400) naming `field` for fewer than `least` tokens, and for more than any request may have."""
    if max_tokens < least:
        raise invalid_request(f"{field} must be at least {least}, got {max_tokens}", field)
    if max_tokens > capabilities.max_model_len:
        raise invalid_request(f"{field} is {max_tokens}, but {context_limit(capabilities)}", field)


def check_stop_strings(stops: Sequence[str], field: str) -> tuple[str, ...]:
    """`stops` as they came. Raises ApiError (400) naming `field` for too many, and for empty ones."""
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid_request(f"{field} has {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed", field)
    if "" in stops:
        raise invalid_request(f"{field} must not contain an empty string", field)
    return tuple(stops)
