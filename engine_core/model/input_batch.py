"""One step's requests, laid out as one flattened row `[1, num_tokens]` for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from engine_core.runner import ScheduledRequest
from kernels.attention_metadata import AttentionMetadata

from .picture_groups import visible_to
from .staging import Staging


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step has sampled, where it is: `tokens` on the device; `rows` says which is whose, by place in its batch."""

    tokens: torch.Tensor
    rows: dict[int, int]


@dataclass(frozen=True, slots=True)
class InputBatch:
    """`input_ids` and `position_ids` are `[1, num_tokens]`. `logits_indices` are the flattened places of the last
    tokens of the requests `sampling` (indices into the scheduled batch), in that order. All tensors are on the device.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    metadata: AttentionMetadata
    logits_indices: torch.Tensor
    sampling: list[int]


def build_input_batch(
    batch: Sequence[ScheduledRequest],
    *,
    block_size: int,
    dtype: torch.dtype,
    staging: Staging,
    sampled: SampledTokens | None = None,
    joins_touching: bool = False,
) -> InputBatch:
    """Lay `batch` out. The cost grows with what is scheduled and the block tables it needs, not with the pool.

    `sampled` is what the step before has sampled, for a batch that follows it. `joins_touching` is
    `MultimodalInfo.joins_touching`.

    Raises:
        ValueError: with it, a request's tokens end inside a picture.
    """
    starts = np.array([item.start for item in batch], dtype=np.int64)
    query_lens = np.array([item.num_tokens for item in batch], dtype=np.int64)
    shared_blocks = np.array([item.num_shared_blocks for item in batch], dtype=np.int64)
    query_start_loc = np.concatenate([[0], np.cumsum(query_lens)])
    seq_lens = starts + query_lens
    block_tables = _block_tables(batch, -(-seq_lens // block_size))

    rows = np.repeat(np.arange(len(batch)), query_lens)
    positions = np.arange(len(rows)) + (starts - query_start_loc[:-1])[rows]
    blocks = positions // block_size
    slots = block_tables[rows, blocks] * block_size + positions % block_size
    slots[blocks < shared_blocks[rows]] = -1

    sampling = [index for index, item in enumerate(batch) if item.samples]
    ids, position_ids, logits_indices = staging.upload(
        _ids_or_rows(batch, query_start_loc, sampled), positions, query_start_loc[1:][sampling] - 1
    )
    return InputBatch(
        input_ids=(ids if sampled is None else sampled.tokens.index_select(0, ids))[None],
        position_ids=position_ids[None],
        metadata=AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=block_tables,
            slot_mapping=slots,
            block_size=block_size,
            dtype=dtype,
            device=staging.device,
            visible_to=visible_to(batch, query_start_loc, positions) if joins_touching else None,
            upload=lambda array: staging.upload(array)[0],
        ),
        logits_indices=logits_indices,
        sampling=sampling,
    )


def _ids_or_rows(
    batch: Sequence[ScheduledRequest], query_start_loc: np.ndarray, sampled: SampledTokens | None
) -> np.ndarray:
    """`[num_tokens]`: the tokens' ids, or where they are in `sampled`."""
    if sampled is not None:
        return np.array([sampled.rows[item.follows] for item in batch if item.follows is not None], dtype=np.int64)
    token_ids = np.empty(query_start_loc[-1], dtype=np.int64)
    for item, first, end in zip(batch, query_start_loc[:-1], query_start_loc[1:], strict=True):
        token_ids[first:end] = item.request.token_ids[item.start : item.end]
    return token_ids


def _block_tables(batch: Sequence[ScheduledRequest], num_blocks: np.ndarray) -> np.ndarray:
    """`[num_requests, max(num_blocks)]`, zero-filled: only the blocks this step reads or writes."""
    tables = np.zeros((len(batch), num_blocks.max()), dtype=np.int64)
    for row, item, count in zip(tables, batch, num_blocks.tolist(), strict=True):
        row[:count] = np.fromiter(islice(item.block_ids, count), dtype=np.int64, count=count)
    return tables
