"""Reading, writing, keeping and isolating, against an engine process; what answers tell adds up to what is counted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from frontend.cache_header import CACHE_HEADER
from frontend.metrics.tenants import SHARED
from ipc.vocabulary import MissReason
from tests.frontend.http_stack import Scrape, Stack, http_stack

BLOCK_SIZE = 16
NUM_BLOCKS = 32


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, chat_model_dir: Path) -> Iterator[Stack]:
    with http_stack(tmp_path_factory.mktemp("s"), chat_model_dir, num_blocks=NUM_BLOCKS) as stack:
        yield stack


@pytest.fixture(autouse=True)
def cache_is_empty(stack: Stack) -> None:
    stack.http.post("/reset_prefix_cache").raise_for_status()


def tokens(seed: int, number: int = 4 * BLOCK_SIZE) -> list[int]:
    return random.Random(seed).choices(range(5, 400), k=number)


def cached(stack: Stack, prompt: list[int], **fields: Any) -> int:
    return details(stack.complete(prompt, 1, **fields))["cached_tokens"]  # type: ignore[no-any-return]


def details(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["usage"]["prompt_tokens_details"]  # type: ignore[no-any-return]


def fill(stack: Stack) -> None:
    """Three times the pool of what nobody asks for again."""
    for seed in range(1000, 1000 + 3 * NUM_BLOCKS // 4):
        stack.complete(tokens(seed), 1)


def test_who_does_not_read_finds_nothing_and_is_found(stack: Stack) -> None:
    prompt = tokens(1)
    assert cached(stack, prompt, cache={"read": False}) == 0
    assert cached(stack, prompt, cache={"read": False}) == 0
    assert cached(stack, prompt) == len(prompt) - 1


def test_who_does_not_write_finds_and_is_not_found(stack: Stack) -> None:
    prompt = tokens(2)
    assert cached(stack, prompt, cache={"write": False}) == 0
    assert cached(stack, prompt) == 0
    assert cached(stack, prompt, cache={"write": False}) == len(prompt) - 1


def test_a_batch_job_that_writes_nothing_leaves_a_chat_fully_cached(stack: Stack) -> None:
    """Three times the pool, four at a time, with several choices each. The same job pushes it out if it writes."""
    chat = tokens(12, 5 * BLOCK_SIZE)

    def run_job(first_seed: int, **fields: Any) -> None:
        with ThreadPoolExecutor(4) as threads:
            seeds = range(first_seed, first_seed + 3 * NUM_BLOCKS // 4)
            list(threads.map(lambda seed: stack.complete(tokens(seed), 2, n=2, **fields), seeds))

    cached(stack, chat)
    run_job(2000, cache={"write": False})
    assert cached(stack, chat) == len(chat) - 1
    assert not any(cached(stack, tokens(seed), cache={"write": False}) >= BLOCK_SIZE for seed in range(2000, 2024))
    run_job(3000)
    assert cached(stack, chat) < BLOCK_SIZE


def test_what_is_kept_outlives_what_fills_the_pool(stack: Stack) -> None:
    kept, plain = tokens(3), tokens(4)
    cached(stack, kept, cache={"ttl_s": 600})
    cached(stack, plain)
    fill(stack)
    assert cached(stack, plain) < BLOCK_SIZE  # others begin with the same token, perhaps
    assert cached(stack, kept) == len(kept) - 1


def test_what_exceeds_a_share_is_told(stack: Stack) -> None:
    """A quarter of 32 blocks for a tenant: two prompts of four. Another tenant has a quarter of its own."""

    def kept(seed: int, **fields: Any) -> tuple[Any, str]:
        body = {"prompt": tokens(seed), "max_tokens": 1, "cache": {"ttl_s": 600}, **fields}
        answer = stack.http.post("/v1/completions", json=body).raise_for_status()
        return details(answer.json())["kept_tokens"], answer.headers[CACHE_HEADER]

    before = stack.scrape()
    for seed in (5, 6):
        num_kept, header = kept(seed)
        assert num_kept == 64
        assert "kept=64; kept-wanted=64" in header
    num_kept, header = kept(7)
    assert num_kept == 0
    assert "kept=0; kept-wanted=64" in header
    num_kept, _ = kept(8, cache={"ttl_s": 600, "priority": 1})
    assert num_kept == 64
    num_kept, _ = kept(9, cache_salt="another")
    assert num_kept == 64
    after = stack.scrape()
    assert after("kv_kept_blocks") == 3 * 4
    assert after("kept_blocks_refused_total") - before("kept_blocks_refused_total") == 4
    assert after("kept_blocks_given_up_total") - before("kept_blocks_given_up_total") == 4


def test_a_salt_from_a_token_on_shares_what_is_before_and_nothing_behind(stack: Stack) -> None:
    shared, rest = tokens(10, 40), tokens(11, 24)
    salted = {"cache_salt": {"salt": "mine", "from": len(shared)}}
    theirs = {"cache_salt": {"salt": "theirs", "from": len(shared)}}
    cached(stack, shared + rest, **salted)
    assert cached(stack, shared + rest, **theirs) == len(shared)
    assert cached(stack, shared + rest) == len(shared)
    assert cached(stack, shared + rest, **salted) == len(shared + rest) - 1


def test_answers_add_up_to_what_is_counted(stack: Stack) -> None:
    """Of prompts whole and in parts, with several choices, by several tenants, and with preemptions."""
    rng = random.Random(0)
    prompts = [tokens(seed, 60) for seed in range(20, 24)]
    bodies: list[dict[str, Any]] = []
    for number in range(60):
        begin = rng.choice(prompts)[: rng.randrange(1, 60)]
        body: dict[str, Any] = {"prompt": begin + tokens(100 + number, rng.randrange(1, 20)), "n": rng.randrange(1, 3)}
        if rng.random() < 0.6:
            body["cache_salt"] = rng.choice(["a", "b", {"salt": "c", "from": 0}])
        if rng.random() < 0.4:
            body["cache"] = rng.choice([{"read": False}, {"write": False}, {"ttl_s": 60}])
        bodies.append(body)
    before = stack.scrape()
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda body: stack.complete(**body, max_tokens=24), bodies))
    after = stack.scrape()

    def grown(name: str, *labels: str) -> float:
        def value(scrape: Scrape) -> float:
            return scrape.values.get((f"{name}_total", labels), 0)

        return value(after) - value(before)

    def grown_by_label(name: str) -> dict[str, float]:
        labels = {own for sample, own in after.values if sample == f"{name}_total"}
        return {label: increase for (label,) in labels if (increase := grown(name, label))}

    told: Counter[str] = Counter()
    misses: Counter[MissReason] = Counter()
    missed_tokens: Counter[MissReason] = Counter()
    for answer in answers:
        num_prompt_tokens, of_prompt = answer["usage"]["prompt_tokens"], details(answer)
        told += Counter(prompt=num_prompt_tokens, cached=of_prompt["cached_tokens"])
        if (reason := of_prompt["cache_miss_reason"]) is not None:
            misses[reason] += 1
            missed_tokens[reason] += num_prompt_tokens - of_prompt["cached_tokens"]
    assert grown("prompt_tokens") == sum(grown_by_label("tenant_prompt_tokens").values()) == told["prompt"]
    assert grown("prompt_tokens_cached") == told["cached"]
    assert sum(grown_by_label("tenant_prompt_tokens_cached").values()) == told["cached"]
    assert len(grown_by_label("tenant_prompt_tokens")) == 4
    assert SHARED in grown_by_label("tenant_prompt_tokens")
    assert grown_by_label("prefix_cache_misses") == misses
    assert grown_by_label("prefix_cache_missed_tokens") == missed_tokens
    assert grown("num_preemptions") > 0
