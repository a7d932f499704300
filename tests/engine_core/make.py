"""Small builders for engine-core tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_core.request import Request
from ipc.vocabulary import EngineRequest, ExtraKeySpan, SamplingParams


def make_request(
    request_id: str,
    token_ids: Sequence[int],
    *,
    max_tokens: int = 16,
    extra_key_spans: tuple[ExtraKeySpan, ...] = (),
    priority: int = 0,
    arrival_time_s: float = 0.0,
    read_prefix_cache: bool = True,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = True,
    **cache: Any,
) -> Request:
    """`cache`: more fields of `EngineRequest`."""
    source = EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids
        ),
        extra_key_spans=extra_key_spans,
        priority=priority,
        read_prefix_cache=read_prefix_cache,
        **cache,
    )
    return Request(source, max_tokens=max_tokens, seed=0, arrival_time_s=arrival_time_s)
