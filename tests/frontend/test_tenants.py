"""Tokens by tenant: sums are those of all requests, labels tell nothing, and there are never many of them."""

from __future__ import annotations

import tracemalloc

from prometheus_client import CollectorRegistry

from frontend.metrics.families import RequestFamilies
from frontend.metrics.tenants import MAX_TENANTS, OTHERS, SHARED


def by_label(registry: CollectorRegistry, name: str) -> dict[str, float]:
    return {
        sample.labels["tenant"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == f"foreword:{name}_total"
    }


def test_ten_thousand_salts_have_no_more_labels_than_a_hundred() -> None:
    registry = CollectorRegistry()
    tenants = RequestFamilies(registry, "tiny", [0]).tenants
    for serial in range(MAX_TENANTS):
        tenants.count(f"salt-{serial}", 10, 4)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for serial in range(10_000):
        tenants.count(f"salt-{serial}", 10, 4)
    grown_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown_bytes < 500_000
    tenants.count("", 7, 1)
    tokens, cached = by_label(registry, "tenant_prompt_tokens"), by_label(registry, "tenant_prompt_tokens_cached")
    assert len(tokens) == len(cached) == MAX_TENANTS + 2
    assert (tokens[SHARED], cached[SHARED]) == (7, 1)
    assert tokens[OTHERS] == 10 * (10_000 - MAX_TENANTS)
    assert sum(tokens.values()) == 10 * (10_000 + MAX_TENANTS) + 7
    assert sum(cached.values()) == 4 * (10_000 + MAX_TENANTS) + 1


def test_a_label_is_one_tenants_and_tells_another_server_nothing() -> None:
    here, there = (RequestFamilies(CollectorRegistry(), "tiny", [0]).tenants for _ in range(2))
    for tenants in (here, there):
        tenants.count("pepper", 1, 0)
        tenants.count("salt", 1, 0)
    assert here.label("pepper") == here.label("pepper")
    assert len({here.label("pepper"), here.label("salt"), there.label("pepper"), there.label("salt")}) == 4
    assert "pepper" not in here.label("pepper")


def test_who_has_no_label_yet_is_one_of_the_others() -> None:
    tenants = RequestFamilies(CollectorRegistry(), "tiny", [0]).tenants
    assert tenants.label("pepper") == OTHERS
    assert tenants.label("") == SHARED
