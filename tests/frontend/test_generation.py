"""Several continuations with stop strings, from a real engine over the real wire: each ends alone, nothing is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from engine_core import EngineConfig, EngineCore
from engine_core.runner import ScheduledRequest, StepResult
from engine_core.server import EngineCoreServer
from frontend.continuation import TextDelta
from frontend.engine_client import EngineClient
from frontend.generation import generate, interleave
from frontend.metrics.families import RequestFamilies
from frontend.metrics.request_record import RequestRecord
from ipc.vocabulary import EngineRequest, SamplingParams
from tests.fake_runner import VOCAB_SIZE, FakeRunner, next_token
from tests.wire_peers import is_idle, private_endpoint, running_server, wait_until

PROMPT = list(range(1, 20))
NUM_TOKENS = 40


class ManyVoices(FakeRunner):
    """Every continuation says something else."""

    def execute(self, batch: Sequence[ScheduledRequest]) -> StepResult:
        result = super().execute(batch)
        for place, item in enumerate(batch):
            if (token_id := result.token_ids[place]) is not None:
                result.token_ids[place] = (token_id + item.request.index) % VOCAB_SIZE
        return result


class StepByStep(ManyVoices):
    """Computes as many steps as it was allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(0)
        self.num_begun = 0

    def execute(self, batch: Sequence[ScheduledRequest]) -> StepResult:
        self.num_begun += 1
        assert self.allowed.acquire(timeout=20)
        return super().execute(batch)


class OneCharacterPerToken:
    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(0x4E00 + token_id) for token_id in token_ids)

    def flush(self) -> str:
        return ""


def expected(index: int, num_tokens: int = NUM_TOKENS) -> str:
    token_ids = list(PROMPT)
    for _ in range(num_tokens):
        token_ids.append((next_token(token_ids) + index) % VOCAB_SIZE)
    return OneCharacterPerToken().push(token_ids[len(PROMPT) :])


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EngineCoreServer]:
    engine = EngineCore(EngineConfig(max_num_seqs=6), ManyVoices(step_s=0.001))
    with running_server(private_endpoint(tmp_path), engine=engine) as server:
        yield server


@pytest.fixture
async def client(server: EngineCoreServer, tmp_path: Path) -> AsyncIterator[EngineClient]:
    client = EngineClient(private_endpoint(tmp_path))
    await client.start()
    await client.wait_ready(20)
    yield client
    await client.close()


def request(n: int, request_id: str = "r") -> EngineRequest:
    return EngineRequest(request_id, PROMPT, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, n=n))


def generated(client: EngineClient, asked: EngineRequest, stops: Sequence[str]) -> AsyncGenerator[TextDelta]:
    families = RequestFamilies(CollectorRegistry(), "fake", [client.index])
    return generate(client, asked, OneCharacterPerToken, stops, RequestRecord(families, asked, 0.0))


async def idle(server: EngineCoreServer, client: EngineClient) -> None:
    assert client.num_in_flight == 0
    await asyncio.to_thread(wait_until, lambda: is_idle(server.engine) and not server.link._requests)


@pytest.mark.parametrize("n", [1, 3, 9])
@pytest.mark.parametrize("pause_s", [0.0, 0.01], ids=["reading", "slow"])
@pytest.mark.parametrize("stopped", [(), (0,), (1, 2), tuple(range(9))], ids=str)
async def test_a_stop_string_ends_one_continuation(
    server: EngineCoreServer, client: EngineClient, n: int, pause_s: float, stopped: Sequence[int]
) -> None:
    stops = [expected(index)[5 + index : 7 + index] for index in stopped]
    texts = [""] * n
    ends: list[TextDelta | None] = [None] * n
    counts = [0] * n
    async with aclosing(generated(client, request(n), stops)) as deltas:
        async for delta in deltas:
            assert ends[delta.index] is None
            texts[delta.index] += delta.text
            counts[delta.index] += delta.num_tokens
            if delta.finish_reason is not None:
                ends[delta.index] = delta
            await asyncio.sleep(pause_s)
    for index, end in enumerate(ends):
        assert end is not None
        if index in stopped:
            assert (texts[index], end.stop_reason) == (expected(index)[: 5 + index], stops[stopped.index(index)])
            assert counts[index] == 7 + index
        else:
            assert (texts[index], end.finish_reason) == (expected(index), "length")
            assert counts[index] == NUM_TOKENS
    await idle(server, client)


async def test_an_aborted_continuation_costs_nothing_more(tmp_path: Path) -> None:
    runner = StepByStep()
    stops = [expected(index)[2:4] for index in range(5)]
    num_ended = 0
    with running_server(private_endpoint(tmp_path), engine=EngineCore(EngineConfig(max_num_seqs=6), runner)) as server:
        client = EngineClient(private_endpoint(tmp_path))
        await client.start()
        await client.wait_ready(20)
        runner.allowed.release(6)
        async with aclosing(generated(client, request(6), stops)) as deltas:
            async for delta in deltas:
                if delta.finish_reason is not None:
                    num_ended += 1
                    if num_ended == 5:
                        # Whoever answers this has passed on what came before it.
                        await client.calls.stats(20)
                        runner.allowed.release(NUM_TOKENS)
        assert num_ended == 6
        await idle(server, client)
        assert server.engine.stats().generated_tokens < 2 * NUM_TOKENS + 6
        await client.close()


async def test_a_stream_ends_by_its_own_count(tmp_path: Path) -> None:
    """The engine's last word came before it heard that the other continuation was aborted: it has none to end with."""
    runner = StepByStep()
    engine = EngineCore(EngineConfig(), runner)
    client = EngineClient(private_endpoint(tmp_path))
    with running_server(private_endpoint(tmp_path), engine=engine) as server:
        await client.start()
        await client.wait_ready(20)
        asked = EngineRequest("r", PROMPT, SamplingParams(temperature=0, max_tokens=3, n=2))
        async with client.submit(asked) as stream:
            runner.allowed.release(2)
            while (await anext(stream)).index != 1:
                pass
            # The first one ends in the third step, which has begun.
            await asyncio.to_thread(wait_until, lambda: runner.num_begun == 3)
            stream.abort_continuation(1)
            # Whoever answers this has passed on what came before it: no fourth step begins.
            await client.calls.stats(20)
            runner.allowed.release()
            async with asyncio.timeout(20):
                outputs = [output async for output in stream]
        assert [(output.index, output.finish_reason) for output in outputs] == [(0, "length")]
        assert not outputs[-1].ends_request
        await idle(server, client)
        await client.close()


async def test_of_an_aborted_continuation_comes_nothing_not_even_an_end_that_has_arrived(client: EngineClient) -> None:
    async with client.submit(request(2)) as stream:
        while (await anext(stream)).index != 1:
            pass
        async with asyncio.timeout(20):
            while client.num_in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        stream.abort_continuation(1)
        assert {output.index async for output in stream} == {0}


@pytest.mark.parametrize("num_deltas", [0, 1, 2, 7, 30])
async def test_leaving_early_leaves_nothing(server: EngineCoreServer, client: EngineClient, num_deltas: int) -> None:
    generations = [generated(client, request(4, f"r{i}"), [expected(1)[3:5]]) for i in range(num_deltas % 3 + 1)]
    async with aclosing(interleave(generations)) as deltas:
        for _ in range(num_deltas):
            await anext(deltas)
    await idle(server, client)


async def test_generations_mix_and_each_comes_to_its_end(server: EngineCoreServer, client: EngineClient) -> None:
    stops = [expected(1)[3:5], expected(0)[9:11]]
    generations = [generated(client, request(3, f"r{i}"), stops) for i in range(4)]
    texts: dict[tuple[int, int], str] = {}
    async with aclosing(interleave(generations)) as deltas:
        async for generation, delta in deltas:
            texts[generation, delta.index] = texts.get((generation, delta.index), "") + delta.text
    ends = {0: 9, 1: 3, 2: NUM_TOKENS}
    assert texts == {(i, index): expected(index)[: ends[index]] for i in range(4) for index in range(3)}
    await idle(server, client)
