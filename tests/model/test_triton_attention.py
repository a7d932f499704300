"""A model served with attention in Triton is the reference: cold, cached and with a prefix that requests share.

Kernels are interpreted, so there are few tokens; what they compute for every kind of batch is for `tests/kernels`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kernels.attention_metadata
from engine_core import EngineRequest
from kernels.attention_plan import AttentionPlan, PlanLimits, plan_attention
from kernels.dispatch import computed_by

pytest.importorskip("triton", reason="Triton is not installed")

from tests.tiny_models import TINY_VOCAB_SIZE, make_tiny_model

from .equality import (
    CHOSEN_PROMPT_GAP,
    NotEqualError,
    check_equal,
    corrupt_last_cached_block,
    generate_reference,
    load_reference_model,
    make_engine,
    poison_unowned_slots,
    run_prompts,
)

NUM_TOKENS = 3


def test_equals_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[AttentionPlan] = []

    def recorded(*args: Any, **kwargs: Any) -> AttentionPlan:
        plans.append(plan_attention(*args, **kwargs))
        return plans[-1]

    # Whatever can be divided or shared is.
    monkeypatch.setattr(kernels.attention_metadata, "plan_limits", lambda device: PlanLimits(1000, 16, 0))
    monkeypatch.setattr(kernels.attention_metadata, "plan_attention", recorded)
    layers = ["sliding_attention", "full_attention"]
    directory = make_tiny_model("gemma2", tmp_path, num_hidden_layers=len(layers), layer_types=layers)
    model = load_reference_model(directory)
    prompt = [(7 * place * place + 3) % TINY_VOCAB_SIZE for place in range(40)]
    alike = [prompt, [*prompt[:32], 5]]
    references = [generate_reference(model, one, NUM_TOKENS) for one in alike]
    assert all(min(reference.gaps) > CHOSEN_PROMPT_GAP for reference in references)

    engine = make_engine(directory, num_blocks=12)
    poison_unowned_slots(engine)
    with computed_by("triton"):
        for _ in range(2):
            check_equal(references, run_prompts(engine, alike, NUM_TOKENS))
        corrupt_last_cached_block(engine, EngineRequest("probe", prompt))
        with pytest.raises(NotEqualError):
            check_equal(references[:1], run_prompts(engine, alike[:1], NUM_TOKENS))
    assert any(len(plan.listed_tokens) for plan in plans) and any(plan.num_parts for plan in plans)
