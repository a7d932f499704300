"""A request the engine can be asked, and its run."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from frontend.continuation import TextDelta
from frontend.generation import generate, interleave
from frontend.metrics.request_record import RequestRecord
from frontend.prompt.prompt import Prompt, num_image_tokens
from ipc.messages import EngineRequest, ExtraKeySpan, SamplingParams

from .responses import PromptTokensDetails, Usage
from .serving import Serving
from .tool_calls import CallableTools


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is right, as far as can be known without the engine. Each of `prompts` gets `n` choices.

    `tools` are those whose calls are looked for in the output. `logprobs` and `prompt_logprobs` say how many likeliest
    tokens to show, if any. `prompt_texts` are to be echoed; empty if they are not. `scores_only`: no output was asked
    for; the engine makes one token nevertheless, which is neither shown nor counted. `received_s`: when work on it
    began, on the clock of `time.monotonic`.
    """

    model_name: str
    prompts: tuple[Prompt, ...]
    sampling_params: SamplingParams
    stop_strings: tuple[str, ...]
    include_stop: bool
    logprobs: int | None
    prompt_logprobs: int | None
    extra_key_spans: tuple[ExtraKeySpan, ...]
    priority: int
    include_usage: bool
    continuous_usage: bool
    scores_only: bool
    prompt_texts: tuple[str, ...] = ()
    tools: CallableTools | None = None
    received_s: float = field(default_factory=time.monotonic)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.sampling_params.n


class TokenCounts:
    """Adds up what the choices of one answer cost."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in prepared.prompts)
        self._image_tokens = sum(num_image_tokens(prompt.features) for prompt in prepared.prompts)
        self._completion_tokens = 0
        self._choices_per_prompt = prepared.sampling_params.n
        self._cached_tokens = [0] * len(prepared.prompts)

    def add(self, index: int, delta: TextDelta) -> None:
        self._completion_tokens += delta.num_tokens
        self._cached_tokens[index // self._choices_per_prompt] = delta.num_cached_tokens

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached_tokens), self._image_tokens),
        )


async def run(serving: Serving, prepared: PreparedRequest, answer_id: str) -> AsyncGenerator[tuple[int, TextDelta]]:
    """Ask the engine; yield `(index of the choice, delta)`. Raises what `generate` raises."""
    n = prepared.sampling_params.n
    requests = [
        EngineRequest(
            request_id=f"{answer_id}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling_params=prepared.sampling_params,
            extra_key_spans=(*prepared.extra_key_spans, *prompt.extra_key_spans),
            priority=prepared.priority,
            mm_features=prompt.features,
        )
        for index, prompt in enumerate(prepared.prompts)
    ]
    generations = [
        generate(
            serving.client,
            request,
            serving.new_detokenizer if prepared.tools is None else serving.new_detokenizer_of_calls,
            prepared.stop_strings,
            RequestRecord(serving.metrics.requests, request, prepared.received_s),
            include_stop=prepared.include_stop,
            features=prompt.inputs,
            scores_only=prepared.scores_only,
        )
        for request, prompt in zip(requests, prepared.prompts, strict=True)
    ]
    async with aclosing(interleave(generations)) as deltas:
        async for prompt_index, delta in deltas:
            yield prompt_index * n + delta.index, delta
