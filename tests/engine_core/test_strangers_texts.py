"""Nothing that a tenant is told depends on what others have under their salts: only on how much there is, and when.

The same requests are sent twice, the others' with other tokens behind their salts. What of these is alike stays so.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from engine_core import EngineConfig, EngineCore, EngineRequest, ExtraKeySpan, SamplingParams
from ipc.vocabulary import KeepPrefix
from tests.fake_runner import FakeRunner

B = 4
MINE, THEIRS = "mine", "theirs"
NUM_BLOCKS = 3000  # enough for all: what is evicted depends on everybody


class Asked(NamedTuple):
    """`salt_from` is None without a salt; `num_steps` run before the next one comes."""

    tenant: str
    tokens: list[int]
    salt_from: int | None
    keep: tuple[KeepPrefix, ...]
    writes: bool
    num_steps: int
    is_explained: bool
    resets_first: bool


def some_requests(rng: random.Random) -> list[Asked]:
    """That have much in common, of few tokens."""
    beginnings = [rng.choices(range(3), k=40) for _ in range(3)]
    asked = []
    for _ in range(60):
        tenant = rng.choice((MINE, THEIRS))
        tokens = rng.choice(beginnings)[: rng.randrange(1, 30)] + rng.choices(range(3), k=rng.randrange(8))
        places: list[int | None] = [0, rng.randrange(len(tokens)), rng.randrange(len(tokens))]
        keep = [KeepPrefix(rng.randrange(1, len(tokens) + 1), 60.0, rng.randrange(3))] if rng.random() < 0.4 else []
        asked.append(
            Asked(
                tenant,
                tokens,
                rng.choice([*places, None] if tenant == MINE else places),
                tuple(keep),
                bool(keep) or rng.random() < 0.85,
                rng.randrange(4),
                tenant == MINE and rng.random() < 0.5,
                rng.random() < 0.03,
            )
        )
    return asked


def told(engine: EngineCore, requests: Sequence[Asked], others: Sequence[int]) -> list[Any]:
    """All that `MINE` is told, and in which step; `others` are the tokens that `THEIRS` has behind its salt."""
    heard: list[Any] = []
    mine: set[str] = set()
    step_numbers = itertools.count()

    def run(num_steps: int) -> None:
        while num_steps > 0 and engine.has_unfinished_requests():
            number = next(step_numbers)
            heard.extend(
                (number, output.request_id, output.num_cached_tokens, output.cache)
                for output in engine.step().outputs
                if output.request_id in mine
            )
            num_steps -= 1

    for serial, asked in enumerate(requests):
        if asked.resets_first:
            engine.reset_prefix_cache()
        tokens, spans = asked.tokens, ()
        if asked.salt_from is not None:
            spans = (ExtraKeySpan(asked.salt_from, asked.salt_from + 1, "cache_salt", asked.tenant),)
            if asked.tenant == THEIRS:
                tokens = tokens[: asked.salt_from] + [others[token] for token in tokens[asked.salt_from :]]
        request = EngineRequest(
            f"r{serial}",
            tokens,
            SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
            extra_key_spans=spans,
            keep=asked.keep,
            write_prefix_cache=asked.writes,
            tenant=asked.tenant,
        )
        if asked.is_explained:
            probe = engine.explain(request)
            assert probe.explanation is not None
            timeless = replace(probe.explanation, lost_since_s=None)
            heard.append(replace(probe, explanation=timeless))
            continue
        if asked.tenant == MINE:
            mine.add(request.request_id)
        engine.add_request(request)
        run(asked.num_steps)
    run(10_000)
    return heard


@pytest.mark.parametrize("seed", range(40))
def test_what_others_say_behind_their_salts_is_no_part_of_what_one_is_told(seed: int):
    rng = random.Random(seed)
    config = EngineConfig(
        block_size=B,
        max_num_seqs=rng.choice((1, 3, 6)),
        max_num_batched_tokens=rng.choice((8, 16, 64)),
        prefix_caching_hash_algo=rng.choice(("sha256", "sha256_cbor")),
        prefix_match_unit=rng.choice(("token", "block")),
        eviction_policy=rng.choice(("lru", "frequency")),
        scheduling_policy=rng.choice(("fcfs", "prefix")),
    )
    requests = some_requests(rng)

    def told_beside(others: Sequence[int]) -> list[Any]:
        return told(EngineCore(config, FakeRunner(num_blocks=NUM_BLOCKS)), requests, others)

    beside = told_beside((0, 1, 2))
    assert len(beside) > 10
    for others in ((2, 0, 1), (102, 1, 900)):
        assert told_beside(others) == beside, others
