"""A step's attention as a table of tiles, made on the host from lengths and block tables alone.

Each request's tokens are cut into tiles (`attention_tiles`): narrow ones where one holds them all, as for decodes, else
wide ones. A prefix that several requests share is taken out of theirs and becomes tiles of its own, of all their tokens
together (`shared_prefixes`). Then keys are cut (split-KV): where there are fewer programs than the device runs at
once, a tile with more than its fair share of all keys is divided into parts. Long tiles come first, so that none of
them is left at the end. (Dao et al., "Flash-Decoding for long-context inference", 2023.)

A token that has one tile gets its output from it. The parts of every other lie one behind the other, those of the
prefix first, and are merged (`merge_parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .attention_tiles import LayerHeads, tile_shape
from .shared_prefixes import ReadingCosts, SharedPrefix, shared_prefixes

_NO_END = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a plan takes into account of the device.

    Args:
        num_sms: its multiprocessors.
        min_part_keys: no narrow tile is divided into parts of fewer keys, as starting a program and merging cost more
            than it saves; nor a wide one, which leaves larger parts behind, into parts of fewer than four times that.
        prefix_overhead_bytes: what it reads in the time that two small launches take, some 5 µs.
    """

    num_sms: int
    min_part_keys: int = 256
    prefix_overhead_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Tables of int32.

    Attributes:
        narrow, wide: `[num_tiles, len(TILE_FIELDS)]`.
        listed_tokens: the tokens of listed tiles.
        first_parts: `[num_tokens]`, where the parts of each token begin that has any.
        merged: `[num_merged, 3]`: a token that has parts, where they begin, how many there are.
        num_parts: of all of them together.
        prefixes: those whose keys are read once for several requests.
    """

    narrow: np.ndarray
    wide: np.ndarray
    listed_tokens: np.ndarray
    first_parts: np.ndarray
    merged: np.ndarray
    num_parts: int
    prefixes: Sequence[SharedPrefix]


def plan_attention(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray | None,
    block_size: int,
    heads: LayerHeads,
    limits: PlanLimits,
    *,
    sliding_window: int | None = None,
    visible_to: np.ndarray | None = None,
) -> AttentionPlan:
    """A plan for layers with such heads and window. The arrays are those of `AttentionMetadata`.

    Without `block_tables` no prefixes are looked for, and the plan is right for sequences of any length, only not as
    fast for others than `seq_lens`: what a token sees is found out on the device, and a part behind that is empty.
    """
    batch = _Batch(query_start_loc, np.diff(query_start_loc), seq_lens, sliding_window, visible_to)
    widths = _Widths(*(tile_shape(heads, is_wide=is_wide).rows // heads.group_size for is_wide in (False, True)))
    prefixes: list[SharedPrefix] = []
    if block_tables is not None:
        prefixes = shared_prefixes(
            *(block_tables, seq_lens, batch.query_lens, block_size),
            costs=_reading_costs(heads, widths, limits),
            num_tiles=widths.num_tiles(batch.query_lens),
            sliding_window=sliding_window,
        )
    own = _own_tiles(batch, prefixes, widths)
    shared, listed_tokens = _prefix_tiles(batch, prefixes, widths)
    tiles = _Tiles(*(np.concatenate(columns) for columns in zip(own, shared, strict=True)))
    num_parts = _num_parts(tiles, heads, limits)

    own_parts, shared_parts = np.split(num_parts, [len(own.first)])
    prefix_parts = np.zeros(int(query_start_loc[-1]), dtype=np.int64)
    prefix_parts[listed_tokens] = np.repeat(shared_parts, shared.num_tokens)
    parts_of_token = prefix_parts + np.repeat(own_parts, own.num_tokens)
    parts_of_token[parts_of_token == 1] = 0
    first_parts = np.cumsum(parts_of_token) - parts_of_token
    merged = np.flatnonzero(parts_of_token)
    slots = np.concatenate([np.where(parts_of_token[own.first], prefix_parts[own.first], -1), 0 * shared.first])

    narrow, wide = _tables(tiles, num_parts, slots)
    return AttentionPlan(
        narrow=narrow,
        wide=wide,
        listed_tokens=listed_tokens.astype(np.int32),
        first_parts=first_parts.astype(np.int32),
        merged=np.stack([merged, first_parts[merged], parts_of_token[merged]], axis=1).astype(np.int32),
        num_parts=int(parts_of_token.sum()),
        prefixes=prefixes,
    )


class _Batch(NamedTuple):
    query_start_loc: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    sliding_window: int | None
    visible_to: np.ndarray | None

    def first_seen(self, positions: np.ndarray) -> np.ndarray:
        """The first position that the window shows a token at each of `positions`."""
        return np.maximum(0, positions + 1 - self.sliding_window) if self.sliding_window else np.zeros_like(positions)


class _Widths(NamedTuple):
    """How many tokens narrow and wide tiles have."""

    narrow: int
    wide: int

    def of(self, num_tokens: np.ndarray) -> np.ndarray:
        """The width of tiles for so many tokens."""
        return np.where(num_tokens <= self.narrow, self.narrow, self.wide)

    def num_tiles(self, num_tokens: np.ndarray) -> np.ndarray:
        return -(-num_tokens // self.of(num_tokens))


class _Tiles(NamedTuple):
    """Columns of a table of tiles, and what decides how they are divided. `num_keys` may be an estimate."""

    table_row: np.ndarray
    first: np.ndarray
    num_tokens: np.ndarray
    is_listed: np.ndarray
    key_begin: np.ndarray
    key_end: np.ndarray
    num_keys: np.ndarray
    is_wide: np.ndarray


def _reading_costs(heads: LayerHeads, widths: _Widths, limits: PlanLimits) -> ReadingCosts:
    return ReadingCosts(
        kv_bytes=heads.kv_bytes,
        # A part for the prefix and one for the rest, in float32, written and read.
        part_bytes=2 * 2 * heads.num_heads * (heads.value_dim + 1) * 4,
        tile_queries=widths.wide,
        overhead_bytes=limits.prefix_overhead_bytes,
    )


def _own_tiles(batch: _Batch, prefixes: list[SharedPrefix], widths: _Widths) -> _Tiles:
    """Each token once, in the batch's order, with the keys behind its request's shared prefix."""
    prefix_ends = np.zeros_like(batch.seq_lens)
    for prefix in prefixes:
        prefix_ends[prefix.requests] = prefix.num_tokens
    width, num_tiles = widths.of(batch.query_lens), widths.num_tiles(batch.query_lens)
    requests = np.repeat(np.arange(len(num_tiles)), num_tiles)
    offsets = _ranges(np.zeros_like(num_tiles), num_tiles) * width[requests]
    first = batch.query_start_loc[requests] + offsets
    num_tokens = np.minimum(width[requests], batch.query_lens[requests] - offsets)
    positions = (batch.seq_lens - batch.query_lens)[requests] + offsets
    see_to = positions + num_tokens if batch.visible_to is None else batch.visible_to[first + num_tokens - 1]
    key_begin = prefix_ends[requests]
    return _Tiles(
        table_row=requests,
        first=first,
        num_tokens=num_tokens,
        is_listed=np.zeros_like(first),
        key_begin=key_begin,
        key_end=np.full_like(first, _NO_END),
        num_keys=see_to - np.maximum(key_begin, batch.first_seen(positions)),
        is_wide=width[requests] > widths.narrow,
    )


def _prefix_tiles(batch: _Batch, prefixes: list[SharedPrefix], widths: _Widths) -> tuple[_Tiles, np.ndarray]:
    """Tiles of all tokens that share a prefix with its keys, and the list of these tokens."""
    listed = [_ranges(batch.query_start_loc[p.requests], batch.query_lens[p.requests]) for p in prefixes]
    num_listed = np.array([len(tokens) for tokens in listed], dtype=np.int64)
    width, num_tiles = widths.of(num_listed), widths.num_tiles(num_listed)
    which = np.repeat(np.arange(len(prefixes)), num_tiles)
    offsets = _ranges(np.zeros_like(num_tiles), num_tiles) * width[which]
    prefix_ends = np.array([p.num_tokens for p in prefixes], dtype=np.int64)
    earliest = np.array([(batch.seq_lens - batch.query_lens)[p.requests].min() for p in prefixes], dtype=np.int64)
    tiles = _Tiles(
        table_row=np.array([p.requests[0] for p in prefixes], dtype=np.int64)[which],
        first=(np.cumsum(num_listed) - num_listed)[which] + offsets,
        num_tokens=np.minimum(width[which], num_listed[which] - offsets),
        is_listed=np.ones_like(offsets),
        key_begin=np.zeros_like(offsets),
        key_end=prefix_ends[which],
        # The same for all tiles of a prefix, so that they are divided alike.
        num_keys=(prefix_ends - batch.first_seen(earliest))[which],
        is_wide=width[which] > widths.narrow,
    )
    return tiles, np.concatenate(listed) if listed else np.zeros(0, dtype=np.int64)


def _num_parts(tiles: _Tiles, heads: LayerHeads, limits: PlanLimits) -> np.ndarray:
    """How many programs share each tile's keys."""
    num_parts = np.ones_like(tiles.num_keys)
    for is_wide in (False, True):
        launched = tiles.is_wide == is_wide
        num_programs = limits.num_sms * tile_shape(heads, is_wide=is_wide).programs_per_sm
        fair_share = -(-int(tiles.num_keys[launched].sum()) * heads.num_kv_heads // num_programs)
        fewest = limits.min_part_keys * (4 if is_wide else 1)
        num_parts[launched] = -(-tiles.num_keys[launched] // max(fair_share, fewest))
    return np.maximum(1, num_parts)


def _tables(tiles: _Tiles, num_parts: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tables of narrow and of wide tiles; `slots` are those of the tiles' first parts, −1 where there are none."""
    longest_first = np.argsort(-tiles.num_keys // num_parts, kind="stable")
    which = np.repeat(longest_first, num_parts[longest_first])
    part = _ranges(np.zeros_like(num_parts), num_parts[longest_first])
    slot = np.where(slots[which] < 0, -1, slots[which] + part)
    columns = [*(column[which] for column in tiles[:6]), part, num_parts[which], slot]
    table = np.stack(columns, axis=1).astype(np.int32)
    return table[~tiles.is_wide[which]], table[tiles.is_wide[which]]


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`[start, start + length)` of each, one behind the other."""
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
