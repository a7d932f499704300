"""The dashboard in `docs/grafana` can be imported as it is, and asks only for what `/metrics` shows."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from frontend.engine_calls import EngineSnapshot
from frontend.metrics import Metrics
from frontend.prompt.piecewise import TokenizationStats
from ipc.stats import STEP_TOKENS_BOUNDS, EngineStats
from multimodal import PictureStats
from tests.frontend.scripted_engine import ScriptedEngine, says

FILE = Path(__file__).parents[2] / "docs" / "grafana" / "foreword.json"
PANEL_TYPES = {"row", "timeseries", "stat"}
BUILT_IN = {"__rate_interval", "__range"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(FILE.read_text())  # type: ignore[no-any-return]


class CountingEngine(ScriptedEngine):
    """One of its messages was dropped, so that every family has a sample."""

    async def stats(self, timeout_s: float) -> EngineSnapshot:
        numbers: dict[str, Any] = dict.fromkeys(EngineStats.__struct_fields__, 1)
        numbers["step_tokens"] = [1] * (len(STEP_TOKENS_BOUNDS) + 1)
        by_reason = ("prefix_cache_misses", "prefix_cache_missed_tokens", "kv_event_batches_dropped")
        for field in ("block_residency", *by_reason):
            numbers[field] = {}
        for field in ("running_adapters", "waiting_adapters"):
            numbers[field] = []
        return EngineSnapshot(1, EngineStats(**numbers), {"body": 1})


@pytest.fixture
async def labels_by_sample() -> dict[str, set[str]]:
    """What `/metrics` shows."""
    metrics = Metrics([CountingEngine(says([]))], "tiny", TokenizationStats(), PictureStats(), names_adapters=True)  # type: ignore[list-item]
    await metrics.refresh()
    text = generate_latest(metrics.registry).decode()
    samples = itertools.chain.from_iterable(family.samples for family in text_string_to_metric_families(text))
    labels: dict[str, set[str]] = {}
    for sample in samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_every_expression_names_families_and_labels_that_exist(
    dashboard: dict[str, Any], labels_by_sample: dict[str, set[str]]
) -> None:
    for expression in expressions(dashboard):
        selected = re.findall(r"(foreword:\w+)(?:\{([^}]*)\})?", expression)
        assert selected, expression
        for name, matchers in selected:
            assert name in labels_by_sample, f"{name} in {expression}"
            used = set(re.findall(r"(\w+)=~?\"", matchers))
            for group in re.findall(r"by \(([^)]*)\)", expression):
                used |= set(re.split(r",\s*", group))
            assert used <= labels_by_sample[name], f"{used - labels_by_sample[name]} of {name} in {expression}"


def test_expressions_are_balanced_and_use_declared_variables(dashboard: dict[str, Any]) -> None:
    declared = {variable["name"] for variable in dashboard["templating"]["list"]} | BUILT_IN
    for expression in expressions(dashboard):
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), expression
        assert set(re.findall(r"\$(\w+)", expression)) <= declared, expression


def test_what_a_person_watches_is_there(dashboard: dict[str, Any]) -> None:
    text = " ".join(expressions(dashboard))
    for name in (
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
        "prefix_cache_missed_tokens_total",
        "tenant_prompt_tokens_cached_total",
        "kv_kept_blocks",
        "kept_blocks_refused_total",
        "tokenizer_cache_hits_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "generation_tokens_total",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "request_success_total",
        "encoder_cache_hits_total",
        "mm_cache_hits_total",
        "mm_input_bytes_sent_total",
    ):
        assert f"foreword:{name}" in text


def test_its_structure_is_what_an_import_expects(dashboard: dict[str, Any]) -> None:
    assert dashboard["title"] and dashboard["uid"] and dashboard["schemaVersion"] >= 36
    assert "id" not in dashboard  # it would claim to be an existing one
    source, *others = dashboard["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert all(variable["datasource"]["uid"] == f"${{{source['name']}}}" for variable in others)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert panel["type"] in PANEL_TYPES and panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs)
