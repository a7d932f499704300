"""In place of kernels, which are slow to interpret: torch that reads of a captured step only what is on the device.

So a graph of it can be captured and replayed (`tests.simulated_device`), and is wrong wherever one of kernels would be.
Steps that are not to be captured are computed as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

import engine_core.model.lora.lora_linear as lora_linear_module
import engine_core.model.runner as runner_module
from engine_core.model.attention import AttentionOptions, PagedKV
from kernels.lora import LoraWeights
from kernels.lora_batch import LoraBatch


@contextmanager
def simulated_kernels() -> Iterator[None]:
    """Within it, model runners capture graphs where they have a queue."""
    as_ever = PagedKV.attend

    def attend(
        self: PagedKV,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        cache, metadata = self.pool.caches[layer_idx], self.metadata[self.pool.group_of[layer_idx]]
        if metadata.planned_seq_len is None:
            return as_ever(self, layer_idx, query, key, value, options)
        for source, tensor in zip((key, value), (cache.keys, cache.values), strict=True):
            _write(source, tensor, metadata.slots.tensor)
        batch = metadata.on_device
        return _attend(query, cache.keys, cache.values, batch.block_tables.long(), batch.positions[:, None], options)

    with (
        patch.object(PagedKV, "attend", attend),
        patch.object(runner_module, "uses_triton", lambda tensor: True),
        patch.object(lora_linear_module, "add_lora", _add_lora),
    ):
        yield


def _write(source: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    flat = cache.flatten(0, 1)
    stored = slots >= 0
    # Rows without a slot repeat what the first row with one does; if there is none, slot 0 gets its own content.
    first = stored.byte().argmax(keepdim=True)
    places = torch.where(stored, slots, slots[first]).clamp_min(0)
    rows = torch.where(stored[:, None, None], source, source[first])
    flat.index_copy_(0, places, torch.where(stored.any(), rows, flat.index_select(0, places)))


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    positions: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Of one token per request, at `positions` `[num_requests, 1]`."""
    assert options.sinks is None
    # [num_requests, num_keys, num_kv_heads, head_dim]
    keys, values = key_cache[block_tables].flatten(1, 2), value_cache[block_tables].flatten(1, 2)
    places = torch.arange(keys.shape[1])
    seen = places <= positions
    if options.sliding_window is not None:
        seen &= places > positions - options.sliding_window
    grouped = query.unflatten(1, (key_cache.shape[2], -1))
    scores = torch.einsum("rhgd,rkhd->rhgk", grouped, keys) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    weights = scores.masked_fill(~seen[:, None, None, :], float("-inf")).softmax(dim=-1)
    # Slots that are not the request's may hold anything, and 0 times NaN is NaN.
    return torch.einsum("rhgk,rkhd->rhgd", weights, values.masked_fill(~seen[:, :, None, None], 0)).flatten(1, 2)


def _add_lora(output: torch.Tensor, x: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
    """Of layers that are one slice."""
    adapters, firsts, counts = batch.tiles[:, :, None].long().unbind(dim=1)
    places = torch.arange(len(batch.rows))
    of_tile = (places >= firsts) & (places < firsts + counts)
    # Places that fill up are row 0's, and add nothing to it.
    one_more = torch.zeros(len(x), dtype=torch.int64).index_add(
        0, batch.rows.long(), (of_tile * (adapters + 1)).sum(dim=0)
    )
    slots = (one_more - 1).clamp_min(0)
    shrunk = torch.einsum("ti,tri->tr", x, weights.a[slots, 0])
    # What is behind a rank may be another adapter's.
    shrunk = shrunk.masked_fill(torch.arange(shrunk.shape[1]) >= weights.ranks[slots], 0)
    added = torch.einsum("tr,tor->to", shrunk, weights.b[slots]) * weights.scaling[slots]
    output.add_(added.masked_fill(one_more[:, None] == 0, 0))
