"""Several engines behind one face: the least busy one computes, and what one cannot do another may."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from engine_core import EngineConfig, EngineCore, tokenizer_digest
from engine_core.server import EngineCoreServer
from frontend.engine_client import EngineClient
from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from frontend.engine_pool import EnginePool, open_engines
from frontend.generation import generate
from frontend.http_config import EngineAddress, HttpConfig
from frontend.metrics.families import RequestFamilies
from frontend.metrics.request_record import RequestRecord
from ipc.vocabulary import EngineRequest, SamplingParams
from tests.fake_adapters import write_fake_adapter
from tests.fake_runner import FakeRunner, continuation
from tests.wire_peers import is_idle, request, running_server, start_engine, wait_until

STEP_S = 0.005


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_until, condition)


class Silent:
    """A detokenizer of tokens that have no text."""

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Engines:
    """Servers in threads, and a pool of clients of theirs that beat fast."""

    def __init__(self, directory: Path) -> None:
        self._stack = ExitStack()
        self._directory = directory
        directory.chmod(0o700)
        self.num_started = 0
        self.servers: list[EngineCoreServer] = []

    def start(
        self, *, num_blocks: int = 4096, step_s: float = STEP_S, num_adapter_slots: int = 0, **settings: Any
    ) -> EngineCoreServer:
        runner = FakeRunner(num_blocks=num_blocks, step_s=step_s, num_adapter_slots=num_adapter_slots)
        engine = EngineCore(EngineConfig(**settings), runner)
        server = self._stack.enter_context(running_server(self._next_endpoint(), engine=engine))
        self.servers.append(server)
        return server

    def start_process(self, *, step_s: float = STEP_S) -> subprocess.Popen[bytes]:
        """One to be killed."""
        process = self._stack.enter_context(start_engine(self._next_endpoint(), step_s))
        self._stack.callback(process.kill)
        return process

    def _next_endpoint(self) -> str:
        self.num_started += 1
        return self.endpoint(self.num_started - 1)

    def endpoint(self, index: int) -> str:
        return f"ipc://{self._directory}/{index}"

    @asynccontextmanager
    async def pool(self) -> AsyncIterator[EnginePool]:
        pool = EnginePool(
            [
                EngineClient(self.endpoint(index), index=index, heartbeat_interval_s=0.1, heartbeat_timeout_s=2.0)
                for index in range(self.num_started)
            ]
        )
        await pool.start()
        await asyncio.gather(*(engine.wait_ready(20) for engine in pool.engines))
        try:
            yield pool
        finally:
            await pool.close()
            for server in self.servers:
                await until(lambda server=server: is_idle(server.engine))

    def stop(self) -> None:
        self._stack.close()


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    engines = Engines(tmp_path)
    yield engines
    engines.stop()


async def complete(pool: EnginePool, asked: EngineRequest) -> list[int]:
    async with pool.submit(asked) as stream:
        return [token async for output in stream for token in output.new_token_ids]


async def test_requests_go_to_the_least_busy_engine(engines: Engines) -> None:
    for _ in range(3):
        engines.start()
    async with engines.pool() as pool:
        assert pool.state == "ready" and pool.down_reason is None
        # One after the other, all go where the cache is warm.
        for n in range(3):
            assert await complete(pool, request(f"s{n}", [1, 2], 3)) == continuation([1, 2], 3)
        assert [server.engine.stats().generated_tokens for server in engines.servers] == [9, 0, 0]
        streams = [pool.submit(request(f"r{n}", [n + 1], 60_000)) for n in range(8)]
        assert [engine.num_in_flight for engine in pool.engines] == [3, 3, 2]
        assert pool.num_in_flight == 8
        for stream in streams:
            stream.abort()
        assert pool.num_in_flight == 0


async def test_what_other_frontends_ask_counts_too(engines: Engines) -> None:
    for _ in range(2):
        engines.start()
    async with engines.pool() as other, engines.pool() as pool:
        streams = [other.engines[0].submit(request(f"r{n}", [n + 1], 60_000)) for n in range(3)]
        await until(lambda: pool.engines[0].num_other_requests == 3)
        own = [pool.submit(request(f"own{n}", [n + 1], 60_000)) for n in range(4)]
        assert [engine.num_in_flight for engine in pool.engines] == [1, 3]
        for stream in [*streams, *own]:
            stream.abort()


async def test_a_request_goes_where_it_fits(engines: Engines) -> None:
    engines.start(num_blocks=4)
    engines.start(num_blocks=8)
    async with engines.pool() as pool:
        assert pool.capabilities is not None and pool.capabilities.max_model_len == 128
        assert await complete(pool, request("short", [1] * 10, 10)) == continuation([1] * 10, 10)
        assert await complete(pool, request("long", [1] * 60, 10)) == continuation([1] * 60, 10)
        open_end = EngineRequest("open end", [1] * 70, SamplingParams(temperature=0.0))
        assert len(await complete(pool, open_end)) == 58
        # Where it fits nowhere, as much of it as fits anywhere.
        assert len(await complete(pool, request("longest", [1] * 100, 100))) == 28
        assert [server.engine.stats().generated_tokens for server in engines.servers] == [10, 10 + 58 + 28]


async def test_a_request_without_output_outlives_its_engine(engines: Engines) -> None:
    lost = engines.start_process(step_s=1.0)
    engines.start()
    async with engines.pool() as pool:
        # Within a long step, nothing has come yet.
        async with pool.submit(request("r", [5], 20)) as stream:
            assert pool.engines[0].num_in_flight == 1
            arrived: list[int] = []
            stream.on_arrival = lambda output: arrived.extend(output.new_token_ids)
            assert stream.engine_index == 0
            lost.kill()
            assert [token async for output in stream for token in output.new_token_ids] == continuation([5], 20)
            # Who watches it went with it.
            assert (stream.engine_index, arrived) == (1, continuation([5], 20))
        assert pool.state == "ready"
        assert pool.num_in_flight == 0


async def test_a_request_that_moved_is_counted_once_and_where_it_was_computed(engines: Engines) -> None:
    lost = engines.start_process(step_s=1.0)
    engines.start()
    registry = CollectorRegistry()
    asked = request("r", [5] * 7, 20)
    record = RequestRecord(RequestFamilies(registry, "fake", [0, 1]), asked, time.monotonic())
    async with engines.pool() as pool, aclosing(generate(pool, asked, Silent, (), record)) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        await until(lambda: pool.engines[0].num_in_flight == 1)
        lost.kill()
        told = [await first, *[delta async for delta in deltas]]

    def counted(name: str, engine: int) -> float | None:
        return registry.get_sample_value(f"foreword:{name}", {"model_name": "fake", "engine": str(engine)})

    assert sum(delta.num_tokens for delta in told) == 20
    assert [counted("generation_tokens_total", engine) for engine in (0, 1)] == [0, 20]
    assert [counted("prompt_tokens_total", engine) for engine in (0, 1)] == [0, 7]
    stats = engines.servers[0].engine.stats()
    assert (stats.prefix_cache_queries, stats.generated_tokens) == (7, 20)


async def test_a_request_that_has_begun_does_not(engines: Engines) -> None:
    lost = engines.start_process()
    engines.start()
    async with engines.pool() as pool:
        async with pool.submit(request("r", [5], 60_000)) as stream:
            await anext(stream)
            lost.kill()
            with pytest.raises(EngineUnavailableError, match="closed the connection"):
                async for _ in stream:
                    pass
        assert engines.servers[0].engine.stats().generated_tokens == 0


async def test_a_request_moves_once_only(engines: Engines) -> None:
    processes = [engines.start_process(step_s=2.0) for _ in range(2)]
    engines.start()
    async with engines.pool() as pool:
        async with pool.submit(request("r", [5], 20)) as stream:
            pending = asyncio.ensure_future(anext(stream))
            for index, process in enumerate(processes):
                await until(lambda index=index: pool.engines[index].num_in_flight == 1)
                process.kill()
            with pytest.raises(EngineUnavailableError):
                await pending
        assert engines.servers[0].engine.stats().generated_tokens == 0


async def test_with_every_engine_lost_the_reasons_are_told(engines: Engines) -> None:
    for _ in range(2):
        engines.start()
    async with engines.pool() as pool:
        for server in engines.servers:
            server.stop()
        await until(lambda: pool.state == "down")
        assert pool.down_reason == "engine 0: the engine said goodbye; engine 1: the engine said goodbye"
        with pytest.raises(EngineUnavailableError, match="engine 1"):
            pool.submit(request("r", [5], 20))


async def test_a_draining_engine_finishes_what_it_has_and_gets_nothing_new(engines: Engines) -> None:
    drained = engines.start()
    engines.start()
    async with engines.pool() as pool:
        async with pool.submit(request("old", [5], 200)) as old:
            tokens = (await anext(old)).new_token_ids
            drained.drain(60)
            # Whether sent before or after the news has come: the other engine answers.
            assert await complete(pool, request("new", [7], 10)) == continuation([7], 10)
            await until(lambda: pool.engines[0].state == "draining")
            assert (pool.state, pool.engines[0].down_reason) == ("ready", "the engine is about to stop")
            assert await complete(pool, request("newer", [8], 10)) == continuation([8], 10)
            tokens += [token async for output in old for token in output.new_token_ids]
            assert tokens == continuation([5], 200)
        await until(lambda: pool.engines[0].state == "down")
        assert engines.servers[1].engine.stats().generated_tokens == 20


async def test_a_refusal_for_load_is_tried_elsewhere_and_then_told(engines: Engines) -> None:
    for _ in range(2):
        engines.start(max_num_seqs=1, max_num_queued_requests=0)
    async with engines.pool() as other, engines.pool() as pool:
        async with other.engines[0].submit(request("busy", [1], 60_000)) as busy:
            await anext(busy)
            # The pool may not know of the other frontend's request yet, or ever: it is refused, and goes on.
            pool.engines[0].num_other_requests = 0
            assert await complete(pool, request("r", [5], 10)) == continuation([5], 10)
            async with other.engines[1].submit(request("busy too", [2], 60_000)) as busy_too:
                await anext(busy_too)
                with pytest.raises(RequestRefusedError) as caught:
                    await complete(pool, request("r", [5], 10))
        assert caught.value.error.reason == "max_num_queued_reqs"


async def test_a_wrong_request_is_not_tried_elsewhere(engines: Engines) -> None:
    for _ in range(2):
        engines.start()
    async with engines.pool() as pool:
        with pytest.raises(RequestRefusedError) as caught:
            await complete(pool, request("r", [5_000_000], 10))
        assert caught.value.error.code == "invalid"
        assert engines.servers[1].engine.stats().steps == 0


async def test_one_continuation_can_be_ended(engines: Engines) -> None:
    engines.start()
    async with engines.pool() as pool:
        asked = EngineRequest("r", [5], SamplingParams(temperature=0.0, max_tokens=50, n=2))
        tokens: dict[int, list[int]] = {0: [], 1: []}
        async with pool.submit(asked) as stream:
            async for output in stream:
                tokens[output.index] += output.new_token_ids
                if len(tokens[0]) >= 3:
                    stream.abort_continuation(0)
        assert len(tokens[0]) < 50 and tokens[1] == continuation([5], 50)


class TestAdapters:
    """A request goes where its adapter is."""

    @staticmethod
    def start(engines: Engines, root: Path, number: int = 2) -> None:
        for name in ("one", "two"):
            write_fake_adapter(root / name, name)
        for _ in range(number):
            engines.start(num_adapter_slots=2, enable_lora=True, max_loras=2, lora_root=str(root))

    @staticmethod
    def asked(request_id: str, adapter: str, prompt: list[int], max_tokens: int = 10) -> EngineRequest:
        return msgspec.structs.replace(request(request_id, prompt, max_tokens), adapter=adapter)

    async def test_all_engines_compute_with_what_was_loaded(self, engines: Engines, tmp_path: Path) -> None:
        self.start(engines, tmp_path)
        async with engines.pool() as pool:
            await pool.adapters.load("a", "one", replaces=False)
            asked = [self.asked(f"r{n}", "a" if n % 2 else "", [n + 1] * 20) for n in range(8)]
            outputs = await asyncio.gather(*(complete(pool, each) for each in asked))
            assert outputs == [continuation([n + 1] * 20, 10, "one" if n % 2 else None) for n in range(8)]
            assert all(server.engine.stats().generated_tokens == 40 for server in engines.servers)
            await pool.adapters.unload("a")

    async def test_only_engines_that_have_it_are_chosen(self, engines: Engines, tmp_path: Path) -> None:
        self.start(engines, tmp_path)
        async with engines.pool() as pool:
            engines.servers[1].engine.load_adapter("a", tmp_path / "one")
            engines.servers[0].engine.load_adapter("b", tmp_path / "one")
            async with engines.pool() as later:
                # Found there when it came.
                outputs = await asyncio.gather(*(complete(later, self.asked(f"r{n}", "a", [5])) for n in range(4)))
                assert outputs == [continuation([5], 10, "one")] * 4
                assert [server.engine.stats().generated_tokens for server in engines.servers] == [0, 40]
                later.engines[1].state = "draining"
                with pytest.raises(EngineUnavailableError, match="no engine that is ready has the adapter 'a' now"):
                    later.submit(self.asked("r", "a", [5]))
                with pytest.raises(RequestRefusedError, match="there is no 'c' any more") as caught:
                    later.submit(self.asked("r", "c", [5]))
                assert caught.value.error.param == "adapter"
            assert pool.state == "ready"

    async def test_two_frontends_know_of_each_others_changes(self, engines: Engines, tmp_path: Path) -> None:
        self.start(engines, tmp_path)
        async with engines.pool() as other, engines.pool() as pool:
            await other.adapters.load("a", "one", replaces=False)
            await until(lambda: all(pool.adapters.has(engine, "a") for engine in pool.engines))
            assert await complete(pool, self.asked("r", "a", [5])) == continuation([5], 10, "one")
            await pool.adapters.load("a", "two", replaces=True)
            await until(lambda: other.adapters.by_name["a"].path.endswith("two"))
            await until(lambda: all(other.adapters.has(engine, "a") for engine in other.engines))
            assert await complete(other, self.asked("r", "a", [5])) == continuation([5], 10, "two")
            await other.adapters.unload("a")
            await until(lambda: not pool.adapters.by_name)
            assert [server.engine.adapters() for server in engines.servers] == [[], []]

    async def test_loads_in_many_frontends_at_once_leave_one_adapter(self, engines: Engines, tmp_path: Path) -> None:
        self.start(engines, tmp_path)
        async with engines.pool() as one, engines.pool() as two:
            results = await asyncio.gather(
                one.adapters.load("a", "one", replaces=False),
                two.adapters.load("a", "one", replaces=False),
                return_exceptions=True,
            )
            assert any(not isinstance(result, BaseException) for result in results)
            for pool in (one, two):
                await until(lambda pool=pool: all(pool.adapters.has(engine, "a") for engine in pool.engines))
                assert await complete(pool, self.asked("r", "a", [5])) == continuation([5], 10, "one")

    async def test_two_hundred_names_leave_nothing(self, engines: Engines, tmp_path: Path) -> None:
        self.start(engines, tmp_path)
        async with engines.pool() as pool:
            running = asyncio.create_task(complete(pool, request("base", [7], 500)))
            for n in range(200):
                name = f"a{n}"
                weights = ("one", "two")[n % 2]
                await pool.adapters.load(name, weights, replaces=False)
                if n % 10 == 0:
                    assert await complete(pool, self.asked(name, name, [5], 2)) == continuation([5], 2, weights)
                await pool.adapters.unload(name)
            assert await running == continuation([7], 500)
            assert not pool.adapters.by_name
            assert [engine.loaded_adapters for engine in pool.engines] == [{}, {}]
            assert [server.engine.stats().num_adapters for server in engines.servers] == [0, 0]


async def test_closing_moves_nothing(engines: Engines) -> None:
    for _ in range(2):
        engines.start(step_s=0.5)
    async with engines.pool() as pool, pool.submit(request("r", [5], 60_000)) as stream:
        pending = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(EngineUnavailableError, match="the client was closed"):
            await pending
    # Nothing came after the goodbye.
    assert not engines.servers[1].link.drops.counts


class TestOnlyTheRightModel:
    """What an engine says of itself decides whether it is used; one that is not says why in its state."""

    @staticmethod
    def server(engines: Engines, *, model: str = "fake", vocab_size: int = 1000, digest: str = "") -> None:
        server = engines.start()
        server.link._capabilities = msgspec.structs.replace(
            server.engine.capabilities, model=model, vocab_size=vocab_size, tokenizer_digest=digest
        )

    @staticmethod
    @asynccontextmanager
    async def opened(engines: Engines, model_dir: Path, **settings) -> AsyncIterator[EnginePool]:
        addresses = tuple(EngineAddress(engines.endpoint(index)) for index in range(len(engines.servers)))
        pool = open_engines(HttpConfig(engines=addresses, model_dir=str(model_dir), model_names=("x",), **settings))
        await pool.start()
        try:
            await until(lambda: all(engine.state != "connecting" for engine in pool.engines))
            yield pool
        finally:
            await pool.close()

    async def test_another_name(self, engines: Engines, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.server(engines, model="other")
        self.server(engines)
        async with self.opened(engines, tmp_path, engine_model_names=("fake", "alias")) as pool:
            assert [engine.state for engine in pool.engines] == ["down", "ready"]
            reason = "not the engine that is wanted: it serves the model 'other', not 'fake' or 'alias'"
            assert pool.engines[0].down_reason == reason
            assert await complete(pool, request("r", [5], 5)) == continuation([5], 5)
        assert caplog.text.count("engine_lost") == 1 and "it serves the model 'other'" in caplog.text

    async def test_another_tokenizer(self, engines: Engines, chat_model_dir: Path) -> None:
        digest = tokenizer_digest(chat_model_dir)
        self.server(engines, digest="0" * 64)
        self.server(engines, digest=digest)
        async with self.opened(engines, chat_model_dir) as pool:
            assert [engine.state for engine in pool.engines] == ["down", "ready"]
            reason = f"its tokenizer (digest 000000000000) is not this frontend's ({digest[:12]})"
            assert str(pool.engines[0].down_reason).endswith(reason)

    async def test_engines_that_differ(self, engines: Engines, tmp_path: Path) -> None:
        self.server(engines)
        self.server(engines, vocab_size=2000)
        async with self.opened(engines, tmp_path) as pool:
            # Whichever answers first is right.
            assert sorted(engine.state for engine in pool.engines) == ["down", "ready"]
            reasons = [engine.down_reason for engine in pool.engines if engine.down_reason]
            assert "its vocab_size is" in reasons[0]

    async def test_an_engine_that_is_replaced_by_the_right_one_is_found(self, engines: Engines, tmp_path: Path) -> None:
        self.server(engines, model="other")
        async with self.opened(engines, tmp_path, engine_model_names=("fake",)) as pool:
            assert pool.state == "down"
            server = engines.servers[0]
            server.link._capabilities = server.engine.capabilities
            await until(lambda: pool.state == "ready")
            assert await complete(pool, request("r", [5], 5)) == continuation([5], 5)
