"""What a frontend tells Prometheus: its requests as it saw them, its engines as they count themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector

from frontend.engine_client import EngineClient

from .engines import EngineCollector
from .families import RequestFamilies
from .own_work import OF_PICTURES, OF_TOKENIZATION, OwnWorkCollector

if TYPE_CHECKING:
    from frontend.prompt.piecewise import TokenizationStats
    from multimodal import PictureStats

__all__ = ["Metrics"]


class Metrics:
    """Everything `/metrics` shows, in a registry of its own.

    Args:
        engines: their order does not matter; the label `engine` is each one's `index`.
        model_name: the label `model_name`.
        tokenization: how much was tokenized.
        pictures: what was done with pictures; None for models that take none.
        names_adapters: whether whoever may look here may know which LoRA adapters are asked for.

    Attributes:
        requests: the frontend observes what becomes of its requests here.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        model_name: str,
        tokenization: TokenizationStats,
        pictures: PictureStats | None = None,
        *,
        names_adapters: bool = False,
    ) -> None:
        self.registry = CollectorRegistry()
        self.requests = RequestFamilies(self.registry, model_name, [engine.index for engine in engines])
        self._engines = EngineCollector(engines, model_name, names_adapters=names_adapters)
        self.registry.register(self._engines)
        self.registry.register(OwnWorkCollector(OF_TOKENIZATION, tokenization, model_name))
        if pictures is not None:
            self.registry.register(OwnWorkCollector(OF_PICTURES, pictures, model_name))
        ProcessCollector(registry=self.registry)

    async def refresh(self) -> None:
        """Ask the engines how they are. An engine that does not answer shows its last known counters."""
        await self._engines.refresh()
