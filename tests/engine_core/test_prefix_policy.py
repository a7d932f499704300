"""`--scheduling-policy prefix`: who finds most goes first, and nobody is passed over for long."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from engine_core import EngineCore
from engine_core.request import Request
from engine_core.waiting_queue import PREFIX_MAX_PASSES, PrefixQueue
from ipc.vocabulary import RequestOutput
from tests.checking_runner import expected_output
from tests.engine_core.make import make_request as make_waiting
from tests.engine_core.test_engine import VOCAB, B, assert_idle, make_engine, make_request, run, tokens_of


class TestQueue:
    """The queue by itself; `cached` says how much is cached of whom."""

    def make(self, cached: dict[str, int], **limits: int) -> PrefixQueue:
        self.requests: dict[str, Request] = {}
        queue = PrefixQueue(lambda request: cached[request.request_id], **limits)
        for name in cached:
            self.requests[name] = make_waiting(name, [1, 2, 3])
            queue.add(self.requests[name])
        return queue

    def names(self, queue: PrefixQueue) -> list[str]:
        """In the order they leave."""
        names = []
        while queue.choose() is not None:
            names.append(queue.pop().request_id)
        return names

    def test_the_longest_cached_prefix_goes_first_then_who_came_first(self):
        queue = self.make({"a": 0, "b": 8, "c": 4, "d": 8, "e": 0})
        assert self.names(queue) == ["b", "d", "c", "a", "e"]

    def test_what_is_cached_is_asked_anew_for_each(self):
        cached = {"a": 0, "b": 4, "c": 0}
        queue = self.make(cached)
        assert queue.choose().request_id == "b"
        queue.pop()
        cached["c"] = 12
        assert queue.choose().request_id == "c"

    def test_it_chooses_among_the_first_in_line(self):
        queue = self.make({"a": 0, "b": 1, "c": 2, "d": 3}, num_candidates=2)
        assert self.names(queue) == ["b", "c", "d", "a"]

    def test_who_was_put_back_goes_first(self):
        queue = self.make({"a": 0, "b": 4})
        cached_nothing = make_waiting("preempted", [5])
        assert queue.choose().request_id == "b"
        queue.put_back(cached_nothing)
        assert queue.peek() is cached_nothing and queue.choose() is cached_nothing

    def test_who_was_chosen_stays_next_until_it_leaves_the_line(self):
        cached = {"a": 0, "b": 4, "c": 0}
        queue = self.make(cached)
        queue.choose()
        cached["c"] = 8
        assert queue.peek().request_id == "b"
        queue.set_aside(self.requests["b"])
        assert queue.peek().request_id == "a"
        assert queue.choose().request_id == "c"
        queue.remove(self.requests["c"])
        assert queue.peek().request_id == "a"

    def test_a_request_is_passed_over_so_many_times_also_if_it_was_aside_between(self):
        queue = self.make({"first": 0, **{f"hit {index}": 4 for index in range(10)}}, max_passes=3)
        for _ in range(2):
            assert queue.choose().request_id.startswith("hit")
            queue.pop()
        queue.set_aside(self.requests["first"])
        for _ in range(2):
            assert queue.choose().request_id.startswith("hit")
            queue.pop()
        queue.bring_back(self.requests["first"])
        assert self.names(queue)[:3] == ["hit 4", "first", "hit 5"]

    def test_passes_are_not_counted_for_who_comes_with_the_same_id_again(self):
        queue = self.make({"first": 0, "second": 4, "third": 4}, max_passes=1)
        queue.choose()
        assert queue.pop().request_id == "second"
        for name in ("first", "third"):
            queue.remove(self.requests[name])
            queue.add(self.requests[name])
        assert self.names(queue) == ["third", "first"]

    def test_an_empty_line_has_no_next(self):
        queue = self.make({"a": 1})
        queue.set_aside(self.requests["a"])
        assert queue.choose() is None and queue.peek() is None and len(queue) == 1


class TestBound:
    """Under a steady stream of requests whose prompt is cached: three arrive for every two that can run."""

    NUM_SEATS = 2
    POPULAR = range(8 * B)

    def start(self, num_blocks: int = 200) -> EngineCore:
        engine = make_engine(num_blocks, max_num_seqs=self.NUM_SEATS, scheduling_policy="prefix")
        engine.add_request(make_request(self.POPULAR, 1))
        run(engine)
        self.names = (f"hit {index}" for index in itertools.count())
        self.started: list[str] = []
        return engine

    def stream(self, engine: EngineCore, until: Callable[[], bool], limit: int) -> None:
        """Steps with arrivals; `started` has everybody in order of admission."""
        while not until():
            for name in itertools.islice(self.names, self.NUM_SEATS + 1):
                engine.add_request(make_request([*self.POPULAR, 500], 1, name))
            waiting_before = {request.request_id for request in engine._scheduler.waiting}
            outputs = engine.step().outputs
            started = [output.request_id for output in outputs if output.request_id in waiting_before]
            self.started += started
            assert len(self.started) < limit, "it is starved"

    @pytest.mark.parametrize("num_before", [0, 1, 3])
    def test_who_never_hits_is_admitted_within_it(self, num_before: int):
        engine = self.start()
        before = [f"before {index}" for index in range(num_before)]
        for name in [*before, "never hits"]:
            engine.add_request(make_request([900 + len(self.POPULAR), *name.encode()], 1, name))
        bound = (num_before + 1) * (PREFIX_MAX_PASSES + 1)
        self.stream(engine, lambda: "never hits" in self.started, limit=2 * bound)
        assert self.started.index("never hits") + 1 <= bound
        assert self.started.index("never hits") + 1 > PREFIX_MAX_PASSES, "there was a stream of others before it"
        run(engine)

    def test_also_one_that_needs_most_of_the_pool(self):
        engine = self.start(num_blocks=130)
        engine.add_request(make_request([600 + index % 300 for index in range(120 * B)], 1, "large"))
        self.stream(engine, lambda: "large" in self.started, limit=4 * PREFIX_MAX_PASSES)
        assert self.started.index("large") <= PREFIX_MAX_PASSES
        run(engine)


class TestEngine:
    def admitted_in(self, prompts: Sequence[Sequence[int]], **settings) -> tuple[list[str], EngineCore]:
        engine = make_engine(**({"max_num_seqs": 1} | settings))
        requests = [make_request(prompt, 1, str(index)) for index, prompt in enumerate(prompts)]
        for request in requests:
            engine.add_request(request)
        outputs = run(engine)
        for request in requests:
            assert tokens_of(outputs[request.request_id]) == expected_output(request.prompt_token_ids, 1, VOCAB)
        return list(outputs), engine

    def test_chats_that_take_turns_are_served_while_their_prefix_is_still_there(self):
        """Two long prefixes, of which the pool holds one: in the order they came, each would evict the other."""
        prefixes = [list(range(start, start + 10 * B)) for start in (100, 500)]
        prompts = [[*prefixes[index % 2], index] for index in range(10)]
        order, engine = self.admitted_in(prompts, num_blocks=12, scheduling_policy="prefix")
        assert order == ["0", "2", "4", "6", "8", "1", "3", "5", "7", "9"]
        assert engine.stats().prefix_cache_hits == 8 * 10 * B
        order, engine = self.admitted_in(prompts, num_blocks=12)
        assert order == [str(index) for index in range(10)]
        assert engine.stats().prefix_cache_hits < 10 * B

    def test_without_a_cache_it_is_first_come_first_served(self):
        order, _ = self.admitted_in([range(9)] * 5, enable_prefix_caching=False, scheduling_policy="prefix")
        assert order == ["0", "1", "2", "3", "4"]

    def test_while_the_next_one_lacks_room_nobody_passes_it(self):
        engine = make_engine(12, max_num_seqs=4, scheduling_policy="prefix")
        popular = list(range(6 * B))
        engine.add_request(make_request(popular, 1))
        run(engine)
        engine.add_request(make_request(range(100, 100 + 5 * B), 3, "runs"))
        engine.step()
        # It finds six blocks and lacks one of the two it needs besides; the other one would fit.
        engine.add_request(make_request([9, 9], 1, "small"))
        engine.add_request(make_request([*popular, *range(500, 500 + 2 * B)], 1, "chosen"))
        engine.step()
        assert [request.request_id for request in engine._scheduler.running] == ["runs"]
        assert engine._scheduler.num_open_seats == 0
        order: dict[str, list[RequestOutput]] = run(engine)
        assert list(order) == ["runs", "chosen", "small"]
        assert_idle(engine)

    def test_the_preempted_are_the_first_again(self):
        engine = make_engine(max_num_seqs=1, scheduling_policy="prefix")
        engine.add_request(make_request(range(9), 5, "first"))
        engine.step()
        engine.add_request(make_request(range(9), 1, "hits"))
        engine.reset_prefix_cache(reset_running_requests=True)
        engine.step()
        assert [request.request_id for request in engine._scheduler.running] == ["first"]
        assert list(run(engine)) == ["first", "hits"]

    def test_continuations_follow_their_prompt(self):
        engine = make_engine(max_num_seqs=1, scheduling_policy="prefix")
        popular = list(range(6 * B))
        engine.add_request(make_request(popular, 1))
        run(engine)
        engine.add_request(make_request([*popular, 1, 2, 3], 2, "three", sampling={"n": 3}))
        engine.add_request(make_request([*popular, 1, 2, 3], 1, "one"))
        assert list(run(engine)) == ["three", "one"]
