"""A disk that is slow, fails, or loses what is being read: the caller is told, others go on, nothing is left over."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine_core import EngineConfig, EngineCore, EngineRequest, SamplingParams
from engine_core.errors import AdapterError
from engine_core.model.lora.adapter_tensors import AdapterTensors, ModuleShape
from engine_core.model.lora.read_adapter import read_adapter_tensors
from tests.adapters import make_adapter
from tests.model.lora.adapter_files import MAX_RANK, WEIGHTS, bare_model, linear_layers

# What asks the disk, by its name in `os`. What fails of the others is looked at again when a file is opened.
_CALLS = ("open", "fstat", "pread", "preadv")
_LIVENESS_S = 60.0


def open_files() -> set[str]:
    """Those of this process, but for the one that tells them."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}


@pytest.fixture(scope="module")
def modules(llama: Path) -> Mapping[str, ModuleShape]:
    return linear_layers(bare_model(llama))


def read(adapter: Path, modules: Mapping[str, ModuleShape]) -> AdapterTensors:
    return read_adapter_tensors(adapter, adapter.parent, modules, MAX_RANK, output_head="lm_head", pause=lambda: None)


def watch(patch: pytest.MonkeyPatch, before_call: Callable[[int], None]) -> list[str]:
    """Whatever asks the disk calls `before_call` first, with its number from 0 on. Returns the names of the calls, as
    they come.
    """
    made: list[str] = []

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any, **named: Any) -> Any:
            made.append(name)
            before_call(len(made) - 1)
            return call(*arguments, **named)

        return ask

    for name in _CALLS:
        patch.setattr(os, name, watched(name, getattr(os, name)))
    return made


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_whatever_fails_is_a_refusal_that_says_so(adapter: Path, modules: Mapping[str, ModuleShape], code: int) -> None:
    def fail_at(place: int) -> Callable[[int], None]:
        def before_call(number: int) -> None:
            if number == place:
                raise OSError(code, os.strerror(code))

        return before_call

    with pytest.MonkeyPatch.context() as patch:
        calls = watch(patch, fail_at(-1))
        read(adapter, modules)
    assert set(calls) == set(_CALLS)
    before = open_files()
    for place in range(len(calls)):
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, fail_at(place))
            with pytest.raises(AdapterError) as refusal:
                read(adapter, modules)
        assert refusal.value.reason == "invalid_adapter"
        assert f"cannot be read: {os.strerror(code)}" in str(refusal.value)
    assert open_files() == before


def test_what_comes_in_small_pieces_is_the_same(adapter: Path, modules: Mapping[str, ModuleShape]) -> None:
    """Network file systems may give less than was asked for."""
    pread, preadv = os.pread, os.preadv
    whole = read(adapter, modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 100), at))
        patch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:1000]], at))
        assert read(adapter, modules).digest == whole.digest


class SlowFile:
    """Reads from it wait, from the third on, until `end` says what becomes of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_waiting = threading.Event()
        self._goes_on = threading.Event()
        self._error: OSError | None = None
        self._preadv, self._num_reads = os.preadv, 0
        patch.setattr(os, "preadv", self._read)

    def end(self, error: OSError | None = None) -> None:
        self._error = error
        self._goes_on.set()

    def _read(self, *arguments: Any) -> int:
        self._num_reads += 1
        if self._num_reads > 2:
            self.is_waiting.set()
            assert self._goes_on.wait(_LIVENESS_S)
            if self._error is not None:
                raise self._error
        return self._preadv(*arguments)


@pytest.fixture(scope="module")
def engine(llama: Path, whole_adapter: Path) -> EngineCore:
    """With an adapter "there"."""
    config = EngineConfig(model=str(llama), dtype="float32", device="cpu", num_blocks=64, enable_lora=True, max_loras=1)
    engine = EngineCore(config)
    engine.load_adapter("there", whole_adapter)
    return engine


@pytest.fixture
def other(llama: Path, tmp_path: Path) -> Path:
    return make_adapter(llama, tmp_path / "other", targets=["q_proj", "down_proj"], seed=1)


def answer(engine: EngineCore, adapter: str) -> list[int]:
    engine.add_request(
        EngineRequest("r", [5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), adapter=adapter)
    )
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            assert output.finish_reason != "error"
            tokens += output.new_token_ids
    return tokens


@pytest.mark.parametrize("name", ["new", "there"])
@pytest.mark.parametrize("ending", ["arrives", "fails", "is cut off", "is gone"])
def test_while_a_read_waits_others_go_on_and_nothing_is_left_of_it(
    engine: EngineCore, other: Path, name: str, ending: str
) -> None:
    """Also where it is to take another one's place."""
    infos, before = engine.adapters(), open_files()
    right = {adapter: answer(engine, adapter) for adapter in ("", "there")}
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as thread:
        slow = SlowFile(patch)
        load = thread.submit(engine.load_adapter, name, other, replaces=True)
        try:
            assert slow.is_waiting.wait(_LIVENESS_S)
            for adapter, tokens in right.items():
                assert answer(engine, adapter) == tokens
            assert engine.adapters() == infos
            if ending == "is cut off":
                os.truncate(other / WEIGHTS, 1000)
            elif ending == "is gone":
                shutil.rmtree(other)
        finally:
            slow.end(OSError(errno.EIO, "Input/output error") if ending == "fails" else None)
    if ending in {"fails", "is cut off"}:
        assert isinstance(load.exception(), AdapterError)
        assert ("Input/output error" if ending == "fails" else f"{WEIGHTS} is cut off") in str(load.exception())
    else:  # what is open can be read to its end
        assert load.result().digest != infos[0].digest
        assert answer(engine, name) != right["there"]
        engine.unload_adapter(name)
        if name == "there":
            engine.load_adapter(name, infos[0].path)
    assert [info.digest for info in engine.adapters()] == [info.digest for info in infos]
    assert {adapter: answer(engine, adapter) for adapter in ("", "there")} == right
    engine.step()
    stats = engine.stats()
    assert (stats.adapter_slots_in_use, stats.adapter_bytes) == (0, infos[0].num_bytes)
    assert stats.num_free_blocks == stats.num_blocks
    assert open_files() == before
