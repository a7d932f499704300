"""An engine that loads adapters from a file system made of a dict, behind the face of `EngineClient`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from frontend.engine_client import Occasion
from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from ipc.vocabulary import AdapterInfo, RequestError
from tests.frontend.scripted_engine import Script, ScriptedEngine, says

LOADED_S = 1_700_000_000.0


def adapter(name: str, digest: str, path: str = "/adapters/a") -> AdapterInfo:
    return AdapterInfo(name, digest, path, 8, ("q_proj",), False, 1 << 20, LOADED_S)


class AdapterEngine(ScriptedEngine):
    """`files` tells the digest of what lies at a path. `asked` is what it was told, as text.

    What it says it may say late: while `gate` is cleared, calls wait. Each of `broken` names fails to be loaded.
    """

    def __init__(self, files: dict[str, str], index: int = 0, script: Script | None = None, max_loras: int = 4) -> None:
        super().__init__(says([]) if script is None else script)
        self.capabilities = msgspec.structs.replace(self.capabilities, max_loras=max_loras)
        self.index = index
        self.files = files
        self.broken: set[str] = set()
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def tell(self, occasion: Occasion, *adapters: AdapterInfo) -> None:
        """It is there, and has these adapters."""
        self.state = "ready"
        before: Mapping[str, AdapterInfo] = self.loaded_adapters
        self.loaded_adapters = {each.name: each for each in adapters}
        self.on_adapters(self, before, occasion)

    def lose(self) -> None:
        self.state = "down"

    async def load_adapter(
        self, name: str, path: str, *, replaces: bool = False, digest: str | None = None, timeout_s: float
    ) -> AdapterInfo:
        await self._take(f"load {name} {path}{' replacing' * replaces}{f' {digest}' * (digest is not None)}")
        if not self.capabilities.max_loras:
            raise refused("lora_name", "lora_disabled", "LoRA is not enabled")
        if path.startswith("/elsewhere"):
            raise refused("lora_path", "outside_lora_root", f"{path} is not below /adapters")
        found = self.files.get(path)
        if found is None:
            raise refused("lora_path", "path_not_found", f"{path} does not exist")
        if name in self.broken:
            raise refused("lora_path", "invalid_adapter", f"{path}: its rank is 64; at most 16 is allowed")
        if digest not in (None, found):
            raise refused("lora_path", "other_weights", f"{path} has other weights than it had")
        present = self.loaded_adapters.get(name)
        if present is not None and present.digest != found and not replaces:
            raise refused("lora_name", "name_taken", f"'{name}' is loaded")
        loaded = adapter(name, found, path)
        self.tell("changed", *(self.loaded_adapters | {name: loaded}).values())
        return loaded

    async def unload_adapter(self, name: str, *, timeout_s: float) -> AdapterInfo:
        await self._take(f"unload {name}")
        if name not in self.loaded_adapters:
            raise refused("lora_name", "unknown_adapter", f"there is no '{name}'")
        unloaded = self.loaded_adapters[name]
        self.tell("changed", *(each for each in self.loaded_adapters.values() if each.name != name))
        return unloaded

    def open_gate(self) -> None:
        """From any thread, while a call waits."""
        self._loop.call_soon_threadsafe(self.gate.set)

    async def _take(self, asked: str) -> None:
        self._loop = asyncio.get_running_loop()
        if not self.is_connected:
            raise EngineUnavailableError("the engine was lost")
        self.asked.append(asked)
        await self.gate.wait()
        await asyncio.sleep(0)
        if not self.is_connected:
            raise EngineUnavailableError("the engine was lost")


def refused(param: str, reason: str, message: str) -> RequestRefusedError:
    return RequestRefusedError(RequestError("invalid", f"{param}: {message}", param, reason))
