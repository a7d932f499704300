"""Hits that end anywhere in a block leave greedy outputs as they are: what was copied is what the reference computes.

Now and then the same is done with one of the copied slots spoiled, and must then be seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_core import EngineCore, EngineRequest
from engine_core.kv_cache import PrefixHit
from engine_core.model.runner import ModelRunner

from .equality import (
    NotEqualError,
    Reference,
    check_equal,
    generate_reference,
    greedy,
    load_reference_model,
    make_engine,
    poison_unowned_slots,
    run_prompts,
)

DATA = Path(__file__).parent.parent / "data" / "model"
B = 8


@pytest.mark.parametrize(
    ("name", "first"),
    # Where there are windows, of 24 tokens, hits end behind the first.
    [("llama", 0), ("mistral", 4 * B), ("gemma3_text", 4 * B)],
)
def test_at_every_offset_of_two_blocks(name: str, first: int, model_directory: Callable[[str], Path]) -> None:
    prompt = max(json.loads((DATA / f"{name}.json").read_text())["prompts"], key=len)
    reference = generate_reference(load_reference_model(model_directory(name)), prompt)
    engine = make_engine(model_directory(name), block_size=B, num_blocks=64)
    poison_unowned_slots(engine)
    for offset in range(1, 2 * B + 1):
        leave_behind(engine, reference, first + offset)
        [run] = run_prompts(engine, [prompt])
        check_equal([reference], [run])
        assert run.num_cached_tokens == first + offset
        if offset % 3 != 1:
            continue
        leave_behind(engine, reference, first + offset)
        spoil_last_slot(engine, find_hit(engine, prompt), group=offset % len(engine.runner.info.windows))
        with pytest.raises(NotEqualError):
            check_equal([reference], run_prompts(engine, [prompt]))


def leave_behind(engine: EngineCore, reference: Reference, num_tokens: int) -> None:
    """Cache so many tokens of the prompt, and one that is another, and nothing else."""
    assert engine.reset_prefix_cache().num_blocks_in_use == 0
    prompt = reference.prompt_token_ids
    run_prompts(engine, [[*prompt[:num_tokens], prompt[num_tokens] ^ 1]], num_tokens=1)


def find_hit(engine: EngineCore, prompt: list[int]) -> PrefixHit:
    request = engine.prepare_request(EngineRequest("looks", prompt, greedy()))
    return engine._scheduler.kv.get_computed_blocks(request)


def spoil_last_slot(engine: EngineCore, hit: PrefixHit, group: int) -> None:
    block = hit.blocks[group][-1] if hit.tail is None else hit.tail.blocks[group]
    assert block is not None and isinstance(engine.runner, ModelRunner)
    for tensor in engine.runner.pool.tensors:
        tensor[block.block_id, (hit.num_tokens - 1) % B] *= -1
