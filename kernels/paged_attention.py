"""Attention that reads K/V through block tables: prefill chunks and decodes in one flattened batch.

Triton kernels compute it on a GPU (`tiled_attention`), C on a CPU (`attention`). Where neither is there it is plain
torch, the same on CPU and CUDA. A layer's cache is `[num_blocks, block_size, num_kv_heads, head_dim]`, keys and values
apart. The idea of the block table is vLLM's (Kwon et al., "Efficient Memory Management for Large Language Model Serving
with PagedAttention", 2023).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import attention as kernel
from .attention_metadata import AttentionMetadata, AttentionTile
from .attention_tiles import LayerHeads
from .dispatch import uses_triton
from .quantize_kv import KVScales, dequantize
from .tiled_attention import tiled_attention

# How many scores are written out at once where no fused kernel does it: 256 MiB of them.
_MAX_SCORES = 1 << 26


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scales: KVScales | None = None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each token over its own request's cached tokens, those of this step included, up to itself or as far
    ahead as `metadata.visible_to` says.

    Args:
        query: `[num_tokens, num_heads, head_dim]`; `num_heads` is a multiple of the cache's `num_kv_heads`.
        scales: of quantized caches (`quantize_kv`), whose codes stand for what they are multiplied with.
        sliding_window: how many tokens are seen, the token itself included; None is all.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2).
        sinks: `[num_heads]` logits that take part in the softmax and contribute nothing (GPT-OSS).

    Returns `[num_tokens, num_heads, value_head_dim]`. No slot outside the requests' own tokens influences it.
    """
    if uses_triton(query):
        return tiled_attention(
            *(query, key_cache, value_cache, metadata, scales),
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )
    if kernel.takes(query, key_cache, value_cache, scales):
        _, num_heads, head_dim = query.shape
        heads = LayerHeads(num_heads, key_cache.shape[2], head_dim, value_cache.shape[-1], query.dtype)
        batch = metadata.cpu_batch(heads, sliding_window)
        return kernel.attention(
            *(query, key_cache, value_cache, batch, scales), scaling=scaling, softcap=softcap, sinks=sinks
        )
    key_scales, value_scales = (None, None) if scales is None else scales

    def attend(tile: AttentionTile) -> torch.Tensor:
        # [num_requests, num_kv_heads, num_keys, head_dim]
        keys = _gather(key_cache, key_scales, tile, query.dtype)
        values = _gather(value_cache, value_scales, tile, query.dtype)
        if softcap is None and sinks is None:
            return _fused(query[tile.rows], keys, values, tile, scaling)
        return _explicit(query[tile.rows], keys, values, tile, scaling, softcap, sinks)

    tiles = metadata.tiles(sliding_window)
    if len(tiles) == 1 and tiles[0].rows == slice(0, len(query)):
        return attend(tiles[0])
    output = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    for tile in tiles:
        output[tile.rows] = attend(tile)
    return output


def _gather(cache: torch.Tensor, scales: torch.Tensor | None, tile: AttentionTile, dtype: torch.dtype) -> torch.Tensor:
    slots = tile.key_slots.flatten()
    if scales is None:
        gathered = cache.flatten(0, 1).index_select(0, slots)
    else:
        # torch does not index every type of eight bits.
        codes = cache.view(torch.uint8).flatten(0, 1).index_select(0, slots).view(cache.dtype)
        gathered = dequantize(codes, scales.flatten(0, 1).index_select(0, slots), dtype)
    return gathered.view(tile.num_requests, tile.num_keys, *cache.shape[2:]).transpose(1, 2)


def _fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: AttentionTile, scaling: float
) -> torch.Tensor:
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    if tile.num_queries == 1:
        # The heads that share a KV head stand in for several queries: nothing is expanded.
        grouped = query.view(tile.num_requests, num_kv_heads, num_heads // num_kv_heads, -1)
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=tile.mask, scale=scaling)
        return output.reshape(tile.num_requests, num_heads, -1)
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=tile.mask,
        is_causal=tile.is_causal,
        scale=scaling,
        enable_gqa=num_heads != num_kv_heads,
    )
    return output[0].transpose(0, 1)


def _explicit(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tile: AttentionTile,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    if tile.num_queries == 1:
        mask = None if tile.mask is None else tile.mask.unsqueeze(2)
        return _scored(query[:, None], keys, values, mask, scaling, softcap, sinks)[:, 0]
    num_at_once = max(1, _MAX_SCORES // (query.shape[1] * tile.num_keys))
    parts = []
    for first in range(0, tile.num_queries, num_at_once):
        part = query[first : first + num_at_once]
        if tile.is_causal:
            mask = query.new_full((len(part), tile.num_keys), float("-inf")).triu(1 + first)
        else:
            mask = None if tile.mask is None else tile.mask[first : first + num_at_once]
        parts.append(_scored(part[None], keys, values, mask, scaling, softcap, sinks)[0])
    return torch.cat(parts)


def _scored(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`query` `[num_requests, num_queries, num_heads, head_dim]`; `mask` is added to the scores
    `[num_requests, num_kv_heads, group_size, num_queries, num_keys]`. Returns the shape of `query`.
    """
    num_requests, num_queries, num_heads, _ = query.shape
    num_kv_heads = keys.shape[1]
    group_size = num_heads // num_kv_heads
    grouped = query.unflatten(2, (num_kv_heads, group_size)).permute(0, 2, 3, 1, 4)
    scores = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores += mask.float()
    if sinks is not None:
        sink = sinks.float().view(1, num_kv_heads, group_size, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    output = weights.to(values.dtype) @ values.unsqueeze(2)
    return output.permute(0, 3, 1, 2, 4).reshape(num_requests, num_queries, num_heads, -1)
