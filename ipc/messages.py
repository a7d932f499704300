"""Every message between a frontend and an engine core.

Encoded as what they are made of is (`ipc.vocabulary`). The protocol version and the engine's epoch stand in the header
frame (`ipc.codec`), not here.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct, field

from .stats import EngineStats, PrefixCacheReset
from .vocabulary import (
    AdapterInfo,
    CacheProbe,
    EngineCapabilities,
    EngineRequest,
    RequestError,
    RequestOutput,
    WantedFeature,
)


class Hello(Struct, array_like=True, tag="hello", frozen=True):
    """Frontend → engine: I am here. Answered by `Welcome` or `Refused`; the epoch in its header is 0."""


class Welcome(Struct, array_like=True, tag="welcome", frozen=True):
    """Engine → frontend: the header's epoch is the one to use from now on.

    `hello_sequence` is the number of the `Hello` this answers; an answer to any other opens no session. `adapters` are
    those loaded now; `Adapters` follows whenever that changes.
    """

    capabilities: EngineCapabilities
    hello_sequence: int
    adapters: list[AdapterInfo] = []


class Refused(Struct, array_like=True, tag="refused", frozen=True):
    """Engine → frontend: no session, and why (for instance another protocol version)."""

    reason: str


class AddRequest(Struct, array_like=True, tag="add", frozen=True):
    """Frontend → engine."""

    request: EngineRequest


class AbortRequests(Struct, array_like=True, tag="abort", frozen=True):
    """Frontend → engine. Unknown ids are ignored: they may have finished meanwhile.

    `continuations`, `(request id, index)` each, end singly, from the request's first output on; the others run on. When
    the last one ends so, no output says that the request is over: its sender aborts it as a whole to free its id.
    """

    request_ids: list[str]
    continuations: list[tuple[str, int]] = []


class Heartbeat(Struct, array_like=True, tag="heartbeat", frozen=True):
    """Both ways, about once a second, from the thread that receives: alive, however long a step takes.

    An engine adds how many unfinished requests it has of other frontends, and whether it takes no new ones because it
    is about to stop; that it tells at once.
    """

    num_other_requests: int = 0
    is_draining: bool = False


class Goodbye(Struct, array_like=True, tag="goodbye", frozen=True):
    """Both ways: the sender leaves; whatever it had in flight is over."""


class GetStats(Struct, array_like=True, tag="get_stats", frozen=True):
    """Frontend → engine: how are you? Answered by `Stats`, however long the present step takes.

    `call_id` is unique among its sender's unanswered calls; the answer repeats it.
    """

    call_id: int


class Stats(Struct, array_like=True, tag="stats", frozen=True):
    """Engine → frontend. `dropped_messages`: what the engine received and did not use, by reason, since its start."""

    call_id: int
    stats: EngineStats
    dropped_messages: dict[str, int]


class ResetPrefixCache(Struct, array_like=True, tag="reset_prefix_cache", frozen=True):
    """Frontend → engine: forget every cached prefix, after the present step. Answered by `PrefixCacheWasReset`.

    While requests hold blocks nothing happens, unless `reset_running_requests` preempts them first.
    """

    call_id: int
    reset_running_requests: bool = False


class PrefixCacheWasReset(Struct, array_like=True, tag="prefix_cache_was_reset", frozen=True):
    """Engine → frontend."""

    call_id: int
    result: PrefixCacheReset


class ProbeCache(Struct, array_like=True, tag="probe_cache", frozen=True):
    """Frontend → engine: what would `request` find, between this step and the next? Answered by `CacheProbed`.

    Nothing is computed or changed. With `explain`, how its longest cached relative goes on is told as well, up to token
    `relative_end` of the sequence.
    """

    call_id: int
    request: EngineRequest
    explain: bool = False
    relative_end: int = 0


class CacheProbed(Struct, array_like=True, tag="cache_probed", frozen=True):
    """Engine → frontend. `error` says why the request could never run here; without it there is a `probe`."""

    call_id: int
    probe: CacheProbe | None = None
    error: RequestError | None = None


class LoadAdapter(Struct, array_like=True, tag="load_adapter", frozen=True):
    """Frontend → engine: read the LoRA adapter in the directory `path` of the engine's machine, below its `lora_root`,
    and let requests ask for it as `name`. Steps go on meanwhile. Answered by `AdapterAnswer`.

    A name that is taken is refused, unless its adapter is the same, or `replaces`: requests that were prepared with the
    old one keep it. With a `digest` no other weights are accepted.
    """

    call_id: int
    name: str
    path: str
    replaces: bool = False
    digest: str | None = None


class UnloadAdapter(Struct, array_like=True, tag="unload_adapter", frozen=True):
    """Frontend → engine: no further request may ask for `name`; those that did keep it. Answered by `AdapterAnswer`."""

    call_id: int
    name: str


class AdapterAnswer(Struct, array_like=True, tag="adapter_answer", frozen=True):
    """Engine → frontend: what was loaded or unloaded, or why not.

    The `reason` of an `invalid` error is `lora_disabled`, `outside_lora_root` (or there is none), `path_not_found`,
    `invalid_adapter`, `invalid_name`, `name_taken`, `unknown_adapter`, `too_many_adapters` or `other_weights` (than
    `digest`); its `param` is `lora_name` or `lora_path`. An `overloaded` one says that too many such calls wait.
    """

    call_id: int
    adapter: AdapterInfo | None = None
    error: RequestError | None = None


class Adapters(Struct, array_like=True, tag="adapters", frozen=True):
    """Engine → frontend: these are loaded now, and no others. Comes before the `AdapterAnswer` of who caused it."""

    adapters: list[AdapterInfo]


class WantFeatures(Struct, array_like=True, tag="want_features", frozen=True):
    """Engine → frontend: neither prefix cache nor encoder cache has these. Each is answered by one `SupplyFeature`,
    unless its request is over.
    """

    features: list[WantedFeature]


class SupplyFeature(Struct, array_like=True, tag="supply_feature", frozen=True):
    """Frontend → engine: the inputs of one feature, by the names of the model's arguments; with `error`, why there are
    none, which ends the request.
    """

    request_id: str
    key: bytes
    inputs: dict[str, np.ndarray] = {}
    error: RequestError | None = None


class EngineOutputs(Struct, array_like=True, tag="outputs"):
    """Engine → frontend: everything one step produced for that frontend. Also what `EngineCore.step` returns."""

    outputs: list[RequestOutput] = field(default_factory=list)


FrontendMessage = (
    Hello
    | AddRequest
    | SupplyFeature
    | AbortRequests
    | GetStats
    | ResetPrefixCache
    | ProbeCache
    | LoadAdapter
    | UnloadAdapter
    | Heartbeat
    | Goodbye
)
EngineMessage = (
    Welcome
    | Refused
    | EngineOutputs
    | WantFeatures
    | Stats
    | PrefixCacheWasReset
    | CacheProbed
    | AdapterAnswer
    | Adapters
    | Heartbeat
    | Goodbye
)
