"""What frontends ask about LoRA adapters, answered in a thread of its own: reading one takes longer than a step may."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import Full, Queue
from typing import TYPE_CHECKING, TypeAlias

from ipc.messages import AdapterAnswer, LoadAdapter, UnloadAdapter
from ipc.vocabulary import AdapterInfo, RequestError

from .errors import AdapterError

if TYPE_CHECKING:
    from .engine import EngineCore

logger = logging.getLogger(__name__)

Call: TypeAlias = LoadAdapter | UnloadAdapter
Answer: TypeAlias = Callable[[AdapterAnswer], None]

_MAX_WAITING_CALLS = 256
# An interpreter that ends while a thread is in foreign code may not end well, so a load gets a while.
_STOP_TIMEOUT_S = 5.0
_MAX_REASON_CHARS = 500


class AdapterCalls:
    """Does what it is asked from `start` to `stop`, one load at a time, and what is about the same name in order.

    Unloading reads nothing, so it waits for no load of another name, whose disk may be slow. What a frontend names must
    lie below `lora_root` of the engine's configuration.
    """

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        root = engine.config.lora_root
        self._root = None if root is None else Path(root)
        self._calls: Queue[tuple[Call, Answer] | None] = Queue(_MAX_WAITING_CALLS)
        self._counting = threading.Lock()
        # How many calls about each name wait or are being done.
        self._names: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adapter-calls", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def adapters(self) -> list[AdapterInfo]:
        """Those that are loaded now."""
        return self._engine.adapters()

    def ask(self, call: Call, answer: Answer) -> None:
        """`answer` takes the result, in any thread, and never waits, nor does this."""
        with self._counting:
            waits = isinstance(call, LoadAdapter) or call.name in self._names
            if waits:
                self._names[call.name] += 1
        if not waits:
            answer(self._result(call))
            return
        try:
            self._calls.put_nowait((call, answer))
        except Full:
            self._forget(call)
            reason = f"{_MAX_WAITING_CALLS} calls to load or unload an adapter wait already"
            answer(AdapterAnswer(call.call_id, error=RequestError("overloaded", reason)))

    def stop(self) -> None:
        """Begin nothing more. What is being loaded is waited for, but not for long."""
        self._stopping.set()
        # Full, it wakes its reader anyway.
        with contextlib.suppress(Full):
            self._calls.put_nowait(None)
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("adapter_load_abandoned waited_s=%g", _STOP_TIMEOUT_S)

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None and not self._stopping.is_set():
            call, answer = asked
            result = self._result(call)
            self._forget(call)
            answer(result)

    def _forget(self, call: Call) -> None:
        with self._counting:
            self._names[call.name] -= 1
            if not self._names[call.name]:
                del self._names[call.name]

    def _result(self, call: Call) -> AdapterAnswer:
        try:
            return AdapterAnswer(call.call_id, self._do(call))
        except AdapterError as error:
            logger.info("adapter_refused name=%.300r reason=%s detail=%.500r", call.name, error.reason, str(error))
            refusal = RequestError("invalid", str(error), error.param, error.reason)
            return AdapterAnswer(call.call_id, error=refusal)
        except Exception as error:
            logger.exception("adapter_call_failed name=%.300r", call.name)
            reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
            return AdapterAnswer(call.call_id, error=RequestError("internal", reason))

    def _do(self, call: Call) -> AdapterInfo:
        if isinstance(call, UnloadAdapter):
            return self._engine.unload_adapter(call.name)
        if self._root is None and self._engine.config.enable_lora:
            raise AdapterError(
                "this engine was started without lora_root: it loads no adapters by path",
                "outside_lora_root",
                "lora_path",
            )
        return self._engine.load_adapter(
            call.name, call.path, root=self._root, replaces=call.replaces, digest=call.digest
        )
