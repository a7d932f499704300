"""A request the engine can be asked, and its run."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from ipc.vocabulary import CacheReport, EngineRequest, MissReason, SamplingParams

from .choice import CallableTools
from .continuation import TextDelta
from .generation import generate, interleave
from .metrics.request_record import RequestRecord
from .prompt.prompt import Prompt, num_image_tokens
from .serving import Serving


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is right, as far as can be known without the engine. Each of `prompts` gets `n` choices.

    `tools` are those whose calls are looked for in the output. `logprobs` and `prompt_logprobs` say how many likeliest
    tokens to show, if any. `prompt_texts` are to be echoed; empty if they are not. `scores_only`: no output was asked
    for; the engine makes one token nevertheless, which is neither shown nor counted. `read_prefix_cache`,
    `write_prefix_cache`, `tenant` and `adapter` are as in `EngineRequest`. `received_s`: when work on it began, on the
    clock of `time.monotonic`.
    """

    model_name: str
    prompts: tuple[Prompt, ...]
    sampling_params: SamplingParams
    stop_strings: tuple[str, ...]
    include_stop: bool
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int
    include_usage: bool
    continuous_usage: bool
    scores_only: bool
    prompt_texts: tuple[str, ...] = ()
    tools: CallableTools | None = None
    read_prefix_cache: bool = True
    write_prefix_cache: bool = True
    tenant: str = ""
    adapter: str = ""
    received_s: float = field(default_factory=time.monotonic)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.sampling_params.n


class TokenCounts:
    """Adds up what the choices of one answer cost, and what the cache did for its prompts.

    Attributes:
        prompt_tokens: of all prompts, each once; `image_tokens` of them stand for pictures.
        completion_tokens: of all choices so far.
        cache_reports: what the cache did for each prompt that has a token.
    """

    def __init__(self, prepared: PreparedRequest) -> None:
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt in prepared.prompts)
        self.image_tokens = sum(num_image_tokens(prompt.features) for prompt in prepared.prompts)
        self.completion_tokens = 0
        self._prompts = prepared.prompts
        self._choices_per_prompt = prepared.sampling_params.n
        # By prompt, of those that have a token.
        self._cached_tokens: dict[int, int] = {}
        self.cache_reports: dict[int, CacheReport] = {}

    def add(self, index: int, delta: TextDelta) -> None:
        self.completion_tokens += delta.num_tokens
        prompt_index = index // self._choices_per_prompt
        self._cached_tokens[prompt_index] = delta.num_cached_tokens
        if delta.cache is not None:
            self.cache_reports[prompt_index] = delta.cache

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were found in the cache."""
        return sum(self._cached_tokens.values())

    @property
    def looked_up_tokens(self) -> int:
        """Tokens of those prompts that have a token: what `cached_tokens` are a part of so far."""
        return sum(len(self._prompts[index].token_ids) for index in self._cached_tokens)

    @property
    def miss_reason(self) -> MissReason | None:
        """Why the first prompt that was not all found was not; "none" if all were, None while no prompt has told."""
        reasons = [report.miss_reason for _, report in sorted(self.cache_reports.items())]
        return next((reason for reason in reasons if reason != "none"), "none" if reasons else None)

    @property
    def kept_tokens(self) -> KeptTokens | None:
        """None where nothing was to be kept, or it is not known yet."""
        kept = KeptTokens(0, 0)
        for index, report in self.cache_reports.items():
            if report.num_kept_tokens:
                # They are beginnings of one prompt: the longest has the others in it.
                kept.asked += max(keep.num_tokens for keep in self._prompts[index].keep)
                kept.kept += max(report.num_kept_tokens)
        return kept if kept.asked else None


@dataclass(slots=True)
class KeptTokens:
    """Of the prompts, how many tokens were asked to be kept in the cache, and how many are."""

    asked: int
    kept: int


def engine_requests(prepared: PreparedRequest, answer_id: str) -> list[EngineRequest]:
    """What the engine is asked, one request for each prompt."""
    return [
        EngineRequest(
            request_id=f"{answer_id}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling_params=prepared.sampling_params,
            extra_key_spans=prompt.extra_key_spans,
            priority=prepared.priority,
            mm_features=prompt.features,
            read_prefix_cache=prepared.read_prefix_cache,
            write_prefix_cache=prepared.write_prefix_cache,
            keep=prompt.keep,
            tenant=prepared.tenant,
            adapter=prepared.adapter,
        )
        for index, prompt in enumerate(prepared.prompts)
    ]


async def run(serving: Serving, prepared: PreparedRequest, answer_id: str) -> AsyncGenerator[tuple[int, TextDelta]]:
    """Ask the engine; yield `(index of the choice, delta)`. Raises what `generate` raises."""
    n = prepared.sampling_params.n
    requests = engine_requests(prepared, answer_id)
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
