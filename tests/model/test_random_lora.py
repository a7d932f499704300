"""Adapters are never mixed up, whatever happens in an engine: random operations, and every answer is PEFT's.

Some seconds in the usual run; as long as you like with `-m slow`.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from engine_core import EngineRequest
from engine_core.lora.adapter import Adapter
from engine_core.model.device_queue import DeviceQueue
from engine_core.model.runner import ModelRunner
from ipc.vocabulary import ExtraKeySpan
from kernels.lora_in_c import PackedLora
from tests.adapters import make_adapter
from tests.simulated_device import SimulatedQueue
from tests.simulated_kernels import simulated_kernels
from tests.tiny_models import make_tiny_model

from .adapter_workload import Pictures, Rounded, Texts, Workload, goes_wrong
from .equality import greedy, make_engine, run_requests
from .test_lora_pictures import _DECODER, _TOWERS

GetSource = Callable[[str], Any]

_ADAPTERS: dict[str, dict[str, Any]] = {
    "everything": {"targets": "all-linear"},
    "the same, other numbers": {"targets": "all-linear"},
    "one module": {"targets": ["v_proj"], "layers_to_transform": [1], "rank": 1, "strength": 2.0},
    "pattern": {
        "targets": ["q_proj", "v_proj", "o_proj", "up_proj"],
        "rank": 6,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 3, "layers.1.self_attn.v_proj": 16},
        "alpha_pattern": {"o_proj": 3},
        "strength": 1.0,
    },
    "head": {"targets": ["down_proj", "lm_head"], "rank": 16},
}
_PICTURE_FAMILY = "llava"
_PICTURE_ADAPTERS: dict[str, dict[str, Any]] = {
    "decoder": {"targets": _DECODER},
    "tower": {"targets": _TOWERS[_PICTURE_FAMILY], "strength": 1.0},
    "another tower": {"targets": _TOWERS[_PICTURE_FAMILY], "strength": 1.0},
    "both": {"targets": f"{_DECODER}|{_TOWERS[_PICTURE_FAMILY]}"},
}


@pytest.fixture(scope="session")
def source(
    tmp_path_factory: pytest.TempPathFactory,
    vlm_directory: Callable[[str], Path],
) -> GetSource:
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            root = tmp_path_factory.mktemp(f"random-lora-{name}")
            if name == _PICTURE_FAMILY:
                paths = _make_all(vlm_directory(name), _PICTURE_ADAPTERS, root)
                made[name] = Pictures(name, vlm_directory(name), paths)
            elif name == "int8":
                directory = make_tiny_model("llama", root / "model", num_hidden_layers=2)
                paths = _make_all(directory, _ADAPTERS, root)
                made[name] = Rounded(directory, paths, root / "merged", kv_cache_dtype="int8")
            else:
                directory = make_tiny_model(name, root / "model", num_hidden_layers=2, **_fewer_layers(name))
                made[name] = Texts(directory, _make_all(directory, _ADAPTERS, root))
        return made[name]

    return get


def _fewer_layers(name: str) -> dict[str, Any]:
    return {"layer_types": ["sliding_attention", "full_attention"]} if name.startswith("gemma") else {}


def _make_all(directory: Path, adapters: dict[str, dict[str, Any]], root: Path) -> dict[str, Path]:
    return {
        name: make_adapter(directory, root / name, seed=seed, **settings)
        for seed, (name, settings) in enumerate(adapters.items())
    }


@dataclass(frozen=True)
class Kind:
    """Of a workload; `settings` are those that are not random."""

    source: str
    settings: dict[str, Any]
    num_rounds: int = 1
    has_queue: bool = False
    has_graphs: bool = False
    in_threads: bool = False

    def make(self, rng: random.Random, get_source: GetSource) -> Workload:
        queue: DeviceQueue | None = SimulatedQueue() if self.has_queue else None
        return Workload(rng, get_source(self.source), self.settings, queue, in_threads=self.in_threads)

    def surroundings(self) -> AbstractContextManager[Any]:
        return simulated_kernels() if self.has_graphs else nullcontext()


KINDS = {
    "llama": Kind("llama", {}, 2),
    "windows": Kind("gemma3_text", {"num_blocks": 120, "block_size": 8}, 2),
    "pictures": Kind(
        _PICTURE_FAMILY,
        {"max_model_len": None, "num_blocks": 400, "max_num_batched_tokens": 64, "enable_chunked_prefill": True},
    ),
    "loaded in threads": Kind("llama", {}, in_threads=True),
    "queue": Kind("llama", {}, has_queue=True),
    "graphs": Kind("llama", {"max_num_seqs": 4, "cudagraph_capture_sizes": (2, 4)}, has_queue=True, has_graphs=True),
}
MORE_KINDS = {"int8": Kind("int8", {"kv_cache_dtype": "int8"})}


@pytest.mark.parametrize("name", KINDS)
def test_random_operations_give_pefts_answers(name: str, source: GetSource) -> None:
    kind = KINDS[name]
    with kind.surroundings():
        workloads = run_for(kind, source, name, num_rounds=kind.num_rounds, num_operations=100)
    assert sum(workload.num_hits for workload in workloads) > 0
    assert workloads[0].source.num_compared > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS | MORE_KINDS)
def test_a_minute_of_random_operations(name: str, source: GetSource) -> None:
    kind = (KINDS | MORE_KINDS)[name]
    deadline, seed = time.monotonic() + 60, time.time_ns()
    with kind.surroundings():
        while time.monotonic() < deadline:
            run_for(kind, source, f"{name} {seed}", num_rounds=1, num_operations=400)
            seed += 1


def run_for(kind: Kind, get_source: GetSource, seed: str, *, num_rounds: int, num_operations: int) -> list[Workload]:
    workloads = []
    for number in range(num_rounds):
        workloads.append(kind.make(random.Random(f"{seed}{number}"), get_source))
        try:
            workloads[-1].run(num_operations)
        except BaseException as error:
            error.add_note(f"round {number} of seed {seed!r}: {workloads[-1].settings}")
            raise
    return workloads


def test_an_unloaded_adapter_leaves_nothing_in_host_memory(source: GetSource) -> None:
    texts, before = source("llama"), num_packed()
    engine = make_engine(texts.directory, enable_lora=True, max_loras=1, max_lora_rank=16)
    engine.load_adapter("a", texts.adapters["everything"])
    run_requests(engine, [(EngineRequest("r", [5, 6, 7], greedy(2), adapter="a"), {})])
    assert num_packed() > before
    engine.unload_adapter("a")
    engine.step()
    assert num_packed() == before


def num_packed() -> int:
    gc.collect()
    return sum(type(thing) is PackedLora for thing in gc.get_objects())


# It would be seen


@contextmanager
def whose_key_is_its_name() -> Iterator[None]:
    def span(self: Adapter, name: str) -> ExtraKeySpan:
        return ExtraKeySpan(0, None, "lora", name, name)

    with patch.object(Adapter, "span", span):
        yield


@contextmanager
def that_stays_in_its_slot() -> Iterator[None]:
    """The second adapter that a slot gets is not placed."""
    place, used = ModelRunner.place_adapter, set()

    def place_once(self: ModelRunner, slot: int, adapter: Adapter) -> None:
        if (id(self), slot) not in used:
            place(self, slot, adapter)
        used.add((id(self), slot))

    with patch.object(ModelRunner, "place_adapter", place_once):
        yield


@pytest.mark.parametrize("mistake", [whose_key_is_its_name, that_stays_in_its_slot])
def test_mistakes_are_seen(mistake: Callable[[], AbstractContextManager[None]], source: GetSource) -> None:
    with mistake():
        assert goes_wrong(lambda seed: KINDS["llama"].make(random.Random(seed), source))
