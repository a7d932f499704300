"""Whose K/V is whose: prefixes are shared by requests of the same weights, and by nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from engine_core import EngineConfig, EngineCore, EngineRequest, SamplingParams
from engine_core.config import HashAlgo, KVEventsConfig
from ipc.kv_events import BlockStored
from ipc.vocabulary import ExtraKeySpan, KeepPrefix
from tests.checking_runner import CheckingRunner, expected_output
from tests.fake_adapters import fake_digest, write_fake_adapter

B = 4
VOCAB = 1000
PROMPT = list(range(100, 114))
NUM_CACHED = len(PROMPT) - 1  # a prompt's last token is always computed
ALGOS: list[HashAlgo] = ["sha256", "sha256_cbor"]


class Cached:
    """An engine with adapters a1 and a2, asked the same again and again."""

    def __init__(self, directory: Path, algo: HashAlgo) -> None:
        self.directory = directory
        config = EngineConfig(
            block_size=B,
            enable_lora=True,
            prefix_caching_hash_algo=algo,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True),
        )
        self.engine = EngineCore(config, CheckingRunner(400, B, vocab_size=VOCAB, num_adapter_slots=2))
        self.num_asked = 0
        self.load("a1")
        self.load("a2")

    def load(self, name: str, weights: str | None = None, path: str = "adapter") -> None:
        weights = weights or name
        self.engine.load_adapter(name, write_fake_adapter(self.directory / path, weights))

    def request(self, adapter: str = "", *spans: ExtraKeySpan) -> EngineRequest:
        self.num_asked += 1
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        return EngineRequest(f"r{self.num_asked}", PROMPT, params, spans, adapter=adapter)

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def ask(self, adapter: str = "", *spans: ExtraKeySpan, weights: str | None = None) -> int:
        """How many tokens of the prompt were cached; its answer is right."""
        self.engine.add_request(self.request(adapter, *spans))
        tokens: list[int] = []
        cached = -1
        while self.engine.has_unfinished_requests():
            for output in self.engine.step().outputs:
                tokens += output.new_token_ids
                cached = output.num_cached_tokens
        assert tokens == expected_output(PROMPT, 3, VOCAB, weights or adapter or None)
        return cached


@pytest.fixture(params=ALGOS)
def cached(tmp_path: Path, request: pytest.FixtureRequest) -> Cached:
    return Cached(tmp_path, request.param)


def salt(key: str | bytes, kind: str = "cache_salt") -> ExtraKeySpan:
    return ExtraKeySpan(0, 1, kind, key)


def test_adapters_and_the_model_itself_share_nothing(cached: Cached):
    for adapter in ("a1", "a2", ""):
        assert cached.ask(adapter) == 0
    for adapter in ("a1", "a2", ""):
        assert cached.ask(adapter) == NUM_CACHED


def test_what_spells_an_adapter_is_none(cached: Cached):
    digest = fake_digest("a1")
    assert cached.ask("a1") == 0
    spellings = ["a1", digest.hex(), digest, "lora", f"('lora', 'a1', '{digest.hex()}')"]
    for key in spellings:
        assert cached.ask("", salt(key)) == 0
        assert cached.ask("", ExtraKeySpan(0, None, "mine", key)) == 0
        assert cached.ask("", ExtraKeySpan(0, 9, "mm", key)) == 0
        assert cached.ask("a2", salt(key)) == 0
    assert cached.ask("a1") == NUM_CACHED
    for key in spellings:
        assert cached.ask("", salt(key)) == NUM_CACHED


def test_an_adapter_that_spells_a_salt_finds_nothing_of_it(cached: Cached):
    assert cached.ask("", salt("tenant")) == 0
    cached.load("tenant", "tenant")
    assert cached.ask("tenant") == 0
    assert cached.ask("tenant", salt("tenant")) == 0
    assert cached.ask("", salt("tenant")) == cached.ask("tenant") == NUM_CACHED


def test_a_salt_keeps_tenants_of_one_adapter_apart(cached: Cached):
    assert cached.ask("a1", salt("x")) == 0
    assert cached.ask("a1", salt("y")) == 0
    assert cached.ask("a1") == 0
    assert cached.ask("a1", salt("x")) == NUM_CACHED


def test_another_adapter_of_the_same_name_and_path_finds_nothing(cached: Cached):
    cached.load("a", "w1")
    assert cached.ask("a", weights="w1") == 0
    assert cached.ask("a", weights="w1") == NUM_CACHED
    cached.engine.unload_adapter("a")
    cached.load("a", "w2")
    assert cached.ask("a", weights="w2") == 0
    cached.engine.unload_adapter("a")
    cached.load("a", "w1")
    assert cached.ask("a", weights="w1") == NUM_CACHED


def test_the_same_weights_under_another_name_find_all(tmp_path: Path):
    cached = Cached(tmp_path, "sha256")
    assert cached.ask("a1") == 0
    cached.load("alias", "a1", "elsewhere")
    assert cached.ask("alias", weights="a1") == NUM_CACHED
    cached.engine.unload_adapter("a1")
    cached.engine.unload_adapter("alias")
    cached.load("a3", "a1")
    assert cached.ask("a3", weights="a1") == NUM_CACHED


def test_a_probe_finds_what_a_request_would(cached: Cached):
    assert cached.ask("a1") == 0
    found = {name: cached.engine.probe(cached.request(name)).num_hit_tokens for name in ("a1", "a2", "")}
    assert found == {"a1": NUM_CACHED, "a2": 0, "": 0}
    explained = cached.engine.explain(cached.request("a2"))
    assert explained.miss_reason == "not_found", "what has nothing in common is no relative"
    assert explained.explanation is not None and explained.explanation.relative_token_ids == []


def test_what_is_kept_for_an_adapter_stays_for_it_alone(cached: Cached):
    num_kept = len(PROMPT) // B * B
    for adapter, keep in (("a1", (KeepPrefix(num_kept, 60.0),)), ("a2", ()), ("", ())):
        cached.engine.add_request(replace(cached.request(adapter), keep=keep))
    cached.finish()
    assert cached.engine.stats().num_kept_blocks == num_kept // B
    for number in range(60):
        cached.engine.add_request(replace(cached.request("a2"), prompt_token_ids=[number] * 10 * B))
    cached.finish()
    found = {name: cached.engine.probe(cached.request(name)).num_hit_tokens for name in ("a1", "a2", "")}
    assert found == {"a1": num_kept, "a2": 0, "": 0}


def stored(cached: Cached) -> list[BlockStored]:
    return [event for event in cached.engine.take_kv_events() if isinstance(event, BlockStored)]


def test_events_name_an_adapter_as_it_is_called(cached: Cached):
    for adapter in ("a1", "a2", ""):
        cached.ask(adapter)
        assert {event.lora_name for event in stored(cached)} == {adapter or None}
    cached.engine.unload_adapter("a1")
    cached.load("new", "a1")
    cached.ask("new", salt("x"), weights="a1")
    events = stored(cached)
    assert events and {event.lora_name for event in events} == {"new"}
    assert all(extra and "new" in extra for event in events for extra in event.extra_keys or [None])
