"""`/metrics` adds up: what clients were told that they used is what the counters have gained."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest

from frontend.engine_calls import EngineSnapshot
from frontend.engine_client import EngineClient
from frontend.metrics import Metrics
from frontend.metrics.engines import EngineTotals
from frontend.prompt.piecewise import TokenizationStats
from ipc.stats import RESIDENCY_BOUNDS_S, STEP_TOKENS_BOUNDS, Durations, EngineStats
from tests.frontend.http_stack import Scrape, Stack, http_stack
from tests.frontend.scripted_engine import ScriptedEngine, says
from tests.wire_peers import private_endpoint, request, running_server, wait_until

BLOCK_SIZE = 16
# As the peer's documentation lists them, without what we do not have (sleep, flops, external and multimodal caches).
GAUGES = {
    "num_requests_running": ("engine", "model_name"),
    "num_requests_waiting": ("engine", "model_name"),
    "num_requests_waiting_by_reason": ("engine", "model_name", "reason"),
    "kv_cache_usage_perc": ("engine", "model_name"),
    "engine_up": ("engine", "model_name"),
    "kv_kept_blocks": ("engine", "model_name"),
}
COUNTERS = {
    "prefix_cache_queries": ("engine", "model_name"),
    "prefix_cache_hits": ("engine", "model_name"),
    "prefix_cache_copied": ("engine", "model_name"),
    "prefix_cache_resumed_queries": ("engine", "model_name"),
    "prefix_cache_resumed_hits": ("engine", "model_name"),
    "prefix_cache_waits": ("engine", "model_name"),
    "prefix_cache_misses": ("engine", "model_name", "reason"),
    "prefix_cache_missed_tokens": ("engine", "model_name", "reason"),
    "kept_blocks_refused": ("engine", "model_name"),
    "kept_blocks_given_up": ("engine", "model_name"),
    "tenant_prompt_tokens": ("model_name", "tenant"),
    "tenant_prompt_tokens_cached": ("model_name", "tenant"),
    "num_preemptions": ("engine", "model_name"),
    "prompt_tokens": ("engine", "model_name"),
    "prompt_tokens_by_source": ("engine", "model_name", "source"),
    "prompt_tokens_cached": ("engine", "model_name"),
    "prompt_tokens_cached_by_source": ("engine", "model_name", "source"),
    "generation_tokens": ("engine", "model_name"),
    "request_success": ("engine", "finished_reason", "model_name"),
    "admission_rejections": ("model_name", "reason"),
    "engine_restarts": ("engine", "model_name"),
}
HISTOGRAMS = [
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_num_preemptions",
    "request_prefill_kv_computed_tokens",
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, chat_model_dir: Path) -> Iterator[Stack]:
    # 24 blocks of 16 tokens: a few requests at once must preempt each other.
    with http_stack(tmp_path_factory.mktemp("s"), chat_model_dir, "--step-s", "0.002", num_blocks=24) as stack:
        yield stack


def increase(before: Scrape, after: Scrape, name: str, *labels: str) -> float:
    return after(name, *labels) - before(name, *labels)


def test_every_family_is_there_from_the_start_with_the_peers_labels(stack: Stack) -> None:
    seen = stack.scrape()
    for name, labels in GAUGES.items():
        assert seen.families[f"foreword:{name}"].type == "gauge"
        assert seen.labels[f"foreword:{name}"] == {labels}
    for name, labels in COUNTERS.items():
        assert seen.families[f"foreword:{name}"].type == "counter"
        assert seen.labels[f"foreword:{name}_total"] == {labels}
    for name in HISTOGRAMS:
        assert seen.families[f"foreword:{name}"].type == "histogram"
        assert seen.labels[f"foreword:{name}_sum"] == {("engine", "model_name")}
        assert seen.labels[f"foreword:{name}_bucket"] == {("engine", "le", "model_name")}
    (config,) = seen.families["foreword:cache_config_info"].samples
    assert config.labels["num_gpu_blocks"] == "24"
    assert config.labels["kv_cache_size_tokens"] == str(24 * BLOCK_SIZE)
    assert config.labels["enable_prefix_caching"] == "True"
    assert seen("request_success_total", "abort") == seen("admission_rejections_total", "max_num_queued_reqs") == 0
    assert seen.values["process_resident_memory_bytes", ()] > 0


def test_prometheus_may_choose_the_format(stack: Stack) -> None:
    plain = stack.http.get("/metrics", headers={"accept": "text/plain"})
    assert plain.headers["content-type"].startswith("text/plain; version=")
    modern = stack.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert modern.headers["content-type"].startswith("application/openmetrics-text")
    assert modern.text.endswith("# EOF\n")


def test_one_request_cold_and_warm(stack: Stack) -> None:
    prompt = [7] * 40
    for hit in (0, 39):
        before = stack.scrape()
        usage = stack.complete(prompt, 8)["usage"]
        after = stack.scrape()
        assert usage["prompt_tokens_details"]["cached_tokens"] == hit
        gained = {name: increase(before, after, f"{name}_total") for name in ("prompt_tokens", "generation_tokens")}
        assert gained == {"prompt_tokens": 40, "generation_tokens": 8}
        assert increase(before, after, "prompt_tokens_cached_total") == hit
        assert increase(before, after, "prompt_tokens_by_source_total", "local_cache_hit") == hit
        assert increase(before, after, "prompt_tokens_by_source_total", "local_compute") == 40 - hit
        assert increase(before, after, "prompt_tokens_cached_by_source_total", "device") == hit
        assert increase(before, after, "prefix_cache_queries_total") == 40
        assert increase(before, after, "prefix_cache_hits_total") == hit
        assert increase(before, after, "prefix_cache_copied_total") == hit % BLOCK_SIZE
        assert increase(before, after, "request_success_total", "length") == 1
        assert increase(before, after, "request_prefill_kv_computed_tokens_sum") == 40 - hit
        assert increase(before, after, "request_params_max_tokens_sum") == 8
        assert increase(before, after, "inter_token_latency_seconds_count") == 7
        assert increase(before, after, "iteration_tokens_total_sum") == 40 - hit + 7
        assert increase(before, after, "iteration_tokens_total_count") == 8
        times = {
            name: increase(before, after, f"{name}_seconds_sum")
            for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time", "request_prefill_time")
        }
        assert all(increase(before, after, f"{name}_seconds_count") == 1 for name in times)
        assert times["e2e_request_latency"] > times["time_to_first_token"] > times["request_prefill_time"] > 0
        decode_s = increase(before, after, "request_decode_time_seconds_sum")
        assert decode_s >= 7 * 0.002
        assert increase(before, after, "request_inference_time_seconds_sum") == pytest.approx(
            decode_s + times["request_prefill_time"]
        )
        assert increase(before, after, "request_time_per_output_token_seconds_sum") == pytest.approx(decode_s / 7)


def test_a_stop_string_counts_what_was_handed_on(stack: Stack) -> None:
    text = stack.complete([9], 30)["choices"][0]["text"]
    before = stack.scrape()
    usage = stack.complete([9], 30, stop=text[8:10])["usage"]
    after = stack.scrape()
    assert 0 < usage["completion_tokens"] < 30
    assert increase(before, after, "generation_tokens_total") == usage["completion_tokens"]
    assert increase(before, after, "request_success_total", "stop") == 1
    # The engine had no last word on it.
    assert increase(before, after, "request_decode_time_seconds_count") == 1
    assert increase(before, after, "request_decode_time_seconds_sum") > 0


@pytest.mark.parametrize(
    ("fields", "num_output_tokens"),
    [({"n": 3}, 24), ({"n": 3, "prompt": [[3, 1], [4] * 20]}, 48), ({"max_tokens": 0, "echo": True, "logprobs": 1}, 0)],
)
def test_choices_and_scored_prompts_count_as_their_usage_says(
    stack: Stack, fields: dict[str, Any], num_output_tokens: int
) -> None:
    before = stack.scrape()
    usage = stack.complete(**({"prompt": [5] * 20} | fields))["usage"]
    after = stack.scrape()
    assert usage["completion_tokens"] == num_output_tokens
    assert increase(before, after, "prompt_tokens_total") == usage["prompt_tokens"]
    assert increase(before, after, "generation_tokens_total") == usage["completion_tokens"]
    assert increase(before, after, "request_success_total", "length") == len(fields.get("prompt", "x"))


async def events_of(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def test_the_sum_of_all_usage_is_what_the_counters_gain_also_with_aborts_and_preemption(stack: Stack) -> None:
    """And while some is kept, some not written, and the cache is reset again and again."""
    rng = random.Random(5)
    before = stack.scrape()
    num_logged = len(stack.log_lines("request_finished"))
    usages: list[dict[str, Any]] = []

    async def one(http: httpx.AsyncClient, leaves: bool) -> None:
        start = rng.randrange(3)
        prompt = [10 + start] * rng.randrange(1, 70)
        body = {
            "prompt": prompt,
            "max_tokens": 200 if leaves else rng.randrange(1, 60),
            "ignore_eos": True,
            "n": rng.choice([1, 1, 2]),
            "cache": rng.choice([{}, {"ttl_s": 60}, {"ttl_s": 0.01, "priority": 1}, {"write": False}]),
        }
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/v1/completions", json=body | streamed) as response:
            events = events_of(response)
            event = await anext(events)
            if leaves:
                return  # its prompt is counted, and some of its output
            async for event in events:  # noqa: B007
                pass
        usages.append(event["usage"])

    async with httpx.AsyncClient(base_url=stack.url, timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        # Prompts of one completion are requests of their own.
        batch = asyncio.create_task(
            http.post("/v1/completions", json={"prompt": [[1, 2, 3], [4] * 20], "max_tokens": 5, "ignore_eos": True})
        )
        requests = asyncio.gather(*(one(http, leaves=n % 4 == 0) for n in range(32)))
        while not requests.done():
            (await http.post("/reset_prefix_cache")).raise_for_status()
            await asyncio.sleep(0.05)
        await requests
        usages.append((await batch).json()["usage"])
    wait_until(lambda: stack.http.get("/health").json()["num_requests"] == 0)
    wait_until(lambda: len(stack.log_lines("request_finished")) == num_logged + 34)
    # An abort reaches the engine a little later than its frontend's books.
    wait_until(lambda: stack.scrape()("kv_cache_usage_perc") == 0)
    after = stack.scrape()
    assert increase(before, after, "num_preemptions_total") > 0
    assert increase(before, after, "prefix_cache_resumed_queries_total") > 0

    logged = stack.log_lines("request_finished")[num_logged:]
    completed = [line for line in logged if line["finish_reason"] == "length"]
    aborted = [line for line in logged if line["finish_reason"] == "abort"]
    assert (len(completed), len(aborted)) == (26, 8)
    # Those that ended were told by their usage …
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert sum(line["prompt_tokens"] for line in completed) == sum(usage["prompt_tokens"] for usage in usages)
    assert sum(line["cached_tokens"] for line in completed) == sum(cached) > 0
    assert sum(line["output_tokens"] for line in completed) == sum(usage["completion_tokens"] for usage in usages)
    # … and with those that broke off they are all that was counted, by the frontend and by the engine.
    for name, field in {
        "prompt_tokens_total": "prompt_tokens",
        "prompt_tokens_cached_total": "cached_tokens",
        "generation_tokens_total": "output_tokens",
        "prefix_cache_queries_total": "prompt_tokens",
        "prefix_cache_hits_total": "cached_tokens",
        "request_prompt_tokens_sum": "prompt_tokens",
        "request_generation_tokens_sum": "output_tokens",
    }.items():
        assert increase(before, after, name) == sum(line[field] for line in logged), name
    assert all(line["output_tokens"] > 0 for line in aborted)
    assert increase(before, after, "request_success_total", "length") == 26
    assert increase(before, after, "request_success_total", "abort") == 8
    assert increase(before, after, "request_num_preemptions_sum") <= increase(before, after, "num_preemptions_total")


def test_one_line_per_request_and_nothing_of_its_content(stack: Stack) -> None:
    before = len(stack.log_lines("request_finished"))
    salt, text = "a-tenants-secret", "sensitive words"
    answer = stack.complete(text, 3, cache_salt=salt)
    (line,) = stack.log_lines("request_finished")[before:]
    assert line["request_id"] == f"{answer['id']}-0"
    assert (line["level"], line["process"], line["finish_reason"]) == ("info", "http", "length")
    assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert (line["cached_tokens"], line["output_tokens"], line["engine"]) == (0, 3, 0)
    assert 0 < line["ttft_s"] <= line["e2e_s"]
    log = json.dumps(stack.log_lines("request_finished"))
    assert salt not in log and text not in log and answer["choices"][0]["text"] not in log


def test_a_refused_request_counts_as_an_error_and_nothing_else(stack: Stack) -> None:
    before = stack.scrape()
    body = {"prompt": [5], "presence_penalty": 77}
    assert stack.http.post("/v1/completions", json=body).status_code == 400
    after = stack.scrape()
    assert increase(before, after, "request_success_total", "error") == 1
    assert increase(before, after, "prompt_tokens_total") == 0
    assert increase(before, after, "e2e_request_latency_seconds_count") == 0


def test_counters_of_an_engine_go_on_through_its_death(stack: Stack) -> None:
    stack.complete([8] * 20, 4)
    before = stack.scrape()
    stack.kill_engine()
    wait_until(lambda: stack.http.get("/health").status_code == 503)
    down = stack.scrape()
    assert (down("engine_up"), down("kv_cache_usage_perc")) == (0, 0)
    assert down("prefix_cache_queries_total") == before("prefix_cache_queries_total")
    stack.start_engine()
    stack.wait_ready()
    stack.complete([8] * 20, 4)
    after = stack.scrape()
    assert after("engine_up") == 1
    assert increase(before, after, "engine_restarts_total") == 1
    assert increase(before, after, "prefix_cache_queries_total") == 20
    assert increase(before, after, "iteration_tokens_total_count") == 4
    assert all(
        after.values[sample] >= value
        for sample, value in before.values.items()
        if sample[0].endswith(("_total", "_count"))
    )


def kept_tokens(answer: dict[str, Any]) -> int:
    kept: int = answer["usage"]["prompt_tokens_details"]["kept_tokens"]
    return kept


def test_nothing_kept_outlives_an_engine_and_what_is_kept_anew_is_said_to_be(stack: Stack) -> None:
    body = {"prompt": [9] * 40, "max_tokens": 1, "cache": {"ttl_s": 600}}
    assert kept_tokens(stack.complete(**body)) == 40 and stack.scrape()("kv_kept_blocks") == 3
    stack.kill_engine()
    wait_until(lambda: stack.http.get("/health").status_code == 503)
    assert stack.scrape()("kv_kept_blocks") == 0
    stack.start_engine()
    stack.wait_ready()
    again = stack.complete(**body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert kept_tokens(again) == 40 and stack.scrape()("kv_kept_blocks") == 3
    stack.http.post("/reset_prefix_cache").raise_for_status()


def test_time_passes_for_what_an_engine_keeps_while_its_process_stands_still(stack: Stack) -> None:
    for first in range(2):
        assert kept_tokens(stack.complete([20 + first] * 32, 1, cache={"ttl_s": 0.5})) == 32
    stack.engine.send_signal(19)
    time.sleep(0.6)
    stack.engine.send_signal(18)
    stack.wait_ready()
    assert stack.scrape()("kv_kept_blocks") == 0


def test_a_scrape_does_not_wait_for_an_engine_that_does_not_answer(stack: Stack) -> None:
    before = stack.scrape()
    stack.engine.send_signal(19)
    try:
        assert stack.scrape()("engine_steps_total") == before("engine_steps_total")
    finally:
        stack.engine.send_signal(18)
    stack.wait_ready()


async def test_an_engine_that_drains_is_still_counted(tmp_path: Path) -> None:
    endpoint = private_endpoint(tmp_path)
    with running_server(endpoint, step_s=0.01) as server:
        client = EngineClient(endpoint)
        metrics = Metrics([client], "tiny", TokenizationStats())
        await client.start()
        try:
            await client.wait_ready(20)
            async with client.submit(request("r", [5], 60_000)) as stream:
                await anext(stream)
                server.drain(60)
                while client.state != "draining":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                before = server.engine.stats().generated_tokens
                await metrics.refresh()
                seen = Scrape(generate_latest(metrics.registry).decode())
                assert (seen("engine_up"), seen("num_requests_running")) == (1, 1)
                assert seen("engine_generated_tokens_total") >= before
        finally:
            await client.close()


def test_totals_of_an_engine_never_seen_are_zero() -> None:
    totals = EngineTotals()
    assert totals.counter("steps") == 0 and sum(totals.step_tokens) == 0 and not totals.dropped_messages


def snapshot(epoch: int, numbers: int, *, watches_blocks: bool = True) -> EngineSnapshot:
    fields: dict[str, Any] = dict.fromkeys(EngineStats.__struct_fields__, numbers)
    residency = {"lifetime": Durations([numbers, 1], numbers / 2)} if watches_blocks else {}
    misses = {"diverged": numbers, "evicted": 1}
    fields |= {"step_tokens": [numbers, 2], "block_residency": residency}
    fields |= {"prefix_cache_misses": misses, "prefix_cache_missed_tokens": misses}
    fields |= {"kv_event_batches_dropped": {"queue_full": numbers}, "running_adapters": [], "waiting_adapters": []}
    return EngineSnapshot(epoch, EngineStats(**fields), {"body": numbers})


def test_totals_add_up_over_an_engines_lives() -> None:
    totals = EngineTotals()
    for seen in (snapshot(1, 3), snapshot(1, 5), snapshot(2, 1, watches_blocks=False), snapshot(3, 2), snapshot(3, 4)):
        totals.update(seen)
    assert totals.counter("prefix_cache_hits") == 5 + 1 + 4
    assert totals.step_tokens[:3] == [5 + 1 + 4, 2 + 2 + 2, 0]
    assert totals.block_residency == {"lifetime": Durations([5 + 4, 1 + 1], 2.5 + 2)}
    assert totals.dropped_messages == {"body": 5 + 1 + 4}
    assert totals.by_reason("prefix_cache_misses") == {"diverged": 5 + 1 + 4, "evicted": 1 + 1 + 1}
    assert totals.by_reason("kv_event_batches_dropped") == {"queue_full": 5 + 1 + 4}


async def test_blocks_that_are_watched_have_families_of_their_own() -> None:
    class Watching(ScriptedEngine):
        async def stats(self, timeout_s: float) -> EngineSnapshot:
            counts = [1] * (len(RESIDENCY_BOUNDS_S) + 1)
            told = {name: Durations(counts, 5.0) for name in ("lifetime", "idle_before_evict", "reuse_gap")}
            steps = [1] * (len(STEP_TOKENS_BOUNDS) + 1)
            stats = replace(snapshot(1, 1).stats, block_residency=told, step_tokens=steps)
            return EngineSnapshot(1, stats, {})

    metrics = Metrics([Watching(says([]))], "tiny", TokenizationStats())  # type: ignore[list-item]
    await metrics.refresh()
    seen = Scrape(generate_latest(metrics.registry).decode())
    for name in ("kv_block_lifetime", "kv_block_idle_before_evict", "kv_block_reuse_gap"):
        assert seen(f"{name}_seconds_sum") == 5
        assert seen(f"{name}_seconds_count") == len(RESIDENCY_BOUNDS_S) + 1


async def test_those_who_wait_are_told_apart_by_what_they_wait_for() -> None:
    class Waiting(ScriptedEngine):
        async def stats(self, timeout_s: float) -> EngineSnapshot:
            steps = [1] * (len(STEP_TOKENS_BOUNDS) + 1)
            numbers = snapshot(1, 9, watches_blocks=False).stats
            stats = replace(numbers, num_waiting=5, num_waiting_aside=2, step_tokens=steps)
            return EngineSnapshot(1, stats, {})

    metrics = Metrics([Waiting(says([]))], "tiny", TokenizationStats())  # type: ignore[list-item]
    await metrics.refresh()
    seen = Scrape(generate_latest(metrics.registry).decode())
    assert seen("num_requests_waiting") == 5
    assert seen("num_requests_waiting_by_reason", "capacity") == 3
    assert seen("num_requests_waiting_by_reason", "deferred") == 2
    assert seen("prefix_cache_waits_total") == 9
