"""What moves keys and values: into the paged cache, rotated or not, and blocks from place to place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from benchmarks.gpu_check.case import Case, Goal, Setting, Work, apart, from_torch, in_torch, tensor_bytes
from kernels.copy_blocks import block_bytes, copy_blocks, copy_slots, gather_blocks, scatter_blocks
from kernels.quantize_kv import LARGEST, SCALE_DTYPE, KVScales
from kernels.rotary import rotary
from kernels.rotary_write_kv import rotary_write_kv
from kernels.slot_mapping import SlotMapping
from kernels.write_kv import write_kv

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class _Pool:
    keys: torch.Tensor
    values: torch.Tensor
    scales: KVScales | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Codes as bytes: one that is not the right one is wrong."""
        if self.scales is None:
            return [self.keys, self.values]
        return [self.keys.view(torch.uint8), self.values.view(torch.uint8), *self.scales]


@dataclass(frozen=True, slots=True)
class _Step:
    """Queries, keys and values of some tokens, and their slots in a pool of more blocks than they need.

    With `codes` the pool is quantized.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: SlotMapping
    num_blocks: int
    codes: torch.dtype | None = None

    def empty_pool(self) -> _Pool:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(self.num_blocks, _BLOCK_SIZE, *shape, dtype=dtype, device=self.key.device)

        states = self.key, self.value
        caches = [zeros(*those.shape[1:], dtype=self.codes or those.dtype) for those in states]
        scales = [zeros(those.shape[1], dtype=SCALE_DTYPE) for those in states]
        return _Pool(*caches, None if self.codes is None else KVScales(*scales))

    def write(self, pool: _Pool) -> None:
        write_kv(self.key, self.value, pool.keys, pool.values, self.slots, pool.scales)

    def written(self) -> list[torch.Tensor]:
        pool = self.empty_pool()
        self.write(pool)
        return pool.tensors

    def turned(self, interleaved: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary(self.query, self.key, self.cos, self.sin, interleaved=interleaved)

    def turned_and_written(self, pool: _Pool) -> torch.Tensor:
        states = self.query, self.key, self.value, self.cos, self.sin
        return rotary_write_kv(*states, pool.keys, pool.values, self.slots, pool.scales)


def _step(
    setting: Setting,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_pairs: int | None = None,
    skips: bool = False,
    codes: torch.dtype | None = None,
) -> _Step:
    num_blocks = -(-num_tokens // _BLOCK_SIZE) + 3
    slots = torch.randperm(num_blocks * _BLOCK_SIZE, device=setting.device)[:num_tokens]
    if skips:
        slots[::3] = -1
    angles = setting.normal(num_tokens, num_pairs or head_dim // 2, dtype=torch.float32)
    return _Step(
        setting.normal(num_tokens, num_heads, head_dim, dtype=dtype),
        setting.normal(num_tokens, num_kv_heads, head_dim, dtype=dtype),
        setting.normal(num_tokens, num_kv_heads, head_dim, dtype=dtype),
        angles.cos().to(dtype),
        angles.sin().to(dtype),
        SlotMapping(slots),
        num_blocks,
        codes,
    )


def _small_steps(setting: Setting, *codes: torch.dtype) -> Iterator[_Step]:
    all_sizes = [(7, 3, 1, 80), (1, 1, 1, 2), (33, 9, 3, 64), (5, 8, 8, 256)]
    for sizes, dtype, those in product(
        all_sizes[: 1 if setting.is_rehearsal else None], setting.dtypes, codes or [None]
    ):
        yield _step(setting, *sizes, dtype=dtype, skips=True, codes=those)


def _sizes(setting: Setting) -> list[tuple[int, int, int, int]]:
    """Tokens, heads, KV heads and head_dim of what is timed: a decode and a prefill."""
    return [(3, 3, 1, 32)] if setting.is_rehearsal else [(64, 32, 8, 128), (8192, 32, 8, 128)]


def write_kv_cases(setting: Setting) -> Iterator[Case]:
    def check(*codes: torch.dtype) -> float:
        return max(from_torch(step.written) for step in _small_steps(setting, *codes))

    yield Case("odd sizes, slot −1, all types", lambda: Work(check))
    yield Case("the same as codes", lambda: Work(partial(check, *LARGEST)))
    for sizes in _sizes(setting):
        yield Case(f"{sizes[0]} tokens × {sizes[2]} × {sizes[3]}", partial(_write, setting, sizes))
    for codes in LARGEST:
        sizes = _sizes(setting)[-1]
        name = f"{sizes[0]} tokens × {sizes[2]} × {sizes[3]} as {codes}"
        yield Case(name, partial(_write_codes, setting, sizes, codes))


def _write_codes(setting: Setting, sizes: tuple[int, int, int, int], codes: torch.dtype) -> Work:
    step = _step(setting, *sizes, codes=codes)
    pool = step.empty_pool()
    # A byte for each value, and scales.
    written = (step.key.numel() + step.value.numel()) + 2 * step.key[..., 0].numel() * SCALE_DTYPE.itemsize
    return Work(
        lambda: from_torch(step.written),
        run=lambda: step.write(pool),
        beside=in_torch(lambda: step.write(pool)),
        moved_bytes=tensor_bytes(step.key, step.value) + written,
    )


def _write(setting: Setting, sizes: tuple[int, int, int, int]) -> Work:
    step = _step(setting, *sizes)
    pool = step.empty_pool()
    flat = [cache.flatten(0, 1) for cache in pool.tensors]

    def by_index_copy() -> None:
        for cache, states in zip(flat, (step.key, step.value), strict=True):
            cache.index_copy_(0, step.slots.tensor, states)

    return Work(
        lambda: from_torch(step.written),
        run=lambda: step.write(pool),
        beside=by_index_copy,
        moved_bytes=2 * tensor_bytes(step.key, step.value),
        # A decode's few bytes take as long as a launch.
        goal=Goal(min_roofline_share=0.8) if len(step.key) > 1024 else None,
    )


def rotary_cases(setting: Setting) -> Iterator[Case]:
    def check() -> float:
        partial = [_step(setting, 7, 3, 1, 80, dtype=dtype, num_pairs=12) for dtype in setting.dtypes]
        return max(
            from_torch(lambda step=step, interleaved=interleaved: step.turned(interleaved))
            for step in (*_small_steps(setting), *partial)
            for interleaved in (False, True)
        )

    yield Case("odd sizes, both pairings, all types", lambda: Work(check))
    for sizes in _sizes(setting):
        name = f"{sizes[0]} tokens × {sizes[1]} + {sizes[2]} heads"
        yield Case(name, partial(_rotary, setting, sizes))


def _rotary(setting: Setting, sizes: tuple[int, int, int, int]) -> Work:
    step = _step(setting, *sizes)
    return Work(
        lambda: from_torch(step.turned),
        run=step.turned,
        beside=in_torch(step.turned),
        moved_bytes=2 * tensor_bytes(step.query, step.key) + tensor_bytes(step.cos, step.sin),
    )


def rotary_write_kv_cases(setting: Setting) -> Iterator[Case]:
    def check() -> float:
        return max(map(_check_turned_and_written, _small_steps(setting)))

    def check_codes() -> float:
        return max(map(_check_turned_codes, _small_steps(setting, *LARGEST)))

    yield Case("odd sizes, slot −1, all types", lambda: Work(check))
    yield Case("the same as codes", lambda: Work(check_codes))
    for sizes in _sizes(setting):
        name = f"{sizes[0]} tokens × {sizes[1]} + {sizes[2]} heads"
        yield Case(name, partial(_rotary_write, setting, sizes))


def _check_turned_and_written(step: _Step) -> float:
    def compute() -> list[torch.Tensor]:
        pool = step.empty_pool()
        return [step.turned_and_written(pool), *pool.tensors]

    return from_torch(compute)


def _check_turned_codes(step: _Step) -> float:
    """Beside what is rotated first: one code in a hundred may be another, where rotating rounded otherwise."""
    actual, expected = step.empty_pool(), step.empty_pool()
    query = step.turned_and_written(actual)
    turned_query, turned_key = step.turned()
    replace(step, key=turned_key).write(expected)
    codes, scales = (
        [*zip(actual.tensors[part], expected.tensors[part], strict=True)] for part in (slice(0, 2), slice(2, 4))
    )
    others = max((ours != theirs).float().mean().item() for ours, theirs in codes)
    return max(100 * others, apart(query, turned_query), *(apart(*pair) for pair in scales))


def _rotary_write(setting: Setting, sizes: tuple[int, int, int, int]) -> Work:
    step = _step(setting, *sizes)
    pool = step.empty_pool()
    return Work(
        lambda: _check_turned_and_written(step),
        run=lambda: step.turned_and_written(pool),
        beside=in_torch(lambda: step.turned_and_written(pool)),
        moved_bytes=2 * tensor_bytes(step.query, step.key, step.value) + tensor_bytes(step.cos, step.sin),
    )


def copy_blocks_cases(setting: Setting) -> Iterator[Case]:
    yield Case("circles, parts, odd sizes, buffers", lambda: Work(lambda: _check_copies(setting)))
    num_layers, num_blocks = (2, 3) if setting.is_rehearsal else (32, 128)
    what = f"{num_blocks} blocks of {2 * num_layers} caches"
    yield Case(f"{what}, within the pool", partial(_copy, setting, num_layers, num_blocks))
    yield Case(f"{what}, to pinned memory", partial(_gather, setting, num_layers, num_blocks))


def _pool(setting: Setting, num_layers: int, num_blocks: int, heads: int, head_dim: int) -> list[torch.Tensor]:
    return [setting.normal(num_blocks, _BLOCK_SIZE, heads, head_dim) for _ in range(2 * num_layers)]


def _host_buffer(setting: Setting, num_rows: int, row_bytes: int) -> torch.Tensor:
    return torch.zeros(num_rows, row_bytes, dtype=torch.uint8, pin_memory=setting.device.type == "cuda")


def _wait(setting: Setting) -> None:
    """What was copied to the host is there when the device has come this far."""
    if setting.device.type == "cuda":
        torch.cuda.synchronize()


def _check_copies(setting: Setting) -> float:
    worst = 0.0
    for heads, head_dim in ((1, 3), (2, 64), (3, 80)):
        pool = _pool(setting, 2, 12, heads, head_dim)
        # And codes with their scales.
        pool += [(pool[0] * 10).to(torch.int8), pool[1].float()[..., 0].contiguous()]

        def compute(pool: list[torch.Tensor] = pool) -> list[torch.Tensor]:
            caches = [cache.clone() for cache in pool]
            on_host = _host_buffer(setting, 2, block_bytes(caches))
            on_device = torch.zeros_like(on_host, device=setting.device)
            copy_blocks(caches, [0, 1, 2, 3], [1, 2, 0, 9])
            copy_slots(caches, [4, 5], [10, 4], [_BLOCK_SIZE - 3, 1])
            for buffer, targets in ((on_host, [7, 6]), (on_device, [8, 11])):
                gather_blocks(caches, [9, 4], buffer)
                _wait(setting)
                scatter_blocks(buffer, targets, caches)
            return [*caches, on_host, on_device]

        worst = max(worst, from_torch(compute))
    return worst


def _copy(setting: Setting, num_layers: int, num_blocks: int) -> Work:
    pool = _pool(setting, num_layers, 2 * num_blocks, 8, 128)
    ids = random.sample(range(2 * num_blocks), 2 * num_blocks)
    sources, targets = ids[:num_blocks], ids[num_blocks:]
    read, written = (torch.tensor(those, device=setting.device) for those in (sources, targets))

    def check() -> float:
        copy_blocks(pool, sources, targets)
        return max(apart(cache[written], cache[read]) for cache in pool)

    return Work(
        check,
        run=lambda: copy_blocks(pool, sources, targets),
        beside=in_torch(lambda: copy_blocks(pool, sources, targets)),
        moved_bytes=2 * num_blocks * block_bytes(pool),
    )


def _gather(setting: Setting, num_layers: int, num_blocks: int) -> Work:
    pool = _pool(setting, num_layers, 2 * num_blocks, 8, 128)
    ids = random.sample(range(2 * num_blocks), num_blocks)
    buffer, target = (_host_buffer(setting, num_blocks, block_bytes(pool)) for _ in range(2))
    on_device = buffer.to(setting.device)

    def check() -> float:
        gather_blocks(pool, ids, buffer)
        _wait(setting)
        rows = (torch.cat([cache[block].flatten().view(torch.uint8) for cache in pool]).cpu() for block in ids)
        return max(map(apart, buffer, rows))

    # Beside one copy of all of it at once: what the bus can do, which the roofline does not know.
    return Work(
        check,
        run=lambda: gather_blocks(pool, ids, buffer),
        beside=lambda: target.copy_(on_device, non_blocking=True),
    )
