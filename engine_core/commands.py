"""What the thread that talks to frontends asks of the loop that steps the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ipc.stats import PrefixCacheReset
from ipc.vocabulary import CacheProbe, RequestError

from .request import Request


@dataclass(frozen=True, slots=True)
class Add:
    request: Request


@dataclass(frozen=True, slots=True)
class Supply:
    """Of a feature that was asked for: its inputs, or why there are none."""

    request_id: str
    key: bytes
    inputs: dict[str, np.ndarray]
    error: RequestError | None


@dataclass(frozen=True, slots=True)
class Abort:
    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class AbortContinuations:
    continuations: list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Reset:
    """`answer` takes the result, in any thread, and never waits."""

    reset_running_requests: bool
    answer: Callable[[PrefixCacheReset], None]


@dataclass(frozen=True, slots=True)
class Probe:
    """Without `relative_end` no explanation is wanted. `answer` is as `Reset`'s."""

    request: Request
    relative_end: int | None
    answer: Callable[[CacheProbe], None]


@dataclass(frozen=True, slots=True)
class SnapshotKVCache:
    """A consumer of KV events wants to know all that is there."""


@dataclass(frozen=True, slots=True)
class Stop:
    exit_code: int


@dataclass(frozen=True, slots=True)
class Drain:
    """No `Add` follows."""


Command: TypeAlias = Add | Supply | Abort | AbortContinuations | Reset | Probe | SnapshotKVCache | Stop | Drain
