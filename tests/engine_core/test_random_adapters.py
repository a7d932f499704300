"""Random operations on a whole engine whose requests ask for LoRA adapters, which come, go and change their names.

More adapters than slots, slots that cannot be written, pictures that some adapters change; with every KV slot, every
row and the adapter of every request in every step checked.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from engine_core import EngineRequest
from engine_core.config import SchedulingPolicy
from engine_core.errors import AdapterError
from engine_core.lora.adapter import Adapter
from tests.engine_core.test_random_features import PicturesWorkload
from tests.engine_core.test_random_operations import run_for
from tests.fake_adapters import fake_digest, write_fake_adapter

NAMES = ["a", "b", "c", "d", "e"]
MAX_ADAPTERS = 4
ALL_WEIGHTS = ["w0", "w1", "w2", "w3", "w4", "w5"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    for index, weights in enumerate(ALL_WEIGHTS):
        write_fake_adapter(directory / weights, weights, targets_encoder=index % 2 == 0)
    return directory


class AdaptersWorkload(PicturesWorkload):
    def __init__(self, rng: random.Random, policy: str, directory: Path) -> None:
        self.num_slots = rng.choice([1, 1, 2, 3])
        super().__init__(rng, policy)
        self.directory = directory
        self.names: dict[str, str] = {}
        self.asked_for: dict[str, str | None] = {}
        self.runner.place_adapter = self.checked(self.runner.place_adapter)
        self.runner.clear_adapter = self.checked(self.runner.clear_adapter)
        for _ in range(3):
            self.load()

    def more_settings(self) -> dict[str, Any]:
        return super().more_settings() | {
            "enable_lora": True,
            "max_cpu_loras": MAX_ADAPTERS,
            "max_num_queued_requests": None,
            "max_num_queued_tokens": None,
        }

    def num_adapter_slots(self) -> int:
        return self.num_slots

    def checked(self, change: Callable[..., None]) -> Callable[..., None]:
        def change_checked(slot: int, *adapter: Adapter) -> None:
            scheduler = self.engine._scheduler
            assert all(scheduler.turns.slot_of(request) != slot for request in scheduler.running)
            change(slot, *adapter)

        return change_checked

    def more_fields(self, num_prompt_tokens: int) -> dict[str, Any]:
        name = self.rng.choice(["", *self.names]) if self.rng.random() < 0.9 else ""
        return super().more_fields(num_prompt_tokens) | {"adapter": name}

    def remember(self, request: EngineRequest) -> None:
        super().remember(request)
        self.asked_for[request.request_id] = self.names.get(request.adapter)

    def weights_of(self, request_id: str) -> str | None:
        return self.asked_for[request_id]

    def load(self) -> None:
        name, weights, replaces = self.rng.choice(NAMES), self.rng.choice(ALL_WEIGHTS), self.rng.random() < 0.5
        refusal = None
        if name not in self.names and len(self.names) == MAX_ADAPTERS:
            refusal = "too_many_adapters"
        elif self.names.get(name, weights) != weights and not replaces:
            refusal = "name_taken"
        try:
            info = self.engine.load_adapter(name, self.directory / weights, replaces=replaces)
        except AdapterError as error:
            said = error.reason
        else:
            said = None
            assert info.digest == fake_digest(weights).hex()
            self.names[name] = weights
        assert said == refusal

    def unload(self) -> None:
        if self.names:
            name = self.rng.choice(list(self.names))
            self.engine.unload_adapter(name)
            del self.names[name]

    def placing_fails(self) -> None:
        """The requests that it ends look as if they had been told to stop."""
        self.runner.placing_fails = {fake_digest(self.rng.choice(ALL_WEIGHTS)): RuntimeError("out of memory")}

    def placing_works(self) -> None:
        self.runner.placing_fails = {}

    def operations(self) -> dict:
        return super().operations() | {
            self.add: 20,
            self.add_pictures: 15,
            self.load: 4,
            self.unload: 2,
            self.placing_fails: 1,
            self.placing_works: 3,
        }

    def check_queue(self) -> None:
        super().check_queue()
        scheduler = self.engine._scheduler
        with_adapter = [request for request in scheduler.running if request.adapter is not None]
        held = {slot.index: slot.holders for slot in scheduler.slots.held()}
        assert sum(len(holders) for holders in held.values()) == len(with_adapter)
        for request in with_adapter:
            assert request.request_id in held[scheduler.turns.slot_of(request)]
        for group in scheduler.turns._groups.values():
            assert all(request.request_id in scheduler.waiting._aside for _, request in group.line)
        assert [info.name for info in self.engine.adapters()] == list(self.names)

    def run(self, num_operations: int) -> None:
        super().run(num_operations)
        for name in self.names:
            self.engine.unload_adapter(name)
        self.engine.step()
        assert self.runner.adapters == [None] * self.num_slots
        self.num_slot_waits = self.engine.stats().adapter_slot_waits


@pytest.mark.parametrize("policy", get_args(SchedulingPolicy))
def test_random_operations_on_adapters_leave_an_idle_engine_and_right_outputs(policy: str, directory: Path):
    made: list[AdaptersWorkload] = []

    def make(rng: random.Random, policy: str) -> AdaptersWorkload:
        made.append(AdaptersWorkload(rng, policy, directory))
        return made[-1]

    assert run_for(0.5, policy, seed=1, make=make) > 3
    assert sum(workload.num_slot_waits for workload in made) > 10, "hardly anybody ever waited for a slot"


@pytest.mark.slow
@pytest.mark.parametrize("policy", get_args(SchedulingPolicy))
def test_sixty_seconds_of_random_operations_on_adapters(policy: str, directory: Path):
    def make(rng: random.Random, policy: str) -> AdaptersWorkload:
        return AdaptersWorkload(rng, policy, directory)

    assert run_for(60.0, policy, seed=time.time_ns(), make=make) > 100
