"""What one request leaves in the metrics: once per request, whatever its continuations do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from frontend.engine_client import EngineClient
from frontend.metrics.families import RequestFamilies
from frontend.metrics.request_record import RequestRecord
from ipc.vocabulary import EngineRequest, RequestOutput, RequestTiming, SamplingParams
from tests.wire_peers import private_endpoint, running_server


class FakeStream:
    engine_index = 0

    def arrive(self, index: int, num_tokens: int, timing: RequestTiming | None = None) -> None:
        self.on_arrival(RequestOutput("r", [1] * num_tokens, index=index, timing=timing))  # type: ignore[attr-defined]


class Books:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.families = RequestFamilies(self.registry, "tiny", [0, 1])

    def __call__(self, name: str, engine: int = 0, **labels: str) -> float:
        value = self.registry.get_sample_value(
            f"foreword:{name}", {"model_name": "tiny", "engine": str(engine), **labels}
        )
        assert value is not None
        return value

    def record(self, prompt_tokens: int = 10, **sampling: int) -> RequestRecord:
        request = EngineRequest("r", [5] * prompt_tokens, SamplingParams(**sampling))
        return RequestRecord(self.families, request, received_s=0.0)


@pytest.fixture
def books() -> Books:
    return Books()


def test_continuations_share_a_prompt_and_add_up(books: Books) -> None:
    stream = FakeStream()
    with books.record(n=3, max_tokens=9) as record:
        record.follow(stream)  # type: ignore[arg-type]
        stream.arrive(0, 1, RequestTiming(1.0, 2.0, 0.0, 0))
        record.count(0, 1, 8, None)
        for index, num_tokens in ((0, 4), (1, 5), (2, 2)):
            stream.arrive(index, num_tokens, RequestTiming(1.0, 2.0, float(num_tokens), index))
            record.count(index, num_tokens, 8, "stop" if index == 2 else "length")
    assert books("prompt_tokens_total") == books("request_prompt_tokens_sum") == 10
    assert books("prompt_tokens_cached_total") == 8
    assert books("generation_tokens_total") == books("request_generation_tokens_sum") == 12
    assert books("request_max_num_generation_tokens_sum") == 5
    assert (books("request_params_n_sum"), books("request_params_max_tokens_sum")) == (3, 9)
    assert books("request_success_total", finished_reason="stop") == 1
    assert books("request_success_total", finished_reason="length") == 0
    assert books("request_num_preemptions_sum") == 3
    assert books("request_decode_time_seconds_sum") == 5
    assert books("request_inference_time_seconds_sum") == 2 + 5
    assert books("time_to_first_token_seconds_count") == 1
    # Only tokens of one continuation follow each other.
    assert books("inter_token_latency_seconds_count") == 4


@pytest.mark.parametrize(
    ("error", "reason"),
    [(GeneratorExit(), "abort"), (asyncio.CancelledError(), "abort"), (RuntimeError("over"), "error")],
)
def test_what_breaks_off_keeps_what_it_got(books: Books, error: BaseException, reason: str) -> None:
    stream = FakeStream()
    with suppress(type(error)), books.record() as record:
        record.follow(stream)  # type: ignore[arg-type]
        stream.arrive(0, 3, RequestTiming(1.0, 2.0, 0.0, 0))
        record.count(0, 2, 0, None)  # one more had arrived
        raise error
    assert books("generation_tokens_total") == books("request_generation_tokens_sum") == 2
    assert books("request_success_total", finished_reason=reason) == 1
    assert books("request_success_total", finished_reason="stop") == 0


def test_who_leaves_after_the_last_token_did_not_abort(books: Books) -> None:
    stream = FakeStream()
    with suppress(GeneratorExit), books.record(n=2) as record:
        record.follow(stream)  # type: ignore[arg-type]
        for index, finish_reason in enumerate(("stop", "length")):
            stream.arrive(index, 1)
            record.count(index, 1, 0, finish_reason)  # type: ignore[arg-type]
        raise GeneratorExit
    assert books("request_success_total", finished_reason="length") == 1
    assert books("request_success_total", finished_reason="abort") == 0


def test_what_never_had_an_output_has_no_latencies(books: Books) -> None:
    with suppress(asyncio.CancelledError), books.record() as record:
        record.follow(FakeStream())  # type: ignore[arg-type]
        raise asyncio.CancelledError
    assert books("request_success_total", finished_reason="abort") == 1
    assert books("prompt_tokens_total") == books("request_prompt_tokens_count") == 0
    assert books("e2e_request_latency_seconds_count") == 0


def test_what_was_never_sent_leaves_no_trace(books: Books) -> None:
    with pytest.raises(RuntimeError), books.record():
        raise RuntimeError("no engine")
    assert books("request_success_total", finished_reason="error") == 0


def test_a_request_counts_for_the_engine_it_moved_to(books: Books) -> None:
    stream = FakeStream()
    with books.record() as record:
        record.follow(stream)  # type: ignore[arg-type]
        stream.engine_index = 1
        stream.arrive(0, 1, RequestTiming(1.0, 2.0, 0.0, 0))
        record.count(0, 1, 0, "stop")
    assert (books("prompt_tokens_total", engine=0), books("prompt_tokens_total", engine=1)) == (0, 10)
    assert books("request_success_total", engine=1, finished_reason="stop") == 1


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    endpoint = private_endpoint(tmp_path)
    with running_server(endpoint, step_s=0.01):
        yield endpoint


async def test_latencies_are_those_of_arrival_not_of_a_slow_reader(books: Books, endpoint: str) -> None:
    client = EngineClient(endpoint)
    await client.start()
    await client.wait_ready(20)
    request = EngineRequest("r", [5], SamplingParams(temperature=0, max_tokens=20))
    with RequestRecord(books.families, request, received_s=0.0) as record:
        async with client.submit(request) as stream:
            record.follow(stream)
            while client.num_in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            async for output in stream:
                record.count(0, len(output.new_token_ids), output.num_cached_tokens, output.finish_reason)
    assert books("inter_token_latency_seconds_count") == 19
    # Read all at once, they would be nothing; but the first may have been seen late.
    assert books("inter_token_latency_seconds_sum") >= 19 * 0.01 / 2
    assert books("request_generation_tokens_sum") == 20
    await client.close()
