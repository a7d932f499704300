"""A request the engine can be asked, and its run."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from frontend.generation import TextDelta, generate, interleave
from frontend.metrics.request_record import RequestRecord
from ipc.messages import EngineRequest, ExtraKeySpan, SamplingParams

from .responses import PromptTokensDetails, Usage
from .serving import Serving


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is right, as far as can be known without the engine. Each of `prompts` gets a choice.

    `received_s`: when work on it began, on the clock of `time.monotonic`.
    """

    model_name: str
    prompts: tuple[list[int], ...]
    sampling_params: SamplingParams
    stop_strings: tuple[str, ...]
    extra_key_spans: tuple[ExtraKeySpan, ...]
    priority: int
    include_usage: bool
    received_s: float = field(default_factory=time.monotonic)


class TokenCounts:
    """Adds up what the choices of one answer cost."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._prompt_tokens = sum(len(prompt) for prompt in prepared.prompts)
        self._completion_tokens = 0
        self._cached_tokens = [0] * len(prepared.prompts)

    def add(self, index: int, delta: TextDelta) -> None:
        self._completion_tokens += delta.num_tokens
        self._cached_tokens[index] = delta.num_cached_tokens

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached_tokens)),
        )


def run(serving: Serving, prepared: PreparedRequest, answer_id: str) -> AsyncGenerator[tuple[int, TextDelta]]:
    """Ask the engine; yield `(index of the choice, delta)`. Raises what `generate` raises."""
    requests = [
        EngineRequest(
            request_id=f"{answer_id}-{index}",
            prompt_token_ids=prompt,
            sampling_params=prepared.sampling_params,
            extra_key_spans=prepared.extra_key_spans,
            priority=prepared.priority,
        )
        for index, prompt in enumerate(prepared.prompts)
    ]
    return interleave(
        [
            generate(
                serving.client,
                request,
                serving.new_detokenizer(),
                prepared.stop_strings,
                RequestRecord(serving.metrics.requests, request, prepared.received_s),
            )
            for request in requests
        ]
    )
