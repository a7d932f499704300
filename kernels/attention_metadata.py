"""Which tokens of a step attend to which cache slots, worked out once per step and used by every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .attention_batch import AttentionBatch, plan_batch
from .attention_plan import plan_attention
from .attention_tiles import LayerHeads
from .device_batch import DeviceBatch, DevicePlan, Upload, batch_to_device, plan_limits, plan_to_device
from .shared_prefixes import are_shared
from .slot_mapping import SlotMapping

# A longer chunk is cut into tiles, so that earlier ones need not look at keys only later ones see.
_MAX_TILE_QUERIES = 512
# Decodes share a tile as long as padding to the longest costs no more than this.
_MAX_PADDING_SHARE = 0.2
_FREE_PADDING_TOKENS = 64
# And as long as the keys gathered for it are no more than this, however many requests share a prefix.
_MAX_TILE_KEYS = 1 << 16


@dataclass(slots=True)
class AttentionTile:
    """`num_requests` requests with `num_queries` tokens each, and everything these tokens may attend to.

    Either `num_requests` or `num_queries` is 1. `rows` are the tokens' places in the flattened batch. `key_slots`
    `[num_requests, num_keys]` are cache slots, a shorter request padded with its own first one (its content is
    finite, whatever lies elsewhere in the pool); `key_counts` `[num_requests]`, on the CPU, says how many are no
    padding. A request's last query is of its last key; each sees `sliding_window` keys back, its own included, and
    ahead nothing, or all before `query_ends` `[num_queries]`, places in `key_slots`, on the CPU.
    """

    rows: slice | torch.Tensor
    num_requests: int
    num_queries: int
    num_keys: int
    key_slots: torch.Tensor
    key_counts: torch.Tensor
    sliding_window: int | None
    dtype: torch.dtype
    query_ends: torch.Tensor | None = None
    _mask: torch.Tensor | None = field(init=False, default=None, repr=False)

    @property
    def is_causal(self) -> bool:
        """Whether there are several queries, one for each key, and nothing is masked but later keys."""
        window = self.sliding_window
        if self.query_ends is not None:
            return False
        return 1 < self.num_queries == self.num_keys and (window is None or self.num_keys <= window)

    @property
    def mask(self) -> torch.Tensor | None:
        """What is added to the scores: `[num_requests, 1, 1, num_keys]` or `[num_queries, num_keys]`, worked out once.

        None where nothing is masked, or just what `is_causal` says.
        """
        if self._mask is None and not self.is_causal:
            places = torch.arange(self.num_keys)
            if self.num_queries == 1:
                allowed = (places < self.key_counts[:, None])[:, None, None, :]
                if allowed.all():
                    return None
            else:
                own = places[-self.num_queries :, None]
                allowed = places < (own + 1 if self.query_ends is None else self.query_ends[:, None])
                if self.sliding_window is not None:
                    allowed &= places > own - self.sliding_window
            mask = torch.zeros(allowed.shape, dtype=self.dtype).masked_fill_(~allowed, float("-inf"))
            self._mask = mask.to(self.key_slots.device)
        return self._mask


@dataclass(slots=True)
class AttentionMetadata:
    """One step's flattened batch of requests, each with its last `query_len` tokens. All arrays are on the CPU.

    Args:
        query_start_loc: `[num_requests + 1]`, where each request's tokens start in the batch.
        seq_lens: `[num_requests]`, tokens of each request up to and including this step's.
        block_tables: `[num_requests, max_blocks]`, rows filled up with anything. So are the places of blocks that no
            token of the step sees: what lies there may be anybody's, NaN, or being written.
        slot_mapping: `[num_tokens]`, where each token's K/V goes; −1 is nowhere.
        block_size: tokens per block.
        dtype: of the queries.
        device: of the model; the tensors below and those of the tiles are there.
        visible_to: `[num_tokens]`, for each token the position behind the last one it sees, where some see tokens that
            come after them: more than its own, never decreasing within a request, at most its `seq_len`. A sliding
            window limits how far back a token sees, not this. None: all see up to themselves.
        planned_seq_len: kernels are planned for sequences that may grow to this length, not for `seq_lens`, and without
            shared prefixes: the launches are right, then, for any values in `on_device`, as a captured graph wants.
        alike: the same step in other KV cache groups; what they have planned holds for this one, too, where prefixes
            are shared alike.
        upload: arrays that change no more → tensors on `device`; by default by copies that are waited for.

    Attributes:
        slots: `slot_mapping` on the device, as what writes K/V wants it.

    Raises:
        ValueError: `visible_to` is not like that.
    """

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray
    block_size: int
    dtype: torch.dtype
    device: torch.device
    visible_to: np.ndarray | None = None
    planned_seq_len: int | None = None
    alike: Sequence[AttentionMetadata] = ()
    upload: Upload | None = None
    slots: SlotMapping = field(init=False)
    _tiles: dict[int | None, list[AttentionTile]] = field(init=False, default_factory=dict, repr=False)
    _on_device: DeviceBatch | None = field(init=False, default=None, repr=False)
    _plans: dict[tuple[LayerHeads, int | None], DevicePlan] = field(init=False, default_factory=dict, repr=False)
    _cpu_batches: dict[tuple[LayerHeads, int | None], AttentionBatch] = field(
        init=False, default_factory=dict, repr=False
    )

    def __post_init__(self) -> None:
        self.slots = SlotMapping(self._to_device(self.slot_mapping))
        if self.visible_to is not None:
            self._check_visible_to(self.visible_to)

    def _check_visible_to(self, visible_to: np.ndarray) -> None:
        query_lens = np.diff(self.query_start_loc)
        ends = np.repeat(self.seq_lens, query_lens)
        own_ends = ends - np.repeat(self.query_start_loc[1:], query_lens) + np.arange(1, len(ends) + 1)
        starts_request = np.isin(np.arange(1, len(ends)), self.query_start_loc)
        if (
            visible_to.shape != ends.shape
            or ((visible_to < own_ends) | (visible_to > ends)).any()
            or ((np.diff(visible_to) < 0) & ~starts_request).any()
        ):
            raise ValueError(
                "visible_to: a token sees at least itself, what those before it see, and no more than there is"
            )

    @property
    def on_device(self) -> DeviceBatch:
        """What kernels read of the batch; copied once."""
        if self._on_device is None:
            self._on_device = batch_to_device(
                self.query_start_loc, self.seq_lens, self.block_tables, self.visible_to, self._upload
            )
        return self._on_device

    def plan(self, heads: LayerHeads, sliding_window: int | None) -> DevicePlan:
        """What kernels do in layers with such heads that see `sliding_window` tokens back; planned once."""
        key = heads, sliding_window
        if key not in self._plans:
            planned = (other._plans[key] for other in self.alike if key in other._plans)
            plan = next((p for p in planned if are_shared(p.prefixes, self.block_tables, self.block_size)), None)
            self._plans[key] = self._plan(heads, sliding_window) if plan is None else plan
        return self._plans[key]

    def _plan(self, heads: LayerHeads, sliding_window: int | None) -> DevicePlan:
        length = self.planned_seq_len
        plan = plan_attention(
            self.query_start_loc,
            self.seq_lens if length is None else np.full_like(self.seq_lens, length),
            self.block_tables if length is None else None,
            self.block_size,
            heads,
            plan_limits(self.device),
            sliding_window=sliding_window,
            visible_to=self.visible_to if length is None else None,
        )
        return plan_to_device(plan, self._upload)

    def cpu_batch(self, heads: LayerHeads, sliding_window: int | None) -> AttentionBatch:
        """The same for the kernel in C, and for as many threads as torch has."""
        key = heads, sliding_window
        if key not in self._cpu_batches:
            planned = (other._cpu_batches[key] for other in self.alike if key in other._cpu_batches)
            batch = next(filter(None, (each.in_tables(self.block_tables) for each in planned)), None)
            if batch is None:
                batch = plan_batch(
                    *(self.query_start_loc, self.seq_lens, self.block_tables, self.block_size, heads),
                    sliding_window=sliding_window,
                    visible_to=self.visible_to,
                    num_threads=torch.get_num_threads(),
                )
            self._cpu_batches[key] = batch
        return self._cpu_batches[key]

    def tiles(self, sliding_window: int | None) -> list[AttentionTile]:
        """Tiles that cover the batch for layers that see `sliding_window` tokens back, the token itself included."""
        if sliding_window not in self._tiles:
            self._tiles[sliding_window] = [*self._prefill_tiles(sliding_window), *self._decode_tiles(sliding_window)]
        return self._tiles[sliding_window]

    def _prefill_tiles(self, window: int | None) -> Iterator[AttentionTile]:
        query_lens = np.diff(self.query_start_loc)
        for request in np.flatnonzero(query_lens > 1).tolist():
            row, end_row = int(self.query_start_loc[request]), int(self.query_start_loc[request + 1])
            position = int(self.seq_lens[request]) - (end_row - row)
            while row < end_row:
                num_queries = self._tile_queries(row, end_row, position)
                yield self._prefill_tile(request, row, position, num_queries, window)
                row += num_queries
                position += num_queries

    def _tile_queries(self, row: int, end_row: int, position: int) -> int:
        """How many tokens from `row`, at `position`, make a tile: those that see each other share one."""
        longest = min(_MAX_TILE_QUERIES, end_row - row)
        if self.visible_to is None:
            return longest
        seen = self.visible_to[row:end_row] - position
        possible = np.flatnonzero(seen == np.arange(1, len(seen) + 1)) + 1
        # Those that are not too long, or else the shortest.
        return int(possible[max(0, int(np.count_nonzero(possible <= longest)) - 1)])

    def _prefill_tile(self, request: int, row: int, start: int, num_queries: int, window: int | None) -> AttentionTile:
        end = start + num_queries
        first_key = 0 if window is None else max(0, start - window + 1)
        keys = np.arange(first_key, end)
        query_ends = None
        if self.visible_to is not None:
            visible_to = self.visible_to[row : row + num_queries]
            if (visible_to > np.arange(start + 1, end + 1)).any():
                query_ends = torch.from_numpy((visible_to - first_key).astype(np.int64))
        return AttentionTile(
            rows=slice(row, row + num_queries),
            num_requests=1,
            num_queries=num_queries,
            num_keys=len(keys),
            key_slots=self._to_device(self._slots(np.array([request]), keys[None, :])),
            key_counts=torch.tensor([len(keys)]),
            sliding_window=window,
            dtype=self.dtype,
            query_ends=query_ends,
        )

    def _decode_tiles(self, window: int | None) -> Iterator[AttentionTile]:
        requests = np.flatnonzero(np.diff(self.query_start_loc) == 1)
        num_keys = self.seq_lens[requests] if window is None else np.minimum(self.seq_lens[requests], window)
        order = np.argsort(-num_keys, kind="stable")
        requests, num_keys = requests[order], num_keys[order]
        begin = 0
        while begin < len(requests):
            longest = int(num_keys[begin])
            shortest = min(longest * (1 - _MAX_PADDING_SHARE), longest - _FREE_PADDING_TOKENS)
            similar = int(np.count_nonzero(num_keys[begin:] >= shortest))
            end = begin + max(1, min(similar, _MAX_TILE_KEYS // longest))
            # In the batch's order again, so that neighbours in the batch are neighbours in the tile.
            in_batch_order = begin + np.argsort(requests[begin:end])
            yield self._decode_tile(requests[in_batch_order], num_keys[in_batch_order], window)
            begin = end

    def _decode_tile(self, requests: np.ndarray, num_keys: np.ndarray, window: int | None) -> AttentionTile:
        longest = int(num_keys.max())
        first_keys = self.seq_lens[requests] - num_keys
        offsets = np.arange(longest)[None, :]
        keys = first_keys[:, None] + np.where(offsets < num_keys[:, None], offsets, 0)
        return AttentionTile(
            rows=self._rows(self.query_start_loc[requests]),
            num_requests=len(requests),
            num_queries=1,
            num_keys=longest,
            key_slots=self._to_device(self._slots(requests, keys)),
            key_counts=torch.from_numpy(num_keys.astype(np.int64)),
            sliding_window=window,
            dtype=self.dtype,
        )

    def _rows(self, places: np.ndarray) -> slice | torch.Tensor:
        """Ascending `places` as an index; as a slice, which copies nothing, where they are neighbours."""
        first, last = int(places[0]), int(places[-1])
        return slice(first, last + 1) if last - first == len(places) - 1 else self._to_device(places)

    def _slots(self, requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Cache slots of `positions` `[len(requests), num_keys]`."""
        blocks = self.block_tables[requests[:, None], positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return self._upload(np.ascontiguousarray(values, dtype=np.int64))[0]

    def _upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        if self.upload is not None:
            return self.upload(*arrays)
        return [torch.from_numpy(array).to(self.device) for array in arrays]


def replayable_decode(
    block_tables: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, block_size: int, dtype: torch.dtype
) -> AttentionMetadata:
    """Of a step of one token per request, whose numbers kernels read from these tensors whenever they run: what is
    launched with it, and captured, is right for whatever the tensors hold by then. Only for Triton.

    Args:
        block_tables: int32 `[num_requests, max_blocks]`, contiguous rows.
        positions: int32 `[num_requests]`; of a request at −1 nothing is read, and its output is 0.
        slots: int64 `[num_requests]`; −1 stores nothing.
    """
    num_requests, max_blocks = block_tables.shape
    metadata = AttentionMetadata(
        query_start_loc=np.arange(num_requests + 1),
        seq_lens=np.ones(num_requests, dtype=np.int64),
        block_tables=np.zeros((num_requests, 1), dtype=np.int64),
        slot_mapping=np.full(num_requests, -1),
        block_size=block_size,
        dtype=dtype,
        device=block_tables.device,
        planned_seq_len=max_blocks * block_size,
    )
    metadata.slots = SlotMapping(slots)
    metadata._on_device = DeviceBatch(block_tables, positions, None)
    return metadata
