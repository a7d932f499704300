"""One step's requests, laid out as one flattened row `[1, num_tokens]` for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from engine_core.runner import ScheduledRequest
from kernels.attention_metadata import AttentionMetadata

from .picture_groups import visible_to
from .staging import Staging


class Places(NamedTuple):
    """Of tokens in a flattened batch: int64 `[num_places]`, and the same on the device."""

    on_host: np.ndarray
    on_device: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step has sampled: `tokens`, on the device, and `rows`, which says by place in its batch which is whose."""

    tokens: torch.Tensor
    rows: dict[int, int]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A scheduled batch as arrays; the meanings are those of `AttentionMetadata`, all int64.

    Attributes:
        block_tables: `[num_groups, num_requests, max_blocks]`: each KV cache group's.
        slots: `[num_groups, num_tokens]`: each group's slot mapping.
        ids: `[num_tokens]`: tokens, or where they are in what the step before has sampled.
        positions: `[num_tokens]`: places in their sequences.
        sampling: indices into the batch of the requests whose last token is in it.
    """

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    slots: np.ndarray
    ids: np.ndarray
    positions: np.ndarray
    sampling: list[int]


def lay_out(
    batch: Sequence[ScheduledRequest],
    windows: Sequence[int | None],
    block_size: int,
    sampled: SampledTokens | None,
) -> StepLayout:
    """The cost grows with what is scheduled and the blocks it sees, not with the pool.

    `windows` are those of the KV cache groups (`ModelInfo.windows`); `sampled` is what the step before has sampled, for
    a batch that follows it.
    """
    starts = np.array([item.start for item in batch], dtype=np.int64)
    query_lens = np.array([item.num_tokens for item in batch], dtype=np.int64)
    shared_blocks = np.array([item.num_shared_blocks for item in batch], dtype=np.int64)
    query_start_loc = np.concatenate([[0], np.cumsum(query_lens)])
    seq_lens = starts + query_lens
    block_tables = _block_tables(batch, windows, block_size)

    rows = np.repeat(np.arange(len(batch)), query_lens)
    positions = np.arange(len(rows)) + (starts - query_start_loc[:-1])[rows]
    blocks = positions // block_size
    slots = block_tables[:, rows, blocks] * block_size + positions % block_size
    slots[:, blocks < shared_blocks[rows]] = -1
    return StepLayout(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=block_tables,
        slots=slots,
        ids=_ids_or_rows(batch, query_start_loc, sampled),
        positions=positions,
        sampling=[index for index, item in enumerate(batch) if item.samples],
    )


@dataclass(frozen=True, slots=True)
class InputBatch:
    """`input_ids` and `position_ids` are `[1, num_tokens]`. `metadata` are those of the KV cache groups.
    `logits_places` are those of the last tokens of the requests that sample, in their order. All tensors are on the
    device.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    metadata: Sequence[AttentionMetadata]
    logits_places: Places


def build_input_batch(
    batch: Sequence[ScheduledRequest],
    layout: StepLayout,
    *,
    block_size: int,
    dtype: torch.dtype,
    staging: Staging,
    sampled: SampledTokens | None = None,
    joins_touching: bool = False,
) -> InputBatch:
    """`layout`, made with the same `sampled`, on the device. `joins_touching` is `MultimodalInfo.joins_touching`.

    Raises:
        ValueError: with it, a request's tokens end inside a picture.
    """
    places = layout.query_start_loc[1:][layout.sampling] - 1
    ids, position_ids, places_on_device = staging.upload(layout.ids, layout.positions, places)
    seen = visible_to(batch, layout.query_start_loc, layout.positions) if joins_touching else None
    metadata: list[AttentionMetadata] = []
    for block_tables, slots in zip(layout.block_tables, layout.slots, strict=True):
        metadata.append(
            AttentionMetadata(
                query_start_loc=layout.query_start_loc,
                seq_lens=layout.seq_lens,
                block_tables=block_tables,
                slot_mapping=slots,
                block_size=block_size,
                dtype=dtype,
                device=staging.device,
                visible_to=seen,
                alike=tuple(metadata),
                upload=staging.upload,
            )
        )
    return InputBatch(
        input_ids=(ids if sampled is None else sampled.tokens.index_select(0, ids))[None],
        position_ids=position_ids[None],
        metadata=metadata,
        logits_places=Places(places, places_on_device),
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


def _block_tables(batch: Sequence[ScheduledRequest], windows: Sequence[int | None], block_size: int) -> np.ndarray:
    """`[num_groups, num_requests, max_blocks]`, zero where there is no block that this step reads or writes."""
    ends = [-(-item.end // block_size) for item in batch]
    tables = np.zeros((len(windows), len(batch), max(ends)), dtype=np.int64)
    for group, window in enumerate(windows):
        for row, item, end in zip(tables[group], batch, ends, strict=True):
            first = 0 if window is None else max(0, item.start + 1 - window) // block_size
            row[first:end] = np.fromiter(islice(item.block_tables[group], first, end), np.int64, end - first)
    return tables
