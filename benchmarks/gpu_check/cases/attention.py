"""Attention over block tables: prefills, decodes, long contexts, shared prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_check.case import Case, Goal, Setting, Work, apart, tensor_bytes
from kernels.attention_metadata import AttentionMetadata
from kernels.dispatch import computed_by
from kernels.paged_attention import paged_attention
from kernels.quantize_kv import KVScales, dequantize, quantize

_DECODE_GOAL = Goal(min_roofline_share=0.85)
_PREFILL_GOAL = Goal(max_time_ratio=1 / 0.7)
_SHARING_GOAL = Goal(max_time_ratio=0.3)
_CODES_GOAL = Goal(max_time_ratio=1.0)
_CODES = (torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class _Heads:
    """What a model's attention is like."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    codes: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class _Batch:
    """A step's queries, and a pool with keys and values of its requests."""

    heads: _Heads
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    scales: KVScales | None
    sinks: torch.Tensor | None
    metadata: AttentionMetadata

    @property
    def pool_bytes(self) -> int:
        return tensor_bytes(self.key_cache, self.value_cache, *(self.scales or ()))

    def attend(self) -> torch.Tensor:
        return paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.metadata,
            self.scales,
            scaling=self.heads.head_dim**-0.5,
            sliding_window=self.heads.sliding_window,
            softcap=self.heads.softcap,
            sinks=self.sinks,
        )

    def error(self, dtype: torch.dtype) -> float:
        """How far from torch, which computes in `dtype`."""
        sinks = None if self.sinks is None else self.sinks.to(dtype)
        caches = self.key_cache, self.value_cache
        if self.scales is None:
            keys, values = (cache.to(dtype) for cache in caches)
        else:
            keys, values = map(dequantize, caches, self.scales, [dtype] * 2)
        # Not the same metadata: it keeps what it has worked out for this type.
        metadata = replace(self.metadata, dtype=dtype)
        wide = _Batch(self.heads, self.query.to(dtype), keys, values, None, sinks, metadata)
        with computed_by("torch"):
            expected = wide.attend()
        # Weights are bfloat16 where float16 is beside codes.
        is_coarse = self.scales is not None and self.query.dtype == torch.float16
        return apart(self.attend(), expected, units=32 if is_coarse else 16 if self.query.dtype == torch.float32 else 4)


def _batch(
    setting: Setting,
    requests: Sequence[tuple[int, int]],
    heads: _Heads,
    *,
    block_size: int = 16,
    num_shared: int = 0,
    sees_ahead: bool = False,
) -> _Batch:
    """`requests` are (tokens in this step, tokens up to and with them); the first `num_shared` blocks are all theirs.

    With `sees_ahead` the tokens of a request see all of it.
    """
    query_lens, seq_lens = np.array(requests, dtype=np.int64).reshape(-1, 2).T
    blocks_each = -(-seq_lens // block_size)
    num_blocks = int((blocks_each - num_shared).sum()) + num_shared + 2
    shuffled = np.random.default_rng().permutation(num_blocks)
    tables = np.zeros((len(requests), blocks_each.max(initial=1)), dtype=np.int64)
    tables[:, :num_shared] = shuffled[:num_shared]
    used = num_shared
    for row, count in enumerate(blocks_each):
        own = count - num_shared
        tables[row, num_shared:count] = shuffled[used : used + own]
        used += own
    positions = np.concatenate([np.arange(end) for end in seq_lens])
    places = tables[np.repeat(np.arange(len(requests)), seq_lens), positions // block_size]
    slots = torch.from_numpy(places * block_size + positions % block_size).to(setting.device)

    def cache(width: int) -> torch.Tensor:
        made = setting.normal(num_blocks * block_size, heads.num_kv_heads, width, dtype=heads.dtype)
        is_used = torch.zeros(len(made), dtype=torch.bool, device=setting.device)
        is_used[slots] = True
        made[~is_used] = torch.nan
        return made.unflatten(0, (num_blocks, block_size))

    key_cache, value_cache = cache(heads.head_dim), cache(heads.value_dim or heads.head_dim)
    scales = None
    if heads.codes is not None:
        key_cache, key_scales = quantize(key_cache, heads.codes)
        value_cache, value_scales = quantize(value_cache, heads.codes)
        scales = KVScales(key_scales, value_scales)
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    metadata = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_tables=tables,
        # Everything is written already.
        slot_mapping=np.full(int(starts[-1]), -1, dtype=np.int64),
        block_size=block_size,
        dtype=heads.dtype,
        device=setting.device,
        visible_to=np.repeat(seq_lens, query_lens) if sees_ahead else None,
    )
    return _Batch(
        heads,
        setting.normal(int(starts[-1]), heads.num_heads, heads.head_dim, dtype=heads.dtype),
        key_cache,
        value_cache,
        scales,
        setting.normal(heads.num_heads, dtype=heads.dtype) if heads.has_sinks else None,
        metadata,
    )


def paged_attention_cases(setting: Setting) -> Iterator[Case]:
    yield from _checked(setting)
    if setting.is_rehearsal:
        tiny = _Heads(4, 2, 32)
        yield Case("2 decodes at 40", partial(_decode, setting, 2, 40, tiny))
        yield Case("prefill of 20", partial(_prefill, setting, [20], tiny))
        yield Case("3 over a prefix of 32", partial(_shared, setting, 3, 32, 8, tiny))
        yield Case(
            "2 decodes at 40, int8", partial(_beside_exact, setting, [(1, 40)] * 2, replace(tiny, codes=_CODES[0]))
        )
        return
    heads = _Heads()
    for num_requests, context in ((64, 4096), (8, 16_384), (1, 131_072)):
        name = f"{num_requests} decodes at {context}"
        yield Case(name, partial(_decode, setting, num_requests, context, heads))
    for name, lengths, those in (
        ("prefill of 8192", [8192], heads),
        ("prefill of 8 × 1024", [1024] * 8, heads),
        ("prefill of 8192, head_dim 64", [8192], replace(heads, head_dim=64)),
    ):
        yield Case(name, partial(_prefill, setting, lengths, those))
    yield Case("64 over a shared prefix of 8192", partial(_shared, setting, 64, 8192, 128, heads))
    yield Case("chunk of 2048 at 14336", partial(_chunk_and_decodes, setting, heads, num_decodes=0))
    yield Case("the same beside 32 decodes at 4096", partial(_chunk_and_decodes, setting, heads, num_decodes=32))
    for codes in _CODES:
        coded = replace(heads, codes=codes)
        for name, requests in (
            ("64 decodes at 4096", [(1, 4096)] * 64),
            ("1 decodes at 131072", [(1, 131_072)]),
            ("prefill of 8192", [(8192, 8192)]),
        ):
            yield Case(f"{name}, {codes}", partial(_beside_exact, setting, requests, coded))
        yield Case(f"64 over a shared prefix of 8192, {codes}", partial(_shared, setting, 64, 8192, 128, coded))


_MIXED = ((1, 1), (1, 17), (16, 16), (5, 48), (33, 100), (1, 300))


def _checked(setting: Setting) -> Iterator[Case]:
    small = _Heads(6, 2, 64)
    kinds: list[tuple[str, _Heads, dict[str, int]]] = [
        ("GQA 3", small, {}),
        ("window, softcap, sinks", replace(small, sliding_window=20, softcap=15.0, has_sinks=True), {}),
        *((f"{codes}", replace(small, codes=codes), {}) for codes in _CODES),
    ]
    if not setting.is_rehearsal:
        half = replace(small, dtype=torch.float16)
        kinds += [
            ("GQA 8", replace(small, num_heads=16), {}),
            ("no groups", replace(small, num_heads=2), {}),
            ("window", replace(small, sliding_window=20), {}),
            ("sinks", replace(small, has_sinks=True), {}),
            ("softcap", replace(small, softcap=15.0), {}),
            ("float16", half, {}),
            ("float32", replace(small, dtype=torch.float32), {}),
            ("float32, head_dim 256", replace(small, dtype=torch.float32, head_dim=256), {}),
            *((f"head_dim {size}", replace(small, head_dim=size), {}) for size in (32, 80, 96, 128, 256)),
            ("values of 64, keys of 96", replace(small, head_dim=96, value_dim=64), {}),
            ("blocks of 8", small, {"block_size": 8}),
            ("blocks of 32", small, {"block_size": 32}),
        ]
        for codes in _CODES:
            coded = replace(small, codes=codes)
            kinds += [
                (f"{codes}, all there is", replace(coded, sliding_window=20, softcap=15.0, has_sinks=True), {}),
                (f"{codes} beside float16", replace(coded, dtype=torch.float16), {}),
                (f"{codes} beside float32", replace(coded, dtype=torch.float32), {}),
                *((f"{codes}, head_dim {size}", replace(coded, head_dim=size), {}) for size in (32, 80, 128, 256)),
            ]
    for name, heads, options in kinds:
        yield Case(f"mixed batch, {name}", partial(_only_checked, setting, heads, options))
    yield Case("shared prefix, mixed lengths", partial(_check_shared, setting, small))
    yield Case("tokens that see ahead", partial(_check_ahead, setting, small))


def _only_checked(setting: Setting, heads: _Heads, options: dict[str, int]) -> Work:
    batch = _batch(setting, _MIXED[: 3 if setting.is_rehearsal else None], heads, **options)
    return Work(lambda: batch.error(torch.float64))


def _check_shared(setting: Setting, heads: _Heads) -> Work:
    num_shared = 2 if setting.is_rehearsal else 100
    length = 16 * num_shared
    requests = [(1, length + 1), (1, length + 20), (7, length + 33), (1, length + 5)]
    batch = _batch(setting, requests, heads, num_shared=num_shared)
    return Work(lambda: batch.error(torch.float64))


def _check_ahead(setting: Setting, heads: _Heads) -> Work:
    batch = _batch(setting, [(20, 20), (9, 40), (1, 7)], heads, sees_ahead=True)
    return Work(lambda: batch.error(torch.float64))


def _decode(setting: Setting, num_requests: int, context: int, heads: _Heads) -> Work:
    batch = _batch(setting, [(1, context)] * num_requests, heads)
    read = 2 * num_requests * context * heads.num_kv_heads * heads.head_dim * heads.dtype.itemsize
    return Work(
        lambda: batch.error(torch.float32),
        run=batch.attend,
        beside=_flash(setting, heads, num_requests, 1, context, is_causal=False),
        moved_bytes=read + 2 * tensor_bytes(batch.query),
        goal=_DECODE_GOAL,
    )


def _beside_exact(setting: Setting, requests: list[tuple[int, int]], heads: _Heads) -> Work:
    """Codes, beside the same without: less to read and more to do."""
    batch = _batch(setting, requests, heads)
    return Work(
        lambda: batch.error(torch.float32),
        run=batch.attend,
        beside=_batch(setting, requests, replace(heads, codes=None)).attend,
        moved_bytes=2 * tensor_bytes(batch.query) + batch.pool_bytes,
        flops=_attention_flops(heads, requests),
        goal=_CODES_GOAL if requests[0][0] == 1 else None,
    )


def _prefill(setting: Setting, lengths: list[int], heads: _Heads) -> Work:
    batch = _batch(setting, [(length, length) for length in lengths], heads)
    return Work(
        lambda: batch.error(torch.float32),
        run=batch.attend,
        beside=_flash(setting, heads, len(lengths), lengths[0], lengths[0], is_causal=True),
        moved_bytes=2 * tensor_bytes(batch.query) + batch.pool_bytes,
        flops=_attention_flops(heads, [(length, length) for length in lengths]),
        goal=_PREFILL_GOAL,
    )


def _chunk_and_decodes(setting: Setting, heads: _Heads, num_decodes: int) -> Work:
    requests = [(2048, 16_384), *[(1, 4096)] * num_decodes]
    batch = _batch(setting, requests, heads)
    return Work(
        lambda: batch.error(torch.float32),
        run=batch.attend,
        moved_bytes=2 * tensor_bytes(batch.query) + batch.pool_bytes,
        flops=_attention_flops(heads, requests),
    )


def _shared(setting: Setting, num_requests: int, num_shared_tokens: int, num_own: int, heads: _Heads) -> Work:
    requests = [(1, num_shared_tokens + num_own)] * num_requests
    batch = _batch(setting, requests, heads, num_shared=num_shared_tokens // 16)
    return Work(
        lambda: batch.error(torch.float32),
        run=batch.attend,
        # The same kernels where every request has blocks of its own.
        beside=_batch(setting, requests, heads).attend,
        moved_bytes=2 * tensor_bytes(batch.query) + batch.pool_bytes,
        flops=_attention_flops(heads, requests),
        goal=_SHARING_GOAL,
    )


def _attention_flops(heads: _Heads, requests: Sequence[tuple[int, int]]) -> float:
    """Of both products, with what causality leaves of them."""
    num_pairs = sum(query_len * seq_len - query_len * (query_len - 1) / 2 for query_len, seq_len in requests)
    return 4 * heads.num_heads * heads.head_dim * num_pairs


def _flash(
    setting: Setting, heads: _Heads, num_requests: int, num_queries: int, num_keys: int, *, is_causal: bool
) -> Callable[[], torch.Tensor]:
    """FlashAttention as torch has it, over keys and values that lie side by side."""
    query = setting.normal(num_requests, heads.num_heads, num_queries, heads.head_dim, dtype=heads.dtype)
    key, value = (
        setting.normal(num_requests, heads.num_kv_heads, num_keys, heads.head_dim, dtype=heads.dtype) for _ in range(2)
    )

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)

    return run
