"""Graphs of decode steps: every launch of the model captured once, and then replayed by a single call.

A decode of a few requests is hundreds of kernels of microseconds each, which the host cannot launch as fast as the
device computes them. A graph launches them all, but always the same ones, on the same memory. So a step is computed in
a fixed number of rows, of which the last stand for nobody, and its numbers are written to tensors that the graph reads:
per row the token, its position and its slots, and the block tables. The kernels need to know nothing else; how many of
them share the keys of a request does not depend on its length (`AttentionMetadata.planned_seq_len`).

Graphs share these tensors and their memory, and are captured from the largest to the smallest, whose activations fit
into what the larger ones have taken. Sampling stays outside: it differs from step to step, and is a few launches.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from engine_core.config import EngineConfig
from engine_core.runner import ScheduledRequest
from kernels.attention_metadata import AttentionMetadata, replayable_decode
from kernels.lora_batch import ReplayedLoraBatch

from .attention import PagedKV
from .device_queue import CapturedGraph, DeviceQueue
from .input_batch import SampledTokens, StepLayout
from .kv_pool import KVPool
from .lora.adapter_rows import AdapterRows
from .probe import disagreement, tolerance
from .progress import with_progress
from .staging import Staging

logger = logging.getLogger(__name__)

# Rows of a step's numbers. The third are positions as attention has them, where rows that stand for nobody see nothing;
# from the fourth on, slots in each KV cache group.
_IDS, _POSITIONS, _SEEN_TO, _SLOTS = range(4)
_NOWHERE = -1
_NO_ADAPTER = -1


class GraphError(Exception):
    """The model cannot be captured, or a replay computes something else."""


def capture_sizes(config: EngineConfig) -> list[int]:
    """How many rows the graphs have, ascending; no step has more requests than the last.

    By default every size that is not much larger than the one before.
    """
    largest = min(config.max_num_seqs, config.max_num_batched_tokens)
    wanted: Iterable[int] = (1, 2, 4, *range(8, 256, 8), *range(256, largest, 16), largest)
    if config.cudagraph_capture_sizes is not None:
        wanted = config.cudagraph_capture_sizes
    return sorted({size for size in wanted if size <= largest})


def is_plain_decode(batch: Sequence[ScheduledRequest]) -> bool:
    """Whether each request has one token to compute, which stands for no picture, and samples what follows it."""
    return all(
        item.num_tokens == 1
        and item.samples
        and item.start >= item.request.features_end
        and item.request.prompt_logprobs is None
        for item in batch
    )


class DecodeGraphs:
    """The graphs of one model on one KV pool.

    Args:
        model: called for the logits of every row.
        sizes: of how many rows, ascending.
        max_blocks: the longest block table.
        adapter_rows: what the model's layers look at; then the graphs are for steps in which some rows have adapters.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        queue: DeviceQueue,
        pool: KVPool,
        *,
        sizes: Sequence[int],
        max_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        adapter_rows: AdapterRows | None = None,
    ) -> None:
        self._model = model
        self._queue = queue
        self._adapter_rows = adapter_rows
        self.sizes = list(sizes)
        self._pool = pool
        # Rows begin at multiples of 64 bytes.
        width = -(-max_blocks // 16) * 16
        self._block_tables = torch.zeros(pool.num_groups, sizes[-1], width, dtype=torch.int32, device=queue.device)
        self._inputs = {size: _Inputs(self._block_tables[:, :size], block_size, dtype) for size in sizes}
        self._graphs: dict[int, CapturedGraph] = {}
        self._adapters: dict[int, ReplayedLoraBatch] = {}
        if adapter_rows is not None:
            self._adapters = {size: ReplayedLoraBatch(size, queue.device) for size in sizes}

    def capture(self, size: int) -> None:
        """Make the graph of `size` rows.

        Raises:
            GraphError: the model does what cannot be captured.
        """
        try:
            self._graphs[size] = self._queue.capture(lambda: self._compute(size))
        except RuntimeError as error:
            raise GraphError(f"{type(error).__name__}: {error}") from error

    def check(self, size: int) -> None:
        """Replay a graph with other numbers than it was captured with. Writes to the first `size` blocks of the pool,
        or to all of them.

        Raises:
            GraphError: the logits are not the model's.
        """
        num_blocks, block_size = self._pool.tensors[0].shape[:2]
        for cache in self._pool.caches.values():
            cache.fill_with_noise(size)
        generator = np.random.default_rng(0)
        blocks = np.arange(size) % num_blocks
        ids, positions = generator.integers(2, 100, size=size), generator.integers(block_size, size=size)
        # Two rows of one block would race for its slots.
        slots = np.where(np.arange(size) < num_blocks, blocks * block_size + positions, _NOWHERE)
        inputs = self._inputs[size]
        numbers = [ids, positions, positions, *[slots] * len(self._block_tables)]
        inputs.numbers.copy_(torch.from_numpy(np.stack(numbers)))
        inputs.positions.copy_(inputs.numbers[_SEEN_TO])
        self._block_tables[:, :size] = torch.from_numpy(blocks).to(self._block_tables)[:, None]
        expected = self._compute(size).clone()
        graph = self._graphs[size]
        graph.replay()
        changed = disagreement(expected, graph.output)
        # Written so that NaN is a difference.
        if not changed <= tolerance(expected.dtype):
            raise GraphError(f"logits of {size} rows differ by {changed:.1%} of their spread when they are replayed")

    def have_room_for(self, num_requests: int) -> bool:
        return num_requests <= self.sizes[-1]

    def logits(
        self,
        layout: StepLayout,
        sampled: SampledTokens | None,
        staging: Staging,
        adapter_slots: np.ndarray | None = None,
    ) -> torch.Tensor:
        """`[num_requests, vocab_size]` of a plain decode, whose K/V is written; overwritten by the next one.

        `adapter_slots` `[num_requests]` are the requests' adapters, −1 without one, for graphs that have some.
        """
        num_groups, num_requests, num_blocks = layout.block_tables.shape
        size = self.sizes[bisect_left(self.sizes, num_requests)]
        inputs = self._inputs[size]
        numbers = np.zeros((_SLOTS + num_groups, size), dtype=np.int64)
        numbers[_SEEN_TO:, num_requests:] = _NOWHERE
        numbers[:, :num_requests] = layout.ids, layout.positions, layout.positions, *layout.slots
        staging.upload_into(inputs.numbers, numbers)
        staging.upload_into(self._block_tables[:, :num_requests, :num_blocks], layout.block_tables.astype(np.int32))
        inputs.positions.copy_(inputs.numbers[_SEEN_TO])
        if sampled is not None:
            ids = inputs.numbers[_IDS, :num_requests]
            ids.copy_(sampled.tokens.index_select(0, ids))
        if adapter_slots is not None:
            adapters = self._adapters[size]
            slots = np.pad(adapter_slots, (0, size - num_requests), constant_values=_NO_ADAPTER)
            staging.upload_into(adapters.numbers, adapters.numbers_for(slots))
        graph = self._graphs[size]
        graph.replay()
        return graph.output[:num_requests]

    def _compute(self, size: int) -> torch.Tensor:
        inputs = self._inputs[size]
        ids, positions, *_ = inputs.numbers
        with self._adapted(size):
            return self._model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=inputs.rows,
                layer_kv=PagedKV(self._pool, inputs.metadata),
            ).logits[0]

    def _adapted(self, size: int) -> AbstractContextManager[None]:
        if self._adapter_rows is None:
            return nullcontext()
        batch = self._adapters[size].batch
        # All of a decode's tokens have logits, in their order.
        return self._adapter_rows.of_step(batch, batch)


@torch.inference_mode()
def capture_all(graphs: DecodeGraphs) -> bool:
    """Capture every size, try the smallest and the largest. False, with a warning, if the model cannot be captured."""
    started_s = time.monotonic()
    try:
        for size in with_progress(graphs.sizes[::-1], "Capturing decodes", shown=sys.stderr.isatty()):
            graphs.capture(size)
        for size in {graphs.sizes[0], graphs.sizes[-1]}:
            graphs.check(size)
    except GraphError as error:
        logger.warning("graphs_skipped reason=%r", str(error))
        return False
    seconds = time.monotonic() - started_s
    logger.info("graphs_captured sizes=%d largest=%d capture_s=%.1f", len(graphs.sizes), graphs.sizes[-1], seconds)
    return True


@torch.inference_mode()
def measure_all(graphs: DecodeGraphs, device: torch.device) -> int:
    """Bytes of CUDA memory that capturing every size takes. Captures the two largest: the second finds the activations
    of the first in their common memory, and so does each of the others.
    """
    torch.cuda.empty_cache()
    free_bytes = [torch.cuda.mem_get_info(device)[0]]
    try:
        for size in graphs.sizes[:-3:-1]:
            graphs.capture(size)
            free_bytes.append(torch.cuda.mem_get_info(device)[0])
    except GraphError:
        return 0  # as `capture_all` will find out
    used_bytes = [before - after for before, after in itertools.pairwise(free_bytes)]
    return used_bytes[0] + used_bytes[-1] * (len(graphs.sizes) - 1)


class _Inputs:
    """What the graph of one size reads. `numbers` are contiguous, so that one copy fills them; kernels want `positions`
    in int32. `block_tables` `[num_groups, size, max_blocks]`.
    """

    def __init__(self, block_tables: torch.Tensor, block_size: int, dtype: torch.dtype) -> None:
        (num_groups, size, _), device = block_tables.shape, block_tables.device
        self.numbers = torch.zeros(_SLOTS + num_groups, size, dtype=torch.int64, device=device)
        self.numbers[_SLOTS:] = _NOWHERE
        self.positions = torch.full((size,), _NOWHERE, dtype=torch.int32, device=device)
        self.rows = torch.arange(size, device=device)
        self.metadata: list[AttentionMetadata] = [
            replayable_decode(tables, self.positions, slots, block_size, dtype)
            for tables, slots in zip(block_tables, self.numbers[_SLOTS:], strict=True)
        ]
