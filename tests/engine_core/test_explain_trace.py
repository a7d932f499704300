"""Every miss of a public trace of agent sessions is explained with a true cause."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.trace_replay import TraceRequest, read_jsonl, requests_of_text
from engine_core import EngineConfig, EngineCore, EngineRequest, ExtraKeySpan, SamplingParams
from engine_core.runner import ComputedStep, ScheduledRequest, StepResult
from tests.engine_core.told_causes import Computed, check_truth
from tests.fake_runner import FakeRunner

TRACE = Path(__file__).parent.parent / "data" / "traces" / "lmcache_agent_taubench.jsonl.gz"


class TraceRunner(FakeRunner):
    """Says what the answers of the trace say, by request id."""

    def __init__(self, num_blocks: int, answers: dict[str, Sequence[int]]) -> None:
        super().__init__(num_blocks=num_blocks)
        self.info = replace(self.info, vocab_size=1 << 20)
        self._answers = answers

    def launch(self, batch: Sequence[ScheduledRequest]) -> ComputedStep:
        tokens = [
            self._answers[item.request.output_id][item.request.num_output_tokens] if item.samples else None
            for item in batch
        ]
        return ComputedStep(StepResult(tokens))


@pytest.fixture(scope="module")
def requests() -> list[TraceRequest]:
    """A token is a word or a sign."""
    words: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        return [words.setdefault(word, len(words)) for word in re.findall(r"\w+|\W", text)]

    return requests_of_text(read_jsonl(TRACE), encode)


@pytest.fixture(scope="module")
def tenants() -> list[str]:
    return [record["session_id"] for record in read_jsonl(TRACE) if record["input"]]


@pytest.mark.parametrize(
    ("num_blocks", "match_unit", "salted"),
    [(1 << 14, "token", False), (160, "token", False), (160, "block", False), (160, "token", True)],
)
def test_every_miss_has_a_true_cause(
    requests: list[TraceRequest], tenants: list[str], num_blocks: int, match_unit: str, salted: bool
):
    answers = {str(number): traced.output for number, traced in enumerate(requests)}
    engine = EngineCore(EngineConfig(prefix_match_unit=match_unit), TraceRunner(num_blocks, answers))
    before: list[Computed] = []
    reasons: Counter[str] = Counter()
    for number, (traced, tenant) in enumerate(zip(requests, tenants, strict=True)):
        salts = ((0, tenant),) if salted else ()
        request = EngineRequest(
            str(number),
            list(traced.prompt),
            SamplingParams(temperature=0.0, max_tokens=len(traced.output), ignore_eos=True),
            tuple(ExtraKeySpan(at, at + 1, "cache_salt", salt) for at, salt in salts),
        )
        probe = engine.explain(request)
        check_truth(engine, request, salts, probe, before, evicts=num_blocks < 1000)
        reasons[probe.miss_reason] += 1
        engine.add_request(request)
        first = engine.step().outputs[0]
        assert first.cache is not None
        assert (first.num_cached_tokens, first.cache.miss_reason) == (probe.num_hit_tokens, probe.miss_reason)
        while engine.has_unfinished_requests():
            engine.step()
        computed = [*traced.prompt, *traced.output][:-1]
        stored = len(computed) if match_unit == "token" else len(computed) // 16 * 16
        before.append(Computed(computed[:stored], salts))
    assert {"none", "continued", "diverged", "not_found"} <= reasons.keys()
    assert ("evicted" in reasons) == (num_blocks < 1000)
