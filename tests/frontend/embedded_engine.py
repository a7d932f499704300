"""A real engine core around a fake model, in this very process, behind the face of `EngineClient`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from engine_core import EngineConfig, EngineCore, InvalidRequestError
from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from ipc.messages import CacheProbe, EngineRequest, RequestError, RequestOutput
from tests.fake_runner import FakeRunner
from tests.frontend.scripted_engine import ScriptedEngine


class EmbeddedEngine(ScriptedEngine):
    """Computes one request after another. `core` is the engine; what is `lost` answers no call."""

    def __init__(self, num_blocks: int = 4096, **config: Any) -> None:
        super().__init__(self._compute)
        self.core = EngineCore(EngineConfig(**config), FakeRunner(num_blocks=num_blocks))
        self.capabilities = self.core.capabilities
        self.lost = False

    async def _compute(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        self.core.add_request(request)
        outputs: list[RequestOutput] = []
        while self.core.has_unfinished_requests():
            outputs += self.core.step().outputs
        for output in outputs:
            yield output

    async def probe_cache(
        self, request: EngineRequest, *, explain: bool = False, relative_end: int = 0, timeout_s: float
    ) -> CacheProbe:
        if self.lost:
            raise EngineUnavailableError("the engine was lost")
        try:
            return self.core.explain(request, relative_end=relative_end) if explain else self.core.probe(request)
        except InvalidRequestError as error:
            raise RequestRefusedError(RequestError("invalid", str(error), error.param)) from error
