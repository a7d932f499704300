"""The LoRA adapters an engine has loaded, by the names requests call them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from engine_core.errors import AdapterError
from ipc.vocabulary import AdapterInfo

from .adapter import Adapter

logger = logging.getLogger(__name__)

MAX_NAME_CHARS = 256
MAX_PATH_CHARS = 4096


@dataclass(frozen=True, slots=True)
class _Loaded:
    info: AdapterInfo
    adapter: Adapter


class AdapterRegistry:
    """Any thread may call anything at any time. Loads wait for each other; nothing else waits for them.

    Names of the same weights share one `Adapter`, also with requests that were given one whose name is gone.

    Args:
        read: `Runner.read_adapter`.
        max_adapters: how many names there may be.
        model_name: what no adapter may be called.
    """

    def __init__(self, read: Callable[[Path, Path | None], Adapter], max_adapters: int, model_name: str) -> None:
        self._read = read
        self._max_adapters = max_adapters
        self._model_name = model_name
        self._reading = threading.Lock()
        self._changing = threading.Lock()
        # Replaced, never changed: whoever looks at it needs no lock.
        self._by_name: dict[str, _Loaded] = {}
        self._digests: frozenset[bytes] = frozenset()
        self._alive: WeakValueDictionary[bytes, Adapter] = WeakValueDictionary()

    def load(
        self,
        name: str,
        path: str | os.PathLike[str],
        root: Path | None = None,
        *,
        replaces: bool = False,
        digest: str | None = None,
    ) -> AdapterInfo:
        """Read the adapter at `path`, and let it be called `name`. Where that name has the same weights already, all
        that changes is where they were read.

        `root`: as `Runner.read_adapter`'s; a relative path begins there. `replaces`: the name may have other weights,
        which those that were given out keep. `digest` (hex): no other weights will do.

        Raises:
            AdapterError: nothing has changed.
        """
        self._check_name(name)
        place = _place_of(path, root)
        started_s = time.monotonic()
        with self._reading:
            self._check_room(name)
            adapter = self._read(place, root)
            if digest is not None and adapter.digest.hex() != digest:
                message = f"{place} has weights of the digest {adapter.digest.hex()}, not {digest}"
                raise AdapterError(message, "other_weights", "lora_path")
            info = self._install(name, place, adapter, replaces=replaces)
        logger.info(
            "adapter_loaded name=%r digest=%s rank=%d bytes=%d path=%r load_s=%.3f",
            name,
            info.digest,
            info.rank,
            info.num_bytes,
            info.path,
            time.monotonic() - started_s,
        )
        return info

    def unload(self, name: str) -> AdapterInfo:
        """Forget a name; those that were given its adapter keep it.

        Raises:
            AdapterError: there is no such name.
        """
        with self._changing:
            loaded = self._by_name.get(name)
            if loaded is None:
                raise AdapterError(f"no adapter is called {name!r}", "unknown_adapter", "lora_name")
            self._replace({other: kept for other, kept in self._by_name.items() if other != name})
        logger.info("adapter_unloaded name=%r digest=%s", name, loaded.info.digest)
        return loaded.info

    def get(self, name: str) -> Adapter | None:
        loaded = self._by_name.get(name)
        return None if loaded is None else loaded.adapter

    def is_loaded(self, digest: bytes) -> bool:
        """Under whatever name."""
        return digest in self._digests

    def infos(self) -> list[AdapterInfo]:
        """Of all that are loaded, in the order in which their names came."""
        return [loaded.info for loaded in self._by_name.values()]

    @property
    def num_bytes(self) -> int:
        """What they weigh in host memory, each once."""
        return sum({loaded.adapter.digest: loaded.adapter.num_bytes for loaded in self._by_name.values()}.values())

    def _install(self, name: str, place: Path, adapter: Adapter, *, replaces: bool) -> AdapterInfo:
        with self._changing:
            before = self._by_name.get(name)
            if before is not None and before.adapter.digest != adapter.digest and not replaces:
                message = f"the name {name!r} belongs to an adapter with other weights, from {before.info.path}"
                raise AdapterError(message, "name_taken", "lora_name")
            adapter = self._alive.setdefault(adapter.digest, adapter)
            info = AdapterInfo(
                name=name,
                digest=adapter.digest.hex(),
                path=str(place),
                rank=adapter.rank,
                target_modules=adapter.target_modules,
                targets_encoder=adapter.targets_encoder,
                num_bytes=adapter.num_bytes,
                loaded_s=time.time(),
                base_model=adapter.base_model,
            )
            self._replace({**self._by_name, name: _Loaded(info, adapter)})
        return info

    def _replace(self, by_name: dict[str, _Loaded]) -> None:
        self._by_name = by_name
        self._digests = frozenset(loaded.adapter.digest for loaded in by_name.values())

    def _check_name(self, name: str) -> None:
        if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
            raise AdapterError(
                f"an adapter's name has 1 to {MAX_NAME_CHARS} printable characters, no space first or last; this has"
                f" {len(name)}: {name[:MAX_NAME_CHARS]!r}",
                "invalid_name",
                "lora_name",
            )
        if name == self._model_name:
            raise AdapterError(f"{name!r} is the model itself", "name_taken", "lora_name")

    def _check_room(self, name: str) -> None:
        names = self._by_name
        if name not in names and len(names) >= self._max_adapters:
            raise AdapterError(
                f"{len(names)} adapters are loaded, at most {self._max_adapters} may be (max_cpu_loras)",
                "too_many_adapters",
                "lora_name",
            )


def _place_of(path: str | os.PathLike[str], root: Path | None) -> Path:
    text = os.fspath(path)
    if not 1 <= len(text) <= MAX_PATH_CHARS or not _is_file_name(text):
        raise AdapterError(
            f"a path has 1 to {MAX_PATH_CHARS} characters, none of them NUL, all of them Unicode; this has {len(text)}",
            "path_not_found",
            "lora_path",
        )
    return Path(text).absolute() if root is None else root.absolute() / text


def _is_file_name(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
