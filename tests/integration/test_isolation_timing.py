"""What other tenants have cached cannot be told from what nobody has, however closely one looks at the clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.isolation_timing import ANOTHERS, NEW, OWN, Asker, chance_of_sooner, deviation, measure
from tests.integration.served import Server, foreword_serve
from tests.tiny_models import make_tiny_chat_model

NUM_ROUNDS = 20
NUM_WORDS = 100
KEYS = ("sk-first", "sk-second")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Large enough that a cached prompt is told from a new one by a clock.
    return make_tiny_chat_model(
        tmp_path_factory.mktemp("models") / "chat", hidden_size=256, intermediate_size=768, num_hidden_layers=4
    )


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    keys = (part for key in KEYS for part in ("--api-key", key))
    with foreword_serve(
        model_dir, "--cache-isolation", "api-key", *keys, "--num-threads", "1", "--num-blocks", "4096"
    ) as server:
        yield server


def test_what_another_key_or_salt_has_cached_is_as_slow_as_what_is_new(server: Server) -> None:
    """By a rank test, so that no time is expected of anything: a chance of 0.5 that one is sooner than the other, but
    for four of its standard deviations. What the asker itself has cached shows that this would see it.
    """
    first, second = ({"authorization": f"Bearer {key}"} for key in KEYS)
    others = {"another key": Asker(headers=second), "another salt": Asker({"cache_salt": "another"}, first)}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for seed, (name, another) in enumerate(others.items()):
            asker = Asker(headers=first)
            times_s = measure(http, asker, another, num_rounds=NUM_ROUNDS, num_words=NUM_WORDS, seed=seed)
            chance = chance_of_sooner(times_s[ANOTHERS], times_s[NEW])
            of_own = chance_of_sooner(times_s[OWN], times_s[NEW])
            allowed = 4 * deviation(NUM_ROUNDS, NUM_ROUNDS)
            assert abs(chance - 0.5) < allowed, name
            assert of_own - 0.5 > allowed, name
