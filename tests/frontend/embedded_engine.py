"""A real engine core around a fake model, in this very process, behind the face of `EngineClient`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from engine_core import EngineConfig, EngineCore, InvalidRequestError
from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from ipc.vocabulary import CacheProbe, EngineRequest, RequestError, RequestOutput
from tests.fake_runner import FakeRunner
from tests.frontend.scripted_engine import ScriptedEngine
from tests.pictures_in_prompts import PICTURES


class EmbeddedEngine(ScriptedEngine):
    """Computes one request after another. `core` is the engine; what is `lost` answers no call.

    Arguments are `FakeRunner`'s and `EngineConfig`'s.
    """

    def __init__(self, num_blocks: int = 4096, *, takes_pictures: bool = False, **config: Any) -> None:
        super().__init__(self._compute)
        self._runner = FakeRunner(num_blocks=num_blocks, multimodal=PICTURES if takes_pictures else None)
        self._runner.info = replace(self._runner.info, vocab_size=1 << 20)
        self._config = EngineConfig(**config)
        self.start_anew()
        self.capabilities = self.core.capabilities

    def start_anew(self) -> None:
        """It knows nothing, and is not lost."""
        self.core = EngineCore(self._config, self._runner)
        self.engines = [self]
        self.lost = False

    async def _compute(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        self.core.add_request(request)
        outputs: list[RequestOutput] = []
        while self.core.has_unfinished_requests():
            for wanted in self.core.take_wanted():
                source = self.sources[-1]
                assert source is not None
                self.core.supply_feature(wanted.request_id, wanted.key, await source.inputs(wanted.key))
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
