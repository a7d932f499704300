"""A frontend asks the engine how it is and tells it to forget; both are answered, whatever it computes."""

from __future__ import annotations

import time

from ipc.messages import CacheProbed, GetStats, Goodbye, PrefixCacheWasReset, ProbeCache, ResetPrefixCache, Stats
from ipc.stats import PrefixCacheReset
from ipc.vocabulary import EngineRequest, SamplingParams
from tests.wire_peers import BareFrontend, Connect, is_idle, running_server, wait_until

BLOCK_SIZE = 16


def ask_stats(frontend: BareFrontend, call_id: int = 1) -> Stats:
    frontend.send(GetStats(call_id))
    answer = frontend.receive(Stats)
    assert isinstance(answer, Stats) and answer.call_id == call_id
    return answer


def reset(frontend: BareFrontend, *, reset_running_requests: bool = False) -> PrefixCacheReset:
    frontend.send(ResetPrefixCache(7, reset_running_requests))
    answer = frontend.receive(PrefixCacheWasReset)
    assert isinstance(answer, PrefixCacheWasReset) and answer.call_id == 7
    return answer.result


def test_stats_hold_what_the_last_output_tells(endpoint: str, join: Connect) -> None:
    with running_server(endpoint):
        frontend = join()
        for n in range(3):
            frontend.add(f"r{n}", [5] * 40, 10)
            frontend.finish(f"r{n}")
            stats = ask_stats(frontend, n).stats
            assert (stats.generated_tokens, stats.prefix_cache_queries) == (10 * (n + 1), 40 * (n + 1))
            assert stats.prefix_cache_hits == 39 * n
        # Each 10 steps: the prompt, cold or warm, and nine tokens more.
        assert sum(stats.step_tokens) == stats.steps == 30
        assert stats.step_tokens[:5] == [29, 0, 0, 0, 1]
        assert stats.computed_tokens == 40 + 2 * 1 + 27


def test_stats_are_answered_during_a_long_step(endpoint: str, join: Connect) -> None:
    with running_server(endpoint, step_s=1.0) as server:
        frontend = join()
        frontend.add("r", [5], 2)
        wait_until(lambda: server.engine.stats().num_running)
        for n in range(20):
            stats = ask_stats(frontend, n).stats
            assert (stats.num_running, stats.steps) == (1, 0)
        assert frontend.finish("r")["r"][1].finish_reason == "length"


def test_stats_count_what_was_dropped(endpoint: str, join: Connect) -> None:
    with running_server(endpoint):
        frontend = join()
        frontend.send(GetStats(1), epoch=frontend.epoch ^ 1)
        assert ask_stats(frontend).dropped_messages == {"stale_epoch": 1}


def test_a_reset_forgets_every_prefix(endpoint: str, join: Connect) -> None:
    with running_server(endpoint) as server:
        frontend = join()
        frontend.add("r", [5] * 3 * BLOCK_SIZE, 2)
        frontend.finish("r")
        assert reset(frontend) == PrefixCacheReset(num_dropped_blocks=4, num_blocks_in_use=0)
        assert reset(frontend) == PrefixCacheReset(0, 0)
        frontend.add("r", [5] * 3 * BLOCK_SIZE, 1)
        assert frontend.finish("r")["r"][1].num_cached_tokens == 0
        wait_until(lambda: is_idle(server.engine))


def test_a_reset_beside_running_requests_says_what_they_hold_or_preempts_them(endpoint: str, join: Connect) -> None:
    with running_server(endpoint, step_s=0.01) as server:
        frontend = join()
        frontend.add("r", [5] * 3 * BLOCK_SIZE, 300)
        outputs = frontend.outputs()
        next(outputs)
        next(outputs)  # by now it has a block for what follows its prompt
        first = reset(frontend)
        assert first.num_dropped_blocks >= 3 and first.num_blocks_in_use >= 4 and first.num_requests_in_use == 1
        done = reset(frontend, reset_running_requests=True)
        assert done.num_dropped_blocks == done.num_blocks_in_use == done.num_requests_in_use == 0
        server.engine.runner.step_s = 0.0  # type: ignore[attr-defined]
        last = frontend.finish("r")["r"][1]
        assert last.finish_reason == "length"
        assert last.timing is not None and last.timing.num_preemptions == 1
        wait_until(lambda: is_idle(server.engine))


def test_a_probe_is_answered_while_others_run_and_nobody_notices(endpoint: str, join: Connect) -> None:
    with running_server(endpoint, step_s=0.005) as server:
        frontend, other = join(), join()
        other.add("long", [9] * 5, 40)
        next(other.outputs())
        frontend.add("r", [5] * 3 * BLOCK_SIZE, 2)
        frontend.finish("r")
        before = ask_stats(frontend).stats
        request = EngineRequest("r", [5] * 2 * BLOCK_SIZE + [6] * 9, SamplingParams(max_tokens=1))
        for explain in (False, True):
            frontend.send(ProbeCache(8, request, explain))
            answer = frontend.receive(CacheProbed)
            assert isinstance(answer, CacheProbed) and answer.call_id == 8 and answer.probe is not None
            assert (answer.probe.num_hit_tokens, answer.probe.miss_reason) == (2 * BLOCK_SIZE, "diverged")
            assert (answer.probe.explanation is not None) == explain
        after = ask_stats(frontend).stats
        assert after.prefix_cache_queries == before.prefix_cache_queries
        assert other.finish("long")["long"][1].finish_reason == "length"
        wait_until(lambda: is_idle(server.engine))


def test_what_can_never_run_is_said_of_a_probe(endpoint: str, join: Connect) -> None:
    with running_server(endpoint):
        frontend = join()
        frontend.send(ProbeCache(3, EngineRequest("r", [], SamplingParams())))
        answer = frontend.receive(CacheProbed)
        assert isinstance(answer, CacheProbed) and answer.probe is None and answer.error is not None
        assert (answer.error.code, answer.error.param) == ("invalid", "prompt_token_ids")


def test_the_answer_to_a_frontend_that_left_is_not_kept(endpoint: str, join: Connect) -> None:
    with running_server(endpoint, step_s=0.2) as server:
        leaves, stays = join(), join()
        stays.add("r", [5], 3)
        wait_until(lambda: server.engine.stats().num_running)
        leaves.send(ResetPrefixCache(7))
        leaves.send(Goodbye())
        stays.finish("r")
        assert reset(stays).num_requests_in_use == 0
        assert leaves.receive(PrefixCacheWasReset, timeout_s=0.2) is None


def test_the_first_and_the_last_output_tell_where_the_time_went(endpoint: str, join: Connect) -> None:
    with running_server(endpoint, step_s=0.05):
        frontend = join()
        started_s = time.monotonic()
        frontend.add("first", [5], 4)
        outputs = []
        for output in frontend.outputs():
            outputs.append(output)
            if output.finish_reason is not None:
                break
        wall_s = time.monotonic() - started_s
        timings = [output.timing for output in outputs]
        assert [timing is not None for timing in timings] == [True, False, False, True]
        first, last = timings[0], timings[-1]
        assert first is not None and last is not None
        assert first.decode_s == 0
        assert (first.queue_s, first.prefill_s) == (last.queue_s, last.prefill_s)
        assert last.prefill_s >= 0.05 and last.decode_s >= 3 * 0.05
        assert last.queue_s + last.prefill_s + last.decode_s <= wall_s
