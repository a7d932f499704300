"""The engine core: scheduler, KV block pool, kernels and model, without sockets.

    from engine_core import EngineCore, EngineConfig, EngineRequest, SamplingParams

Names are loaded when they are first used, so that a process which only builds requests loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ipc.messages import EngineOutputs
    from ipc.stats import EngineStats, PrefixCacheReset
    from ipc.vocabulary import (
        AdapterInfo,
        CacheExplanation,
        CacheProbe,
        EngineCapabilities,
        EngineRequest,
        ExtraKeySpan,
        MultimodalFeature,
        RequestError,
        RequestOutput,
        SamplingParams,
        WantedFeature,
    )

    from .config import EngineConfig, LoraModule
    from .engine import EngineCore
    from .errors import AdapterError, EngineOverloadedError, InvalidConfigError, InvalidRequestError
    from .model.fingerprint import tokenizer_digest
    from .model.resolve import (
        BUILTIN_ADAPTERS,
        BUILTIN_MODELS,
        DEFAULT_MODEL,
        ModelNotFoundError,
        ResolvedModel,
        resolve_adapter,
        resolve_model,
    )

_HOMES = {
    "AdapterInfo": "ipc.vocabulary",
    "CacheExplanation": "ipc.vocabulary",
    "CacheProbe": "ipc.vocabulary",
    "EngineCapabilities": "ipc.vocabulary",
    "EngineOutputs": "ipc.messages",
    "EngineRequest": "ipc.vocabulary",
    "ExtraKeySpan": "ipc.vocabulary",
    "MultimodalFeature": "ipc.vocabulary",
    "RequestError": "ipc.vocabulary",
    "RequestOutput": "ipc.vocabulary",
    "SamplingParams": "ipc.vocabulary",
    "WantedFeature": "ipc.vocabulary",
    "EngineConfig": "engine_core.config",
    "LoraModule": "engine_core.config",
    "EngineCore": "engine_core.engine",
    "AdapterError": "engine_core.errors",
    "EngineOverloadedError": "engine_core.errors",
    "InvalidConfigError": "engine_core.errors",
    "InvalidRequestError": "engine_core.errors",
    "BUILTIN_ADAPTERS": "engine_core.model.resolve",
    "BUILTIN_MODELS": "engine_core.model.resolve",
    "DEFAULT_MODEL": "engine_core.model.resolve",
    "ModelNotFoundError": "engine_core.model.resolve",
    "ResolvedModel": "engine_core.model.resolve",
    "resolve_adapter": "engine_core.model.resolve",
    "resolve_model": "engine_core.model.resolve",
    "EngineStats": "ipc.stats",
    "PrefixCacheReset": "ipc.stats",
    "tokenizer_digest": "engine_core.model.fingerprint",
}

__all__ = [
    "BUILTIN_ADAPTERS",
    "BUILTIN_MODELS",
    "DEFAULT_MODEL",
    "AdapterError",
    "AdapterInfo",
    "CacheExplanation",
    "CacheProbe",
    "EngineCapabilities",
    "EngineConfig",
    "EngineCore",
    "EngineOutputs",
    "EngineOverloadedError",
    "EngineRequest",
    "EngineStats",
    "ExtraKeySpan",
    "InvalidConfigError",
    "InvalidRequestError",
    "LoraModule",
    "ModelNotFoundError",
    "MultimodalFeature",
    "PrefixCacheReset",
    "RequestError",
    "RequestOutput",
    "ResolvedModel",
    "SamplingParams",
    "WantedFeature",
    "resolve_adapter",
    "resolve_model",
    "tokenizer_digest",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
