"""What attention kernels read of a step on the device: int32, copied there once per step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .attention_plan import AttentionPlan, PlanLimits
from .shared_prefixes import SharedPrefix

# Arrays → tensors on the device, by one copy where that is possible. Each begins at a multiple of 64 bytes.
Upload = Callable[..., list[torch.Tensor]]

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
    visible_to: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """An `AttentionPlan` on the device."""

    narrow: torch.Tensor
    wide: torch.Tensor
    listed_tokens: torch.Tensor
    first_parts: torch.Tensor
    merged: torch.Tensor
    num_parts: int
    prefixes: Sequence[SharedPrefix]


def batch_to_device(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    visible_to: np.ndarray | None,
    upload: Upload,
) -> DeviceBatch:
    """The other arguments are those of `AttentionMetadata`."""
    positions = np.arange(query_start_loc[-1]) + np.repeat(seq_lens - query_start_loc[1:], np.diff(query_start_loc))
    width = block_tables.shape[1]
    padded_tables = np.pad(block_tables, ((0, 0), (0, -width % _ALIGNMENT)))
    arrays = [padded_tables, positions, *([] if visible_to is None else [visible_to])]
    return DeviceBatch(*upload(*(_int32(array) for array in arrays)))


def plan_to_device(plan: AttentionPlan, upload: Upload) -> DevicePlan:
    """The same plan there."""
    tables = (plan.narrow, plan.wide, plan.listed_tokens, plan.first_parts, plan.merged)
    narrow, wide, listed_tokens, first_parts, merged = upload(*map(_int32, tables))
    return DevicePlan(narrow, wide, listed_tokens, first_parts, merged, plan.num_parts, plan.prefixes)


@functools.cache
def plan_limits(device: torch.device) -> PlanLimits:
    """What plans take into account of this device."""
    if device.type != "cuda":
        return PlanLimits(_NUM_SMS_INTERPRETED)
    return PlanLimits(torch.cuda.get_device_properties(device).multi_processor_count)


def _int32(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=np.int32)
