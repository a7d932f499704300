"""What became of one request to an engine: observed once, when it has ended, and said in one line of the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from types import TracebackType
from typing import Literal, Self

from frontend.engine_pool import PooledStream
from frontend.prompt.prompt import num_image_tokens
from frontend.request_stream import RequestStream
from ipc.vocabulary import EngineRequest, RequestOutput, RequestTiming

from .families import EngineFamilies, RequestFamilies

logger = logging.getLogger(__name__)

FinishedReason = Literal["stop", "length", "abort", "error"]


class RequestRecord:
    """Use it around the consumption of a request's stream: `with RequestRecord(…) as record: record.follow(stream)`.

    Latencies are those of arrival, however slow the consumer is; tokens count when `count` hears of them. Left before
    all continuations had a finish reason, the request ended with `abort` if its consumer went away, else with `error`.
    A request that was never followed leaves no trace.
    """

    def __init__(self, families: RequestFamilies, request: EngineRequest, received_s: float) -> None:
        """`received_s`: when the request arrived at this server, on the clock of `time.monotonic`."""
        self._families = families
        self._request = request
        self._received_s = received_s
        self._stream: RequestStream | PooledStream | None = None
        self._first_arrival_s: float | None = None
        # By continuation.
        self._last_arrivals_s: dict[int, float] = {}
        self._timings: dict[int, RequestTiming] = {}
        self._num_tokens: defaultdict[int, int] = defaultdict(int)
        self._num_cached_tokens = 0
        self._num_finished = 0
        self._finish_reason: FinishedReason | None = None

    def follow(self, stream: RequestStream | PooledStream) -> None:
        """The request is on its way."""
        self._stream = stream
        stream.on_arrival = self._arrived

    @property
    def _engine(self) -> EngineFamilies:
        # Asked for each time: until its first token a request may move to another engine.
        assert self._stream is not None
        return self._families.of_engine(self._stream.engine_index)

    def _arrived(self, output: RequestOutput) -> None:
        num_tokens = len(output.new_token_ids)
        if output.timing is not None:
            self._timings[output.index] = output.timing
        if not num_tokens:
            return
        now_s = time.monotonic()
        engine = self._engine
        if self._first_arrival_s is None:
            self._first_arrival_s = now_s
            engine.time_to_first_token_s.observe(now_s - self._received_s)
        if (last_s := self._last_arrivals_s.get(output.index)) is not None:
            for _ in range(num_tokens):
                engine.inter_token_latency_s.observe((now_s - last_s) / num_tokens)
        self._last_arrivals_s[output.index] = now_s

    def count(self, index: int, num_tokens: int, num_cached_tokens: int, finish_reason: FinishedReason | None) -> None:
        """`num_tokens` more of continuation `index` were handed on."""
        if not self._num_tokens:
            self._count_prompt(self._engine, num_cached_tokens)
        self._num_tokens[index] += num_tokens
        self._engine.generation_tokens.inc(num_tokens)
        if finish_reason is not None:
            self._num_finished += 1
            self._finish_reason = finish_reason

    def _count_prompt(self, engine: EngineFamilies, num_cached_tokens: int) -> None:
        self._num_cached_tokens = num_cached_tokens
        num_prompt_tokens = len(self._request.prompt_token_ids)
        engine.prompt_tokens.inc(num_prompt_tokens)
        engine.prompt_tokens_computed.inc(num_prompt_tokens - num_cached_tokens)
        engine.prompt_tokens_hit.inc(num_cached_tokens)
        engine.prompt_tokens_cached.inc(num_cached_tokens)
        engine.prompt_tokens_cached_on_device.inc(num_cached_tokens)
        engine.prompt_image_tokens.inc(num_image_tokens(self._request.mm_features))
        self._families.tenants.count(self._request.tenant, num_prompt_tokens, num_cached_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stream is None:
            return
        if self._finish_reason is not None and self._num_finished == self._request.sampling_params.n:
            reason = self._finish_reason
        else:
            reason = "abort" if isinstance(exc, GeneratorExit | asyncio.CancelledError) else "error"
        self._engine.finished[reason].inc()
        now_s = time.monotonic()
        if self._num_tokens:
            self._observe_end(self._engine, now_s)
        ttft_s = None if self._first_arrival_s is None else round(self._first_arrival_s - self._received_s, 4)
        logger.info(
            "request_finished request_id=%s engine=%d adapter=%r finish_reason=%s prompt_tokens=%d cached_tokens=%d"
            " output_tokens=%d ttft_s=%s e2e_s=%.4f",
            self._request.request_id,
            self._stream.engine_index,
            self._request.adapter,
            reason,
            len(self._request.prompt_token_ids),
            self._num_cached_tokens,
            sum(self._num_tokens.values()),
            ttft_s,
            now_s - self._received_s,
        )

    def _observe_end(self, engine: EngineFamilies, now_s: float) -> None:
        params = self._request.sampling_params
        num_prompt_tokens = len(self._request.prompt_token_ids)
        max_num_tokens = max(self._num_tokens.values())
        engine.e2e_s.observe(now_s - self._received_s)
        engine.request_prompt_tokens.observe(num_prompt_tokens)
        engine.request_prefill_kv_computed_tokens.observe(num_prompt_tokens - self._num_cached_tokens)
        engine.request_generation_tokens.observe(sum(self._num_tokens.values()))
        engine.request_max_num_generation_tokens.observe(max_num_tokens)
        engine.request_params_n.observe(params.n)
        if params.max_tokens is not None:
            engine.request_params_max_tokens.observe(params.max_tokens)
        if not self._timings or self._first_arrival_s is None:
            return
        timings = self._timings.values()
        first = next(iter(timings))
        # Where the frontend ended it (a stop string, a client that left), the engine had no last word.
        seen_decode_s = max(self._last_arrivals_s.values()) - self._first_arrival_s
        decode_s = max(timing.decode_s for timing in timings) or seen_decode_s
        engine.queue_s.observe(first.queue_s)
        engine.prefill_s.observe(first.prefill_s)
        engine.decode_s.observe(decode_s)
        engine.inference_s.observe(first.prefill_s + decode_s)
        engine.request_num_preemptions.observe(sum(timing.num_preemptions for timing in timings))
        if max_num_tokens > 1:
            engine.time_per_output_token_s.observe(decode_s / (max_num_tokens - 1))
