"""An engine that says what a test wants it to say, behind the face of `EngineClient`."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal

from frontend.engine_calls import EngineSnapshot
from frontend.engine_errors import EngineUnavailableError
from frontend.feature_supply import FeatureSource
from frontend.pooled_adapters import PooledAdapters
from ipc.stats import PrefixCacheReset
from ipc.vocabulary import AdapterInfo, EngineCapabilities, EngineRequest, RequestOutput, TokenLogprob

Script = Callable[[EngineRequest], AsyncGenerator[RequestOutput]]

MAX_MODEL_LEN = 256
VOCAB_SIZE = 512


class Drops:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()


class ScriptedEngine:
    """Runs `script` per request. `requests`, `aborted` (ids) and `aborted_continuations` (ids with an index) are what a
    real engine would have been told; `sources[i]` has the pictures of `requests[i]`.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[EngineRequest] = []
        self.sources: list[FeatureSource | None] = []
        self.aborted: list[str] = []
        self.aborted_continuations: list[tuple[str, int]] = []
        self.state: Literal["connecting", "ready", "down"] = "ready"
        self.down_reason: str | None = None
        self.capabilities = EngineCapabilities(
            model="scripted",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            block_size=16,
            num_blocks=64,
            hash_algo="sha256",
            cache_namespace="00",
        )
        self.num_in_flight = 0
        self.num_other_requests = 0
        self.engines = [self]
        self.index = 0
        self.num_restarts = 0
        self.drops = Drops()
        self.reset_result = PrefixCacheReset(0)
        self.num_features_supplied = 0
        self.num_feature_bytes_supplied = 0
        self.loaded_adapters: dict[str, AdapterInfo] = {}
        self.on_adapters: Any = None
        self.adapters = PooledAdapters([self])  # type: ignore[list-item]

    @property
    def is_connected(self) -> bool:
        return self.state == "ready"

    @property
    def calls(self) -> ScriptedEngine:
        """What it is asked it answers itself, as far as it has an answer."""
        return self

    async def stats(self, timeout_s: float) -> EngineSnapshot:
        raise EngineUnavailableError("this engine has no numbers")

    async def reset_prefix_cache(self, *, reset_running_requests: bool, timeout_s: float) -> PrefixCacheReset:
        if not self.is_connected:
            raise EngineUnavailableError(self.down_reason)
        return self.reset_result

    @asynccontextmanager
    async def submit(
        self, request: EngineRequest, features: FeatureSource | None = None
    ) -> AsyncIterator[ScriptedStream]:
        self.requests.append(request)
        self.sources.append(features)
        self.num_in_flight += 1
        stream = ScriptedStream(request.sampling_params.n)
        try:
            async with aclosing(self.script(request)) as outputs:
                stream.outputs = outputs
                yield stream
        finally:
            self.num_in_flight -= 1
            self.aborted_continuations += [(request.request_id, index) for index in stream.aborted]
            if not stream.is_finished:
                self.aborted.append(request.request_id)


class ScriptedStream:
    """Of `outputs`, those that the consumer has not aborted; see `RequestStream`."""

    def __init__(self, num_continuations: int) -> None:
        self.engine_index = 0
        self.on_arrival: Callable[[RequestOutput], None] | None = None
        self.outputs: AsyncIterator[RequestOutput]
        self.unfinished = set(range(num_continuations))
        self.aborted: list[int] = []
        self.is_finished = False

    def abort_continuation(self, index: int) -> None:
        self.unfinished.remove(index)
        if self.unfinished:
            self.aborted.append(index)

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while (output := await anext(self.outputs)).index not in self.unfinished:
            pass
        if self.on_arrival is not None:
            self.on_arrival(output)
        if output.finish_reason is not None:
            self.unfinished.remove(output.index)
            self.is_finished = not self.unfinished and not self.aborted
        return output


def says(
    token_ids: Sequence[int], *, finish_reason: Any = "stop", num_cached_tokens: int = 0, group: int = 1
) -> Script:
    """A script: `token_ids`, `group` per output. With "stop", `token_ids[-1]` is the token that ended it."""

    async def script(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        for start in range(0, len(token_ids), group):
            last = start + group >= len(token_ids)
            yield RequestOutput(
                request.request_id,
                list(token_ids[start : start + group]),
                num_cached_tokens,
                finish_reason if last else None,
            )

    return script


def continues(*continuations: Sequence[int], group: int = 1, finish_reason: Any = "stop") -> Script:
    """A script: `continuations[i]` is what continuation `i` says, `group` tokens per output, in turns.

    The first one is an output ahead, as in an engine. Log-probabilities, where asked for, are `scored`.
    """

    async def script(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        params = request.sampling_params
        turns = [
            (start + group * (index > 0), index, start)
            for index in range(params.n)
            for start in range(0, len(continuations[index]), group)
        ]
        for _, index, start in sorted(turns):
            token_ids = list(continuations[index][start : start + group])
            output = RequestOutput(request.request_id, token_ids, index=index)
            if start + group >= len(continuations[index]):
                output.finish_reason = finish_reason
            if params.logprobs is not None:
                output.logprobs = [scored(token_id, params.logprobs) for token_id in token_ids]
            if params.prompt_logprobs is not None and index == start == 0:
                rest = request.prompt_token_ids[1:]
                output.prompt_logprobs = [None, *(scored(token_id, params.prompt_logprobs) for token_id in rest)]
            yield output

    return script


def scored(token_id: int, num_top_tokens: int) -> TokenLogprob:
    """The second likeliest token, as a function of its id."""
    logprob = -0.125 * (token_id % 32 + 2)
    top = [((token_id + 1) % VOCAB_SIZE, logprob + 0.125), (token_id, logprob)]
    top += [((token_id + i) % VOCAB_SIZE, logprob - i) for i in range(2, num_top_tokens)]
    return TokenLogprob(token_id, logprob, 2, top[:num_top_tokens])


def fails_after(token_ids: Sequence[int], error: Exception) -> Script:
    """A script: `token_ids`, then `error`."""

    async def script(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        for token_id in token_ids:
            yield RequestOutput(request.request_id, [token_id])
        raise error

    return script
