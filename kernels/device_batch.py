"""What attention kernels read of a step on the device: int32, copied there once per step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .attention_plan import AttentionPlan, PlanLimits

# Of int32: 64 bytes. So all addresses and strides are multiples of 16, and a kernel is compiled once for all steps.
_ALIGNMENT = 16
# For plans where nothing is compiled: the multiprocessors of an H100.
_NUM_SMS_INTERPRETED = 132


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A step's batch as the kernels see it.

    A captured graph may be replayed for another step after other values were written into the tensors, if its metadata
    say so (`AttentionMetadata.planned_seq_len`). A token at position −1 sees nothing, and its output is 0.

    Args:
        block_tables: `[num_requests, at least max_blocks]`.
        positions: `[num_tokens]`, each token's place in its request.
        visible_to: `[num_tokens]`, as in `AttentionMetadata`; None where all see up to themselves.
    """

    block_tables: torch.Tensor
    positions: torch.Tensor
    visible_to: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """An `AttentionPlan` on the device."""

    narrow: torch.Tensor
    wide: torch.Tensor
    listed_tokens: torch.Tensor
    first_parts: torch.Tensor
    merged: torch.Tensor
    num_parts: int


def batch_to_device(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    visible_to: np.ndarray | None,
    device: torch.device,
) -> DeviceBatch:
    """The arguments are those of `AttentionMetadata`."""
    positions = np.arange(query_start_loc[-1]) + np.repeat(seq_lens - query_start_loc[1:], np.diff(query_start_loc))
    width = block_tables.shape[1]
    padded_tables = np.pad(block_tables, ((0, 0), (0, -width % _ALIGNMENT)))
    tensors = _to_device([padded_tables, positions, *([] if visible_to is None else [visible_to])], device)
    return DeviceBatch(tensors[0], tensors[1], None if visible_to is None else tensors[2])


def plan_to_device(plan: AttentionPlan, device: torch.device) -> DevicePlan:
    """The same plan there."""
    tables = [plan.narrow, plan.wide, plan.listed_tokens, plan.first_parts, plan.merged]
    narrow, wide, listed_tokens, first_parts, merged = _to_device(tables, device)
    return DevicePlan(narrow, wide, listed_tokens, first_parts, merged, plan.num_parts)


@functools.cache
def plan_limits(device: torch.device) -> PlanLimits:
    """What plans take into account of this device."""
    if device.type != "cuda":
        return PlanLimits(_NUM_SMS_INTERPRETED)
    return PlanLimits(torch.cuda.get_device_properties(device).multi_processor_count)


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """All of them as int32, in one copy."""
    ends = np.cumsum([array.size + -array.size % _ALIGNMENT for array in arrays])
    packed = np.zeros(ends[-1], dtype=np.int32)
    for array, end in zip(arrays, ends, strict=True):
        start = end - (array.size + -array.size % _ALIGNMENT)
        packed[start : start + array.size] = array.ravel()
    on_device = torch.from_numpy(packed).to(device)
    return [
        on_device[end - (array.size + -array.size % _ALIGNMENT) :][: array.size].view(array.shape)
        for array, end in zip(arrays, ends.tolist(), strict=True)
    ]
