"""What the scheduler hands over becomes one flattened row, with every token's slot where it belongs."""

from __future__ import annotations

import torch

from engine_core.model.input_batch import InputBatch, build_input_batch
from engine_core.request import Request
from engine_core.runner import ScheduledRequest
from ipc.messages import EngineRequest


def scheduled(
    token_ids: list[int], start: int, num_tokens: int, block_ids: list[int], num_shared_blocks: int = 0
) -> ScheduledRequest:
    request = Request(EngineRequest("r", token_ids), max_tokens=1, seed=0, arrival_time_s=0.0)
    return ScheduledRequest(request, start, num_tokens, block_ids, num_shared_blocks)


def build(*batch: ScheduledRequest) -> InputBatch:
    return build_input_batch(batch, block_size=4, dtype=torch.float32, device=torch.device("cpu"))


def test_a_chunk_a_decode_and_a_whole_prompt() -> None:
    inputs = build(
        scheduled(list(range(100, 120)), start=6, num_tokens=5, block_ids=[7, 2, 9, 4, 1]),
        scheduled([50, 51, 52, 53, 54], start=4, num_tokens=1, block_ids=[3, 8]),
        scheduled([60, 61], start=0, num_tokens=2, block_ids=[5]),
    )
    assert inputs.input_ids.tolist() == [[106, 107, 108, 109, 110, 54, 60, 61]]
    assert inputs.position_ids.tolist() == [[6, 7, 8, 9, 10, 4, 0, 1]]
    assert inputs.metadata.slot_mapping.tolist() == [10, 11, 36, 37, 38, 32, 20, 21]
    assert inputs.metadata.query_start_loc.tolist() == [0, 5, 6, 8]
    assert inputs.metadata.seq_lens.tolist() == [11, 5, 2]
    assert inputs.metadata.block_tables.tolist() == [[7, 2, 9], [3, 8, 0], [5, 0, 0]]


def test_only_whoever_reaches_its_end_samples() -> None:
    inputs = build(
        scheduled(list(range(20)), start=6, num_tokens=5, block_ids=[0, 1, 2, 3, 4]),
        scheduled(list(range(5)), start=4, num_tokens=1, block_ids=[5, 6]),
        scheduled(list(range(2)), start=0, num_tokens=2, block_ids=[7]),
    )
    assert inputs.sampling == [1, 2]
    assert inputs.logits_indices.tolist() == [5, 7]


def test_shared_blocks_are_never_written() -> None:
    """A whole-prompt hit computes its last token again, into slot −1; what follows goes to a block of its own."""
    whole = scheduled(list(range(8)), start=7, num_tokens=1, block_ids=[3, 5], num_shared_blocks=2)
    partly = scheduled(list(range(10)), start=8, num_tokens=2, block_ids=[3, 5, 6], num_shared_blocks=2)
    inputs = build(whole, partly)
    assert inputs.metadata.slot_mapping.tolist() == [-1, 24, 25]


def test_blocks_beyond_this_step_are_not_looked_at() -> None:
    inputs = build(scheduled(list(range(40)), start=0, num_tokens=3, block_ids=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]))
    assert inputs.metadata.block_tables.tolist() == [[1]]
