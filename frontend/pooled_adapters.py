"""Loading and unloading LoRA adapters in all engines of a pool, and giving them back to engines that lost them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from weakref import WeakValueDictionary

from ipc.vocabulary import AdapterInfo, RequestError

from .adapter_catalog import AdapterCatalog, Repair
from .engine_client import EngineClient, Occasion, capabilities_of
from .engine_errors import EngineUnavailableError, RequestRefusedError

logger = logging.getLogger(__name__)

# Adapters are files, perhaps large ones on a slow disk, and an engine reads one after the other.
_TIMEOUT_S = 600.0
# Why an engine cannot have what others have, because whoever started it wanted it so.
_BY_CONFIGURATION = {"lora_disabled", "outside_lora_root"}


class PooledAdapters:
    """The LoRA adapters of several engines. Use from one event loop."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self._engines = engines
        self._catalog = AdapterCatalog(engines)
        # One change of a name at a time: what is repaired must not be what is being unloaded.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._repairs: dict[int, asyncio.Task[None]] = {}
        for engine in engines:
            engine.on_adapters = self._learn

    @property
    def by_name(self) -> Mapping[str, AdapterInfo]:
        """Those that requests may ask for, as they are now and will be. An engine may be about to be given them."""
        return self._catalog.adapters

    def has(self, engine: EngineClient, name: str) -> bool:
        """Whether `engine` can compute requests for `name`; all can without a name."""
        return not name or self._catalog.has(engine, name)

    async def load(self, name: str, path: str, *, replaces: bool) -> AdapterInfo:
        """Load the adapter at `path` as `name` in all engines that are ready; the others get it when they are back.

        If one of them cannot, what was done is undone.

        Raises:
            EngineUnavailableError: no engine is ready, or none did it in time. It may happen all the same.
            RequestRefusedError: `name` is taken and `replaces` false, or an engine has refused; `reason` and `param` of
                its error are those of `AdapterAnswer`.
        """
        async with self._changing(name):
            old = self.by_name.get(name)
            if old is not None and not replaces:
                message = f"lora_name: there is an adapter '{name}' already, read from {old.path}"
                raise RequestRefusedError(RequestError("invalid", message, "lora_name", "name_taken"))
            ready = [engine for engine in self._engines if engine.state == "ready"]
            results = await self._ask_all(
                [engine for engine in ready if capabilities_of(engine).max_loras] or ready,
                lambda engine: engine.calls.load_adapter(name, path, replaces=replaces, timeout_s=_TIMEOUT_S),
            )
            loaded = {engine: result for engine, result in results.items() if isinstance(result, AdapterInfo)}
            refusals = [result for result in results.values() if isinstance(result, RequestRefusedError)]
            if len({adapter.digest for adapter in loaded.values()}) > 1:
                message = f"lora_path: the engines found different weights at {path}"
                refusals.append(RequestRefusedError(RequestError("invalid", message, "lora_path", "other_weights")))
            if refusals:
                await asyncio.gather(*(self._undo(engine, adapter, old) for engine, adapter in loaded.items()))
                raise refusals[0]
            adapter = next(iter(loaded.values()))
            self._catalog.ask_for(adapter)
            logger.info(
                "adapter_loaded name=%r digest=%s path=%r engines=%s",
                name,
                adapter.digest[:12],
                adapter.path,
                ",".join(str(engine.index) for engine in loaded),
            )
            return adapter

    async def unload(self, name: str) -> AdapterInfo:
        """Let no further request ask for `name`, in all engines that are there and, when they are back, in the others.

        Raises:
            EngineUnavailableError: no engine is there, or none did it in time. It may happen all the same.
            RequestRefusedError: there is no such adapter (its error has the reason `unknown_adapter`).
        """
        async with self._changing(name):
            old = self.by_name.get(name)
            if old is None:
                message = f"lora_name: there is no adapter '{name}'"
                raise RequestRefusedError(RequestError("invalid", message, "lora_name", "unknown_adapter"))
            results = await self._ask_all(
                [engine for engine in self._engines if engine.is_connected],
                lambda engine: engine.calls.unload_adapter(name, timeout_s=_TIMEOUT_S),
            )
            for result in results.values():
                # Somebody else was quicker, or it never had it.
                if isinstance(result, RequestRefusedError) and result.error.reason != "unknown_adapter":
                    raise result
            self._catalog.forget(name)
            logger.info("adapter_unloaded name=%r digest=%s", name, old.digest[:12])
            return old

    async def close(self) -> None:
        """Repair nothing any more. Idempotent."""
        repairs = list(self._repairs.values())
        for repair in repairs:
            repair.cancel()
        await asyncio.gather(*repairs, return_exceptions=True)

    def _changing(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    @staticmethod
    async def _ask_all(
        engines: Sequence[EngineClient], ask: Callable[[EngineClient], Awaitable[AdapterInfo]]
    ) -> dict[EngineClient, AdapterInfo | RequestRefusedError]:
        """What each answered, without those that were lost. Raises EngineUnavailableError if no other is left."""

        async def answer(engine: EngineClient) -> AdapterInfo | RequestRefusedError | EngineUnavailableError:
            try:
                return await ask(engine)
            except (RequestRefusedError, EngineUnavailableError) as error:
                return error

        answers = await asyncio.gather(*map(answer, engines))
        results: dict[EngineClient, AdapterInfo | RequestRefusedError] = {}
        lost = EngineUnavailableError("no engine is ready")
        for engine, result in zip(engines, answers, strict=True):
            if isinstance(result, EngineUnavailableError):
                lost = result
            else:
                results[engine] = result
        if not results:
            raise lost
        return results

    async def _undo(self, engine: EngineClient, loaded: AdapterInfo, old: AdapterInfo | None) -> None:
        """As if `engine` had not loaded it: it has `old` again, unless its files have changed, too."""
        if old is not None and old.digest == loaded.digest:
            return
        try:
            if old is None:
                await engine.calls.unload_adapter(loaded.name, timeout_s=_TIMEOUT_S)
            else:
                await self._give(engine, old)
        except (EngineUnavailableError, RequestRefusedError) as error:
            logger.warning("adapter_not_undone engine=%d name=%r reason=%r", engine.index, loaded.name, str(error))

    @staticmethod
    async def _give(engine: EngineClient, adapter: AdapterInfo) -> None:
        await engine.calls.load_adapter(
            adapter.name, adapter.path, replaces=True, digest=adapter.digest, timeout_s=_TIMEOUT_S
        )

    def _learn(self, engine: EngineClient, before: Mapping[str, AdapterInfo], occasion: Occasion) -> None:
        repairs = self._catalog.learn(engine, before, occasion)
        if not repairs:
            return
        # Those of an earlier session ended with it.
        task = asyncio.create_task(self._repair(engine, repairs), name=f"adapters_of_engine_{engine.index}")
        self._repairs[engine.index] = task
        task.add_done_callback(lambda done: self._forget_repairs(engine.index, done))

    def _forget_repairs(self, index: int, done: asyncio.Task[None]) -> None:
        if self._repairs.get(index) is done:
            del self._repairs[index]

    async def _repair(self, engine: EngineClient, repairs: Sequence[Repair]) -> None:
        for repair in repairs:
            async with self._changing(repair.name):
                if not self._catalog.is_due(engine, repair):
                    continue
                try:
                    if repair.adapter is None:
                        await engine.calls.unload_adapter(repair.name, timeout_s=_TIMEOUT_S)
                    else:
                        await self._give(engine, repair.adapter)
                except EngineUnavailableError:
                    return  # it is asked again when it is back
                except RequestRefusedError as error:
                    logger.log(
                        logging.INFO if error.error.reason in _BY_CONFIGURATION else logging.WARNING,
                        "adapter_not_restored engine=%d name=%r reason=%r",
                        engine.index,
                        repair.name,
                        str(error),
                    )
                    self._catalog.give_up(engine, repair.name)
                else:
                    if repair.adapter is None:
                        logger.info("adapter_removed engine=%d name=%r", engine.index, repair.name)
                    else:
                        logger.info("adapter_restored engine=%d name=%r", engine.index, repair.name)
