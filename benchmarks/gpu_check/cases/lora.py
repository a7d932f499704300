"""Multi-LoRA: a prefill through one adapter, decodes through as many as there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu_check.case import Case, Setting, Work, apart
from kernels.lora import LoraWeights, add_lora, reference
from kernels.lora_batch import lora_batch


def lora_cases(setting: Setting) -> Iterator[Case]:
    for dtype in setting.dtypes:
        name = f"odd sizes, mixed ranks, {str(dtype).removeprefix('torch.')}"
        yield Case(name, partial(_checked, setting, dtype))
    sizes = (96, 32) if setting.is_rehearsal else (4096, 1024)
    num_decodes, num_prefill = (4, 5) if setting.is_rehearsal else (64, 8192)
    together, scattered = np.zeros(num_decodes, np.int64), np.arange(num_decodes) % 32
    for name, adapters, rank in (
        (f"decode of {num_decodes}, all one adapter", together, 16),
        (f"decode of {num_decodes}, 32 adapters", scattered, 16),
        (f"decode of {num_decodes}, 32 adapters", scattered, 64),
        (f"prefill of {num_prefill}", np.zeros(num_prefill, np.int64), 16),
    ):
        yield Case(
            f"QKV, {name}, rank {rank}",
            partial(_timed, setting, adapters, rank, *sizes),
        )


def _weights(
    setting: Setting, slice_sizes: tuple[int, ...], in_features: int, ranks: list[list[int]], dtype: torch.dtype
) -> LoraWeights:
    """NaN wherever an adapter has nothing."""
    max_rank, num_slots = max(map(max, ranks)), len(ranks)
    a = setting.poisoned(num_slots, len(slice_sizes), max_rank, in_features, dtype=dtype)
    b = setting.poisoned(num_slots, sum(slice_sizes), max_rank, dtype=dtype)
    for slot, of_slot in enumerate(ranks):
        for rows, a_slice, rank in zip(b[slot].split(slice_sizes), a[slot], of_slot, strict=True):
            a_slice[:rank] = setting.normal(rank, in_features, dtype=dtype, scale=in_features**-0.5)
            rows[:, :rank] = setting.normal(len(rows), rank, dtype=dtype, scale=max_rank**-0.5)
    scaling = torch.full((num_slots, len(slice_sizes)), 0.5, device=setting.device)
    return LoraWeights(a, b, torch.tensor(ranks, dtype=torch.int32, device=setting.device), scaling, slice_sizes)


def _difference(setting: Setting, adapters: np.ndarray, weights: LoraWeights) -> float:
    """From the reference in float64: what is shrunk is rounded to the weights' type, and so is the result."""
    dtype = weights.a.dtype
    x = setting.normal(len(adapters), weights.a.shape[-1], dtype=dtype)
    before = setting.normal(len(adapters), weights.b.shape[1], dtype=dtype)
    batch = lora_batch(adapters, setting.device)
    expected = before.double()
    reference(expected, x.double(), replace(weights, a=weights.a.double(), b=weights.b.double()), batch)
    worst = 0.0
    for same in (batch, lora_batch(adapters, setting.device, has_fixed_size=True)):
        output = before.clone()
        add_lora(output, x, weights, same)
        worst = max(worst, apart(output, expected, units=8))
    return worst


def _checked(setting: Setting, dtype: torch.dtype) -> Work:
    ranks = [[5, 5, 5], [70, 0, 33], [0, 0, 0], [1, 64, 16]]
    weights = _weights(setting, (66, 1, 20), 300, ranks, dtype)
    mixes: list[list[int]] = [[3, -1, 0, 1, -1, 0]]
    if not setting.is_rehearsal:
        mixes += [[], [-1, -1], [1], [3] * 17, [0, -1, *[3] * 65, 1, 0, 2]]
    return Work(lambda: max(_difference(setting, np.array(mix, dtype=np.int64), weights) for mix in mixes))


def _timed(setting: Setting, adapters: np.ndarray, rank: int, query_size: int, kv_size: int) -> Work:
    slice_sizes, num_slots = (query_size, kv_size, kv_size), int(adapters.max()) + 1
    weights = _weights(setting, slice_sizes, query_size, [[rank] * 3] * num_slots, torch.bfloat16)
    x, output = setting.normal(len(adapters), query_size), setting.normal(len(adapters), sum(slice_sizes))
    batch = lora_batch(adapters, setting.device)
    merged = setting.normal(sum(slice_sizes), query_size, scale=query_size**-0.5)
    return Work(
        lambda: _difference(setting, adapters, weights),
        run=lambda: add_lora(output, x, weights, batch),
        # The layer itself: what the adapters' part is small beside, or not.
        beside=lambda: F.linear(x, merged),
        moved_bytes=2 * (weights.a.numel() + weights.b.numel() + x.numel() + 2 * output.numel()),
    )
