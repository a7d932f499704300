"""Which adapters are asked for now, as the peer's dashboards and routers in front of servers read it at `/metrics`."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from engine_core import EngineConfig, EngineCore
from frontend.engine_calls import EngineSnapshot
from frontend.engine_client import EngineClient
from frontend.metrics import Metrics
from frontend.prompt.piecewise import TokenizationStats
from frontend.prompt.tokenizer import ModelTokenizer
from ipc.stats import STEP_TOKENS_BOUNDS, EngineStats
from tests.fake_adapters import write_fake_adapter
from tests.fake_runner import FakeRunner
from tests.frontend.live_app import live_app
from tests.frontend.scripted_engine import ScriptedEngine, says
from tests.wire_peers import private_endpoint, request, running_server

LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
ODD = 'c "\\'


class Telling(ScriptedEngine):
    """Says that it has 4 slots, and what else a test wants."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(says([]))
        required = {field.name: 1 for field in msgspec.structs.fields(EngineStats) if field.required}
        steps = [1] * (len(STEP_TOKENS_BOUNDS) + 1)
        self.told = EngineStats(**{**required, "step_tokens": steps, "adapter_slots": 4, **fields})

    async def stats(self, timeout_s: float) -> EngineSnapshot:
        return EngineSnapshot(1, self.told, {})


def metrics_of(engine: Any) -> Metrics:
    return Metrics([engine], "tiny", TokenizationStats(), names_adapters=True)


async def samples_of(metrics: Metrics) -> list[Sample]:
    await metrics.refresh()
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return [sample for family in families for sample in family.samples if sample.name == "foreword:lora_requests_info"]


async def asked_for(metrics: Metrics) -> list[list[str]]:
    return [[sample.labels[label] for label in LABELS] for sample in await samples_of(metrics)]


async def until(metrics: Metrics, expected: list[list[str]]) -> None:
    async with asyncio.timeout(20):
        while await asked_for(metrics) != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_adapters_are_named_while_their_requests_run_and_wait(tmp_path: Path) -> None:
    engine = EngineCore(EngineConfig(enable_lora=True), FakeRunner(num_adapter_slots=1, step_s=0.001))
    for name in ("a", "b", ODD):
        engine.load_adapter(name, write_fake_adapter(tmp_path / "adapter", name))
    endpoint = private_endpoint(tmp_path)
    client = EngineClient(endpoint)
    metrics = metrics_of(client)
    try:
        with running_server(endpoint, engine=engine):
            await client.start()
            await client.wait_ready(20)
            assert await asked_for(metrics) == [["1", "", ""]]
            async with AsyncExitStack() as asking:
                for number, name in enumerate(["a", "b", "a", ODD, ""]):
                    asked = replace(request(f"{number}", [5], 60_000), adapter=name)
                    stream = await asking.enter_async_context(client.submit(asked))
                    if number == 0:
                        await anext(stream)
                # The second that asks for "a" came later than the one that waits for its slot.
                await until(metrics, [["1", "a", f"a,b,{ODD}"]])
                # Who has it keeps it, and what it was called.
                engine.unload_adapter("a")
                assert await asked_for(metrics) == [["1", "a", f"a,b,{ODD}"]]
            await until(metrics, [["1", "", ""]])
        # Of an engine that is gone nothing is known.
        await until(metrics, [])
    finally:
        await client.close()


async def test_it_is_one_sample_whatever_was_asked_for_before() -> None:
    engine = Telling(running_adapters=["a", "b"])
    metrics = metrics_of(engine)
    before_s = time.time()
    assert await asked_for(metrics) == [["4", "a,b", ""]]
    engine.told = replace(engine.told, running_adapters=["c"])
    assert await asked_for(metrics) == [["4", "c", ""]]
    [sample] = await samples_of(metrics)
    assert before_s <= sample.value <= time.time()
    assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")


async def test_there_is_none_where_there_can_be_no_adapters() -> None:
    assert await asked_for(metrics_of(Telling(adapter_slots=0))) == []


@pytest.mark.parametrize("keys", [(), ("key",)])
def test_names_need_a_key_where_models_do(chat_tokenizer: ModelTokenizer, keys: tuple[str, ...]) -> None:
    engine = Telling(running_adapters=["its-name"], waiting_adapters=["its-name"])
    with live_app(engine, chat_tokenizer, api_keys=keys) as url:
        text = httpx.get(f"{url}/metrics").raise_for_status().text
        assert httpx.get(f"{url}/v1/models").status_code == (401 if keys else 200)
    assert "foreword:lora_slots{" in text
    assert ("its-name" in text) == ("lora_requests_info" in text) == (not keys)
