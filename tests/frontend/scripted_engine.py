"""An engine that says what a test wants it to say, behind the face of `EngineClient`."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal

from frontend.engine_calls import EngineSnapshot
from frontend.engine_errors import EngineUnavailableError
from ipc.messages import EngineCapabilities, EngineRequest, RequestOutput

Script = Callable[[EngineRequest], AsyncGenerator[RequestOutput]]

MAX_MODEL_LEN = 256
VOCAB_SIZE = 512


class ScriptedStream:
    """The outputs of one request; see `RequestStream`."""

    def __init__(self, outputs: AsyncGenerator[RequestOutput]) -> None:
        self.engine_index = 0
        self.on_arrival: Callable[[RequestOutput], None] | None = None
        self._outputs = outputs

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> RequestOutput:
        output = await anext(self._outputs)
        if self.on_arrival is not None:
            self.on_arrival(output)
        return output


class Drops:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()


class ScriptedEngine:
    """Runs `script` per request. `requests` and `aborted` (ids) are what a real engine would have been told."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
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
        self.index = 0
        self.num_restarts = 0
        self.drops = Drops()

    async def stats(self, timeout_s: float) -> EngineSnapshot:
        raise EngineUnavailableError("this engine has no numbers")

    @asynccontextmanager
    async def submit(self, request: EngineRequest) -> AsyncIterator[ScriptedStream]:
        self.requests.append(request)
        self.num_in_flight += 1
        finished = False

        async def outputs() -> AsyncGenerator[RequestOutput]:
            nonlocal finished
            async with aclosing(self.script(request)) as script:
                async for output in script:
                    finished = output.finish_reason is not None
                    yield output

        try:
            async with aclosing(outputs()) as stream:
                yield ScriptedStream(stream)
        finally:
            self.num_in_flight -= 1
            if not finished:
                self.aborted.append(request.request_id)


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


def fails_after(token_ids: Sequence[int], error: Exception) -> Script:
    """A script: `token_ids`, then `error`."""

    async def script(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        for token_id in token_ids:
            yield RequestOutput(request.request_id, [token_id])
        raise error

    return script
