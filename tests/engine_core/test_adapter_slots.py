"""Requests that ask for LoRA adapters, more of them than there are slots: who runs, who waits, and for how long."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest

from engine_core import EngineConfig, EngineCore, EngineRequest, InvalidConfigError, InvalidRequestError, SamplingParams
from engine_core.config import LoraModule
from engine_core.errors import AdapterError
from engine_core.lora.adapter import Adapter
from ipc.vocabulary import ExtraKeySpan
from tests.checking_runner import CheckingRunner, expected_output
from tests.engine_core.test_engine import assert_idle
from tests.fake_adapters import fake_digest, write_fake_adapter

B = 4
VOCAB = 1000
IDS = itertools.count()


class Adapters:
    """An engine with adapters, each called like its weights. Prompts have nothing in common, unless they are given."""

    def __init__(self, directory: Path, num_slots: int, names: Iterable[str] = "abcd", **settings) -> None:
        self.directory = directory
        num_blocks = settings.pop("num_blocks", 400)
        self.runner = CheckingRunner(num_blocks, B, vocab_size=VOCAB, num_adapter_slots=num_slots)
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | settings
        self.engine = EngineCore(EngineConfig(block_size=B, enable_lora=True, **settings), self.runner)
        for name in names:
            self.load(name)
        self.outputs: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        self.ended: list[str] = []

    def load(self, name: str, weights: str | None = None, **options) -> None:
        path = write_fake_adapter(self.directory / (weights or name), weights or name)
        self.engine.load_adapter(name, path, **options)

    def ask(self, adapter: str = "", max_tokens: int = 4, prompt: list[int] | None = None, **fields) -> str:
        number = next(IDS)
        request_id = f"{adapter or 'base'}-{number}"
        prompt = [number % VOCAB, number // VOCAB, 1, 2, 3, 4] if prompt is None else prompt
        sampling = fields.pop("sampling", {})
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **sampling)
        self.engine.add_request(EngineRequest(request_id, prompt, params, adapter=adapter, **fields))
        return request_id

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            for output in self.engine.step().outputs:
                self.cached[output.request_id] = output.num_cached_tokens
                if output.index == 0:
                    self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.error is not None:
                    self.errors[output.request_id] = output.error.message
                if output.ends_request:
                    self.ended.append(output.request_id)

    def finish(self) -> None:
        for _ in range(2000):
            if not self.engine.has_unfinished_requests():
                break
            assert self.engine.has_work_now()
            self.step()
        assert_idle(self.engine)

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.engine._scheduler.running]

    @property
    def in_slots(self) -> list[str | None]:
        return [None if adapter is None else adapter.weights for adapter in self.runner.adapters]


@pytest.fixture
def make(tmp_path: Path):
    return lambda num_slots, **settings: Adapters(tmp_path, num_slots, **settings)


class TestSlots:
    def test_one_step_has_requests_of_several_adapters_and_of_none(self, make):
        adapters = make(3)
        asked = [adapters.ask(name, prompt=[5, 6, 7, 8, 9]) for name in ("a", "b", "", "c", "a", "")]
        adapters.step()
        assert adapters.running == asked or adapters.engine.stats().prefix_waits > 0
        adapters.finish()
        for request_id in asked:
            name = request_id.partition("-")[0]
            weights = None if name == "base" else name
            assert adapters.outputs[request_id] == expected_output([5, 6, 7, 8, 9], 4, VOCAB, weights)

    def test_requests_of_one_adapter_share_its_slot(self, make):
        adapters = make(2)
        for _ in range(5):
            adapters.ask("a")
        adapters.step()
        stats = adapters.engine.stats()
        assert (stats.num_running, stats.adapter_slots_in_use, stats.adapter_placements) == (5, 1, 1)

    def test_a_free_slot_keeps_its_adapter_until_another_one_needs_it_the_longest_unused_first(self, make):
        adapters = make(2)
        for name in "abab":
            adapters.ask(name)
            adapters.finish()
        assert adapters.engine.stats().adapter_placements == 2
        adapters.ask("c")
        adapters.finish()
        assert adapters.in_slots == ["c", "b"]
        adapters.ask("b")
        adapters.finish()
        assert adapters.engine.stats().adapter_placements == 3

    def test_unused_is_who_was_released_first_not_who_was_admitted_first(self, make):
        adapters = make(2)
        adapters.ask("a", 6)
        adapters.ask("b", 2)
        adapters.finish()
        adapters.ask("c")
        adapters.finish()
        assert adapters.in_slots == ["a", "c"]

    def test_a_slot_with_nothing_in_it_is_taken_before_one_that_somebody_may_come_back_to(self, make):
        adapters = make(2)
        for name in "ab":
            adapters.ask(name)
            adapters.finish()
        adapters.engine.unload_adapter("b")
        adapters.step()
        adapters.ask("c")
        adapters.finish()
        assert adapters.in_slots == ["a", "c"]

    def test_two_names_of_the_same_weights_share_a_slot(self, make):
        adapters = make(1)
        adapters.load("a2", "a")
        adapters.ask("a")
        adapters.ask("a2")
        adapters.step()
        assert len(adapters.running) == 2

    def test_continuations_of_one_prompt_run_side_by_side(self, make):
        adapters = make(1)
        adapters.ask("a", 6, sampling={"n": 3})
        adapters.step(3)
        assert len(adapters.running) == 3
        adapters.finish()

    def test_an_aborted_request_lets_go_of_its_slot(self, make):
        adapters = make(1)
        first, second = adapters.ask("a", 50), adapters.ask("b", 50)
        adapters.step()
        adapters.engine.abort_requests([first])
        adapters.step()
        assert adapters.running == [second]
        adapters.engine.abort_requests([second])
        assert_idle(adapters.engine)


class TestTurns:
    def test_who_finds_no_slot_waits_and_those_behind_pass_that_need_none(self, make):
        adapters = make(1)
        first, second, third, fourth = (adapters.ask(name, 10) for name in ("a", "b", "", "a"))
        adapters.step()
        # The second "a" would be before "b" otherwise for as long as there are more of them.
        assert adapters.running == [first, third]
        stats = adapters.engine.stats()
        assert (stats.num_waiting_aside, stats.adapter_slot_waits) == (2, 2)
        adapters.finish()
        assert adapters.ended.index(second) < adapters.ended.index(fourth)

    @pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
    def test_an_endless_stream_of_another_adapter_keeps_nobody_waiting(self, make, policy: str):
        adapters = make(1, max_num_seqs=4, scheduling_policy=policy)
        waiting = ""
        for step in range(100):
            # Of a prefix that is always cached.
            adapters.ask("a", 8, [*range(20), step])
            adapters.step()
            waiting = adapters.ask("b", 2) if step == 10 else waiting
        assert waiting in adapters.ended

    def test_two_streams_alternate_in_batches(self, make):
        adapters = make(1, max_num_seqs=4)
        asked = [adapters.ask("ab"[index % 2], 3) for index in range(32)]
        adapters.finish()
        assert sorted(adapters.ended) == sorted(asked)
        order = [request_id[0] for request_id in adapters.ended]
        turns = [(name, len(list(group))) for name, group in itertools.groupby(order)]
        assert all(size == 4 for _, size in turns[1:-1]), turns
        assert adapters.engine.stats().adapter_placements == len(turns)

    def test_those_whose_slot_is_not_drained_go_on(self, make):
        adapters = make(2, max_num_seqs=3, scheduling_policy="priority")
        long = adapters.ask("a", 40, priority=1)
        adapters.ask("d", 2, priority=1)
        adapters.step()
        many = [adapters.ask("b", num_tokens, priority=1) for num_tokens in (4, 6, 4, 4, 4, 4)]
        adapters.step(3)
        assert adapters.running == [long, *many[:2]]
        urgent = adapters.ask("c", 1, priority=0)
        adapters.step(9)
        assert adapters.running == [long, *many[4:]], "who waited when the urgent one came goes on, too"
        adapters.finish()
        assert urgent in adapters.ended

    def test_the_slot_with_the_fewest_requests_is_drained(self, make):
        adapters = make(2)
        for _ in range(3):
            adapters.ask("a", 30)
        adapters.ask("b", 30)
        adapters.step()
        adapters.ask("c", 2)
        adapters.step()
        more_a, more_b = adapters.ask("a", 2), adapters.ask("b", 2)
        adapters.step()
        assert more_a in adapters.running and more_b not in adapters.running
        adapters.finish()

    def test_of_equals_the_one_unused_for_longest_is_drained(self, make):
        adapters = make(2)
        for name in "ab":
            adapters.ask(name, 30)
            adapters.step()
        adapters.ask("c", 2)
        adapters.step()
        more_a, more_b = adapters.ask("a", 2), adapters.ask("b", 2)
        adapters.step()
        assert more_b in adapters.running and more_a not in adapters.running
        adapters.finish()

    def test_a_slot_that_is_held_again_counts_as_used_just_now(self, make):
        adapters = make(2)
        adapters.ask("a", 1)
        adapters.ask("b", 2)
        adapters.finish()
        for name in "ba":
            adapters.ask(name, 30)
        adapters.step()
        adapters.ask("c", 2)
        adapters.step()
        more_a, more_b = adapters.ask("a", 2), adapters.ask("b", 2)
        adapters.step()
        assert more_a in adapters.running and more_b not in adapters.running
        adapters.finish()

    def test_several_slots_are_drained_for_several_adapters(self, make):
        adapters = make(2)
        held = [adapters.ask(name, 20) for name in "ab"]
        waiting = [adapters.ask(name, 20) for name in "cd"]
        adapters.step()
        late = [adapters.ask(name, 2) for name in "ab"]
        adapters.step()
        assert adapters.running == held
        adapters.finish()
        places = [adapters.ended.index(request_id) for request_id in held + waiting + late]
        assert max(places[:2]) < min(places[2:4]) and max(places[2:4]) < min(places[4:])

    def test_nothing_is_drained_any_more_for_who_is_aborted(self, make):
        adapters = make(1)
        adapters.ask("a", 40)
        waiting = adapters.ask("b")
        adapters.step()
        late = adapters.ask("a", 2)
        adapters.step()
        assert late not in adapters.running
        adapters.engine.abort_requests([waiting])
        adapters.step()
        assert late in adapters.running
        adapters.finish()

    def test_who_comes_after_an_abort_does_not_wait_for_its_sake(self, make):
        adapters = make(1)
        adapters.ask("a", 40)
        waiting = adapters.ask("b")
        adapters.step()
        adapters.engine.abort_requests([waiting])
        late = adapters.ask("a", 2)
        adapters.step()
        assert late in adapters.running
        adapters.finish()

    def test_a_preempted_request_comes_back_to_its_slot_before_who_came_later(self, make):
        adapters = make(1)
        first = adapters.ask("a", 20)
        adapters.step()
        second = adapters.ask("b", 2)
        adapters.step()
        adapters.engine.reset_prefix_cache(reset_running_requests=True)
        adapters.step()
        assert adapters.running == [first]
        adapters.finish()
        assert adapters.ended == [first, second]

    def test_with_priorities_who_is_more_urgent_passes_who_waits(self, make):
        adapters = make(1, scheduling_policy="priority")
        adapters.ask("a", 20, priority=1)
        adapters.step()
        waiting = adapters.ask("b", 2, priority=2)
        adapters.step()
        urgent = adapters.ask("a", 2, priority=0)
        less_urgent = adapters.ask("a", 2, priority=3)
        adapters.step()
        assert urgent in adapters.running and less_urgent not in adapters.running
        adapters.finish()
        assert adapters.ended.index(waiting) < adapters.ended.index(less_urgent)

    def test_a_turn_is_over_with_admission(self, make):
        adapters = make(1, scheduling_policy="priority")
        adapters.ask("a", 2, priority=1)
        adapters.step()
        called = [adapters.ask("b", 20, priority=2) for _ in range(2)]
        adapters.step(3)
        assert adapters.running == called
        urgent = adapters.ask("c", 5, priority=0)
        adapters.step()
        adapters.engine.reset_prefix_cache(reset_running_requests=True)
        adapters.step()
        assert adapters.running == [urgent]
        adapters.finish()

    @pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
    @pytest.mark.parametrize("num_blocks", [8, 40])
    def test_many_adapters_few_slots_and_few_blocks_get_done(self, make, policy: str, num_blocks: int):
        names = [f"n{index}" for index in range(12)]
        adapters = make(2, names=names, scheduling_policy=policy, num_blocks=num_blocks, max_num_batched_tokens=16)
        asked = [adapters.ask(names[index * 7 % 12], 1 + index % 9, priority=index % 3) for index in range(120)]
        adapters.finish()
        assert sorted(adapters.ended) == sorted(asked)

    def test_ten_thousand_that_wait_for_a_slot_hold_up_nobody(self, make):
        adapters = make(1)
        adapters.ask("a", 400)
        adapters.step()
        for _ in range(3000):
            adapters.ask("b", 1)
        base = adapters.ask("", 1)
        num_steps = 0
        while base not in adapters.ended:
            adapters.step()
            num_steps += 1
        assert num_steps < 60
        adapters.engine.abort_requests(list({r.output_id for r in adapters.engine._scheduler.requests.values()}))
        assert_idle(adapters.engine)


class TestAhead:
    def test_steps_are_scheduled_ahead_while_somebody_waits_for_a_slot(self, make):
        adapters = make(1, async_scheduling=True)
        first, second = adapters.ask("a", 20), adapters.ask("b", 20)
        adapters.finish()
        assert adapters.runner.num_ahead > 30
        assert adapters.ended == [first, second]

    def test_who_can_have_a_slot_now_interrupts_them(self, make):
        adapters = make(1, async_scheduling=True)
        long = adapters.ask("", 60)
        first, second = adapters.ask("a", 10), adapters.ask("b", 10)
        adapters.finish()
        assert adapters.ended == [first, second, long]

    def test_an_unloaded_adapter_does_not_stay_as_long_as_they_go_on(self, make):
        adapters = make(1, async_scheduling=True)
        adapters.ask("a", 1)
        adapters.finish()
        adapters.ask("", 60)
        adapters.step(5)
        adapters.engine.unload_adapter("a")
        adapters.step(3)
        assert adapters.in_slots == [None]
        adapters.finish()


class TestLoading:
    def test_a_request_keeps_the_adapter_it_was_added_with(self, make):
        adapters = make(1)
        prompt = [9, 8, 7]
        running = adapters.ask("a", 20, prompt)
        adapters.step(2)
        waiting = adapters.ask("b", 20, prompt)
        adapters.engine.unload_adapter("a")
        adapters.load("b", "c", replaces=True)
        new = adapters.ask("b", 20, prompt)
        with pytest.raises(InvalidRequestError, match="no adapter is called 'a'"):
            adapters.ask("a")
        adapters.step(5)
        assert adapters.in_slots == ["a"], "in use"
        adapters.finish()
        for request_id, weights in ((running, "a"), (waiting, "b"), (new, "c")):
            assert adapters.outputs[request_id] == expected_output(prompt, 20, VOCAB, weights)

    def test_a_slot_is_cleared_when_the_last_request_of_an_unloaded_adapter_has_ended(self, make):
        adapters = make(2)
        adapters.ask("a", 5)
        adapters.step()
        adapters.engine.unload_adapter("a")
        adapters.finish()
        assert adapters.engine.has_work_now()
        adapters.step()
        assert adapters.in_slots == [None, None] and not adapters.engine.has_work_now()

    def test_an_unloaded_adapter_leaves_an_idle_slot(self, make):
        adapters = make(1)
        adapters.load("a2", "a")
        adapters.ask("a")
        adapters.finish()
        adapters.engine.unload_adapter("a")
        assert not adapters.engine.has_work_now(), "its weights have another name"
        adapters.engine.unload_adapter("a2")
        assert adapters.engine.has_work_now()
        adapters.step()
        assert adapters.in_slots == [None]

    def test_two_hundred_cycles_under_load_leave_nothing(self, make):
        adapters = make(2, names=["always"])
        expected: dict[str, list[int]] = {}
        for cycle in range(200):
            weights, prompt, num_tokens = f"cycle{cycle % 7}", [cycle % 50, 2, 3, 4, 5], 1 + cycle % 5
            adapters.load("a", weights)
            expected[adapters.ask("a", num_tokens, prompt)] = expected_output(prompt, num_tokens, VOCAB, weights)
            expected[adapters.ask("always", 3, prompt)] = expected_output(prompt, 3, VOCAB, "always")
            adapters.step(cycle % 4)
            adapters.engine.unload_adapter("a")
        adapters.finish()
        assert adapters.outputs == expected
        adapters.step()
        assert sorted(map(str, adapters.in_slots)) == ["None", "always"]
        adapters.runner.forget()
        gc.collect()
        left = [thing.weights for thing in gc.get_objects() if type(thing) is Adapter]
        assert not [weights for weights in left if weights.startswith("cycle")]


class TestFailing:
    def test_if_an_adapter_cannot_be_placed_its_request_ends_and_others_go_on(self, make):
        adapters = make(2)
        adapters.runner.placing_fails = {fake_digest("b"): RuntimeError("out of memory")}
        first, second, third = adapters.ask("a", 5), adapters.ask("b", 5), adapters.ask("", 5)
        adapters.finish()
        assert "out of memory" in adapters.errors[second] and "RuntimeError" in adapters.errors[second]
        assert len(adapters.outputs[first]) == len(adapters.outputs[third]) == 5
        adapters.runner.placing_fails = {}
        again = adapters.ask("b", 5)
        adapters.finish()
        assert len(adapters.outputs[again]) == 5

    def test_a_step_that_fails_leaves_no_slot_held(self, make):
        adapters = make(1)
        adapters.ask("a", 5)
        adapters.runner.fail_next = True
        adapters.finish()
        adapters.ask("b", 5)
        adapters.finish()

    def test_unknown_adapters_are_refused_by_name(self, make):
        with pytest.raises(InvalidRequestError) as caught:
            make(1).ask("z")
        assert caught.value.param == "adapter" and "'z'" in str(caught.value)

    def test_a_caller_may_not_say_whose_kv_it_is(self, make):
        span = ExtraKeySpan(0, None, "lora", fake_digest("a").hex())
        with pytest.raises(InvalidRequestError) as caught:
            make(1).ask("", extra_key_spans=(span,))
        assert caught.value.param == "extra_key_spans"

    def test_without_enable_lora_there_are_no_adapters(self, tmp_path: Path):
        engine = EngineCore(EngineConfig(block_size=B), CheckingRunner(32, B, num_adapter_slots=2))
        assert engine.capabilities.max_loras == 0 and engine.adapters() == []
        with pytest.raises(InvalidRequestError) as caught:
            engine.add_request(EngineRequest("r", [1, 2, 3], adapter="a"))
        assert caught.value.param == "adapter"
        for call in (lambda: engine.load_adapter("a", tmp_path), lambda: engine.unload_adapter("a")):
            with pytest.raises(AdapterError) as refused:
                call()
            assert refused.value.reason == "lora_disabled"


class TestConfig:
    def test_adapters_are_loaded_at_start(self, tmp_path: Path):
        path = write_fake_adapter(tmp_path / "w", "w")
        config = EngineConfig(block_size=B, enable_lora=True, lora_modules=(LoraModule("a", str(path)),))
        engine = EngineCore(config, CheckingRunner(32, B, num_adapter_slots=3))
        assert [info.name for info in engine.adapters()] == ["a"] and engine.capabilities.max_loras == 3

    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({"lora_modules": (LoraModule("a", "/nowhere"),)}, "lora_modules: a=/nowhere: .*no directory"),
            ({"lora_modules": (LoraModule("checking", "/nowhere"),)}, "lora_modules: checking=.* the model itself"),
            ({"lora_modules": (LoraModule("a", "x"), LoraModule("a", "y"))}, "lora_modules: 'a' stands there 2 times"),
            ({"lora_modules": (LoraModule("a", "x"), LoraModule("b", "y")), "max_cpu_loras": 1}, "2 adapters, at most"),
            ({"lora_root": "/nowhere"}, "lora_root: '/nowhere' is no directory"),
            ({"max_loras": 0}, "max_loras: must be at least 1"),
            ({"max_lora_rank": 0}, "max_lora_rank: must be at least 1"),
            ({"max_cpu_loras": 0}, "max_cpu_loras: must be at least 1"),
            ({"enable_lora": False, "lora_root": "/"}, "lora_root: needs enable_lora"),
            ({"enable_lora": False, "lora_modules": (LoraModule("a", "x"),)}, "lora_modules: needs enable_lora"),
        ],
    )
    def test_what_cannot_be_is_refused(self, settings: dict, says: str):
        config = EngineConfig(**{"block_size": B, "enable_lora": True} | settings)
        with pytest.raises(InvalidConfigError, match=says):
            EngineCore(config, CheckingRunner(32, B, num_adapter_slots=2))

    def test_a_model_without_slots_has_no_adapters(self):
        with pytest.raises(InvalidConfigError, match="enable_lora: checking"):
            EngineCore(EngineConfig(block_size=B, enable_lora=True), CheckingRunner(32, B))
