"""Codes and scales of keys and values are what `kernels.quantize_kv` says, to the bit, whoever makes them."""

from __future__ import annotations

import pytest
import torch

from kernels import attention as kernel
from kernels import attention_batch, dispatch, write_kv
from kernels.attention_tiles import LayerHeads
from kernels.quantize_kv import LARGEST, KVScales, dequantize, quantize
from kernels.slot_mapping import SlotMapping

from .libraries import each_library
from .paged_batch import make_batch
from .tensors import fresh

INT8, FP8 = torch.int8, torch.float8_e4m3fn

dtype = each_library(dispatch, kernel, attention_batch, autouse=False)
pytestmark = pytest.mark.usefixtures("inference")


def numbers(kv_dtype: torch.dtype) -> torch.Tensor:
    """What codes can stand for at a scale of 1, in order."""
    if kv_dtype == INT8:
        return torch.arange(-127.0, 128.0, dtype=torch.float64)
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    return codes[codes.isfinite()].unique()


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
def test_a_value_becomes_the_nearest_code(kv_dtype: torch.dtype) -> None:
    x = fresh(50, 3, 40)
    codes, scales = quantize(x, kv_dtype)
    assert torch.equal(scales, x.abs().amax(dim=-1) / LARGEST[kv_dtype]) and codes.dtype == kv_dtype
    wanted = (x / scales[..., None]).double()
    nearest = (wanted[..., None] - numbers(kv_dtype)).abs().amin(dim=-1)
    assert torch.equal((codes.double() - wanted).abs(), nearest)
    # The largest is met but for the rounding of two operations.
    ends = x.abs().amax(dim=-1)
    torch.testing.assert_close(dequantize(codes, scales, torch.float32).abs().amax(dim=-1), ends, rtol=2e-7, atol=0)


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
def test_halfway_goes_to_the_even_code(kv_dtype: torch.dtype) -> None:
    places = numbers(kv_dtype)
    between = (places[:-1] + places[1:]) / 2
    codes, scales = quantize(torch.cat([between, places[-1:]]).float(), kv_dtype)
    assert scales == 1
    codes = codes[:-1]
    assert ((codes.double() == places[:-1]) | (codes.double() == places[1:])).all()
    assert (codes.view(torch.uint8) % 2 == 0).all()


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
def test_what_has_no_scale(kv_dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -0.0, 0.0], [1e-45, 0.0, -1e-45], [1.0, float("nan"), 2.0], [float("-inf"), 1.0, 2.0]])
    codes, scales = quantize(x, kv_dtype)
    assert scales[:2].tolist() == [0, 0] and (codes[:2].double() == 0).all()
    assert not scales[2:].isfinite().any()
    assert not dequantize(codes, scales, torch.float32)[2:].isfinite().any()


def hard_tokens(dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    """Of all sizes, with what lies between two codes, and what has no scale or hardly one."""
    sizes = 10.0 ** torch.arange(-44, 38, 2.0)
    x = fresh(len(sizes) * 4, 3, head_dim) * sizes.repeat(4)[:, None, None]
    places = torch.cat([numbers(kv_dtype) for kv_dtype in LARGEST]).float()
    between = torch.cat([(places[:-1] + places[1:]) / 2, places])
    ties = between[torch.randint(len(between), (40, 3, head_dim))]
    ties[:20, :, 0], ties[20:, :, 0] = 127, 448
    # What is subnormal may be flushed to zero by a processor that was told so.
    x = torch.cat([x[x.abs().amax(dim=(1, 2)) > 1e-30], ties, torch.zeros(1, 3, head_dim)])
    return x.to(dtype)


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (33, 7), (1, 128)], ids=str)
def test_c_writes_the_same_bits(dtype: torch.dtype, kv_dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
    key, value = (hard_tokens(dtype, head_dim) for head_dim in head_dims)
    slots = torch.randperm(len(key) + 50)[: len(key)]
    slots[3] = -1
    shape = (len(key) + 50) // 2 + 1, 2, 3
    both = []
    for computed_in_c in (True, False):
        caches = [torch.zeros(*shape, head_dim, dtype=torch.uint8).view(kv_dtype) for head_dim in head_dims]
        scales = KVScales(*(torch.full(shape, -1.0) for _ in head_dims))
        if computed_in_c:
            write_kv.write_kv(key, value, *caches, SlotMapping(slots), scales)
        else:
            flat = [write_kv.flat_slots(cache) for cache in caches]
            write_kv.reference(key, value, *flat, SlotMapping(slots), write_kv.flat_scales(scales))
        both.append([*(cache.view(torch.uint8) for cache in caches), *scales])
    for ours, theirs in zip(*both, strict=True):
        assert torch.equal(ours, theirs)
    written = (both[0][2] != -1).flatten(0, 1).any(dim=1).nonzero().flatten()
    assert torch.equal(written, slots[slots >= 0].sort().values)


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
@pytest.mark.parametrize("value_dim", [256, 250])
def test_c_reads_every_code(dtype: torch.dtype, kv_dtype: torch.dtype, value_dim: int) -> None:
    """Attention to a single key is its value."""
    case = make_batch([(1, 1)], num_heads=1, num_kv_heads=1, value_dim=value_dim, dtype=dtype)
    codes = numbers(kv_dtype).to(kv_dtype)
    codes = codes[torch.randperm(len(codes))[:value_dim]]
    values = torch.zeros(*case.value_cache.shape, dtype=kv_dtype)
    block = case.block_tables[0][0]
    values[block, 0, 0, : len(codes)] = codes
    keys, key_scales = quantize(case.key_cache, kv_dtype)
    value_scales = torch.full_like(key_scales, 0.5)
    heads = LayerHeads(1, 1, keys.shape[-1], value_dim, dtype)
    batch = case.metadata.cpu_batch(heads, None)
    output = kernel.attention(case.query, keys, values, batch, KVScales(key_scales, value_scales), scaling=1.0)
    assert torch.equal(output[0, 0].float(), values[block, 0, 0].float() * 0.5)


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
def test_a_slot_depends_on_its_own_token_alone(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    key, value = fresh(40, 3, 64, dtype=dtype), fresh(40, 3, 64, dtype=dtype)

    def written(*parts: slice) -> list[torch.Tensor]:
        caches = [fresh(4, 16, 3, 64).to(kv_dtype) for _ in range(2)]
        scales = KVScales(fresh(4, 16, 3), fresh(4, 16, 3))
        for part in parts:
            slots = torch.arange(40)[part] + 7
            write_kv.write_kv(key[part], value[part], *caches, SlotMapping(slots), scales)
        return [x.flatten(0, 1)[7:47] for x in (*(cache.view(torch.uint8) for cache in caches), *scales)]

    together = written(slice(None))
    apart = written(slice(20, 40), slice(0, 1), slice(1, 3), slice(3, 20))
    assert all(map(torch.equal, together, apart))
