"""Decoder layers are what is written in `kernels.decoder_layers`, in every library that this CPU can use.

Which layers of a model they take the place of is `tests/model/test_fused_layers.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import attention as attention_kernel
from kernels import attention_batch, decoder_layers, write_kv
from kernels.attention import attention
from kernels.attention_batch import plan_batch
from kernels.decoder_layers import DecoderLayers, LayerScratch
from kernels.kv_cache import LayerCache
from kernels.layer_parts import Norm
from kernels.linear import pack_weight
from kernels.quantize_kv import LARGEST, KVScales, quantize
from kernels.slot_mapping import SlotMapping

from .libraries import each_library
from .paged_batch import make_batch
from .plain_layers import (
    KINDS,
    LLAMA,
    Plain,
    Step,
    assert_close,
    bits,
    exact_layer,
    make_layer,
    make_layers,
    make_step,
    stored_slots,
)
from .tensors import fresh

dtype = each_library(decoder_layers, attention_kernel, attention_batch)
pytestmark = pytest.mark.usefixtures("inference")


@pytest.mark.parametrize("name", KINDS)
def test_layers_are_what_is_written(dtype: torch.dtype, name: str) -> None:
    """Two in a call, and one token of a prefix that is cached whole: it is written nowhere."""
    check_layers(make_layers(KINDS[name], dtype), make_step(KINDS[name], dtype, nowhere=[9]))


def test_layers_of_several_groups_have_block_tables_of_their_own_in_one_memory(dtype: torch.dtype) -> None:
    kind = replace(KINDS["gemma3"], windows=(8, None))
    check_layers(make_layers(kind, dtype), make_step(kind, dtype, num_groups=2))


def check_layers(layers: list[Plain], step: Step) -> None:
    before, reference = step.copy(), step.copy()
    actual, y = step.computed(layers), step.x.double()
    for layer, case in zip(layers, reference.cases, strict=True):
        y = exact_layer(layer, y, reference, case)
    assert actual.dtype is step.x.dtype
    assert_close(actual, y)

    num_groups = 1 + max(step.groups)
    written = torch.cat([stored_slots(case) for case in step.cases[:num_groups]])
    memory = (each.caches[::num_groups] for each in (step, reference, before))
    for caches, of_reference, caches_before in zip(*memory, strict=True):
        for cache, expected, cache_before in zip(
            caches.tensors, of_reference.tensors, caches_before.tensors, strict=True
        ):
            flat, flat_expected, flat_before = (x.flatten(0, 1) for x in (cache, expected, cache_before))
            assert_close(flat[written].flatten(1), flat_expected[written].flatten(1))
            flat[written] = flat_before[written]
            assert torch.equal(bits(flat), bits(flat_before))


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2"])
def test_layers_in_one_call_are_those_one_by_one_and_each_part_by_part(dtype: torch.dtype, name: str) -> None:
    layers, step = make_layers(KINDS[name], dtype), make_step(KINDS[name], dtype)
    one_by_one, in_parts = step.copy(), step.copy()
    together, scratch = step.computed(layers), LayerScratch()
    x = y = step.x
    for layer, caches, case in zip(layers, one_by_one.caches, in_parts.cases, strict=True):
        single = DecoderLayers([layer.parts], scratch)
        single.use([caches], [0])
        [batch] = step.batches(single)
        slots = step.slots(single)
        x = single(x, step.angles, slots, [batch])

        queries, *new = single.before_attention(0, y, step.angles)
        for cache, values in zip((case.key_cache, case.value_cache), new, strict=True):
            cache.view(-1, *cache.shape[2:])[slots[0]] = values
        attended = attention(
            queries, case.key_cache, case.value_cache, batch, scaling=layer.scaling, **layer.kind.options
        )
        y = single.after_attention(0, y, attended)
    assert torch.equal(x, together) and torch.equal(y, together)


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "odd sizes", "sinks"])
def test_what_is_read_of_a_quantized_cache_was_written_as_codes(
    dtype: torch.dtype, name: str, kv_dtype: torch.dtype
) -> None:
    """Of the step's own tokens, too."""
    layers, step = make_layers(KINDS[name], dtype), make_step(KINDS[name], dtype)
    for place, case in enumerate(step.cases):
        (keys, key_scales), (values, value_scales) = (quantize(x, kv_dtype) for x in (case.key_cache, case.value_cache))
        scales = KVScales(key_scales, value_scales)
        step.cases[place] = replace(case, key_cache=keys, value_cache=values, scales=scales)
    in_parts = [replace(case, scales=KVScales(*(x.clone() for x in case.scales or ()))) for case in step.copy().cases]
    together, y = step.computed(layers), step.x
    for layer, case in zip(layers, in_parts, strict=True):
        single = DecoderLayers([layer.parts], LayerScratch())
        single.use([LayerCache(case.key_cache, case.value_cache, case.scales)], [0])
        [batch], caches = step.batches(single), (case.key_cache, case.value_cache)
        queries, *new = single.before_attention(0, y, step.angles)
        slots = SlotMapping(step.slots(single)[0])
        write_kv.reference(*new, *map(write_kv.flat_slots, caches), slots, write_kv.flat_scales(case.scales))
        options = {"scaling": layer.scaling, **layer.kind.options}
        y = single.after_attention(0, y, attention(queries, *caches, batch, case.scales, **options))
    assert y.isfinite().all() and torch.equal(y, together)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_any_number_of_threads_computes_the_same(dtype: torch.dtype, num_threads: int) -> None:
    kind = KINDS["gemma3"]
    layers, step = make_layers(kind, dtype), make_step(kind, dtype, [(70, 90), (1, 40), (1, 3)])
    again = step.copy()
    torch.set_num_threads(1)
    expected = step.computed(layers)
    torch.set_num_threads(num_threads)
    assert torch.equal(again.computed(layers), expected)


@pytest.mark.parametrize("name", ["gemma3", "olmo2"])
def test_but_for_attention_a_token_does_not_depend_on_others(dtype: torch.dtype, name: str) -> None:
    kind = KINDS[name]
    num_tokens = 41
    computing = DecoderLayers([make_layer(kind, None, dtype).parts], LayerScratch())
    step = make_step(kind, dtype, [(num_tokens, num_tokens)])
    attended = fresh(num_tokens, kind.num_heads, kind.head_dim, dtype=dtype)

    def parts_of(rows: slice) -> list[torch.Tensor]:
        angles = step.angles[0][:, rows], step.angles[1][:, rows]
        before = [heads.clone() for heads in computing.before_attention(0, step.x[rows], angles)]
        return [*before, computing.after_attention(0, step.x[rows], attended[rows])]

    alone = [parts_of(slice(row, row + 1)) for row in range(num_tokens)]
    for num_rows in (2, 9, 16, 17, num_tokens):
        together = parts_of(slice(num_tokens - num_rows, num_tokens))
        for part, rows in zip(together, zip(*alone[-num_rows:], strict=True), strict=True):
            assert torch.equal(part, torch.cat(rows))


def test_what_is_not_a_number_stays_in_its_request(dtype: torch.dtype) -> None:
    layers, step = make_layers(LLAMA, dtype), make_step(LLAMA, dtype)
    again = step.copy()
    expected = step.computed(layers)
    again.x = step.x.clone()
    again.x[3] = float("nan")  # the third of the second request's five
    actual = again.computed(layers)
    assert actual[3:6].isnan().all()
    actual[1:6] = expected[1:6]
    assert torch.equal(actual, expected)


def test_no_tokens_are_nothing_to_compute(dtype: torch.dtype) -> None:
    computing = DecoderLayers([make_layer(LLAMA, None, dtype).parts], LayerScratch())
    nothing = torch.empty(1, 0, 16)
    queries, keys, _ = computing.before_attention(0, torch.empty(0, 48, dtype=dtype), (nothing, nothing))
    assert (queries.shape, keys.shape) == ((0, 4, 16), (0, 2, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "qkv is 128 by 48"),
        ({"num_heads": 4, "num_kv_heads": 3, "qkv": (160, 48)}, "attention does not take"),
        ({"rotary_dim": 18}, "no rotation of 18 values"),
        ({"rotary_dim": 7}, "no rotation of 7 values"),
        ({"of_queries": Norm(torch.ones(17), 1e-5)}, r"of_queries is of 17 values"),
        ({"before_mlp": Norm(torch.ones(48).half(), 1e-5)}, r"before_mlp is of 48 values of torch.float16"),
        ({"down": (48, 81)}, r"down is 48 by 81"),
        ({"down": (47, 80)}, r"down is 47 by 80"),
    ],
)
def test_parts_that_do_not_fit_are_refused(dtype: torch.dtype, change: dict[str, Any], message: str) -> None:
    parts = make_layer(LLAMA, None, dtype).parts
    weights = {name: pack_weight(torch.ones(x, dtype=dtype)) for name, x in change.items() if isinstance(x, tuple)}
    with pytest.raises(ValueError, match=message):
        DecoderLayers([replace(parts, **change | weights)], LayerScratch())


def test_layers_that_do_not_follow_each_other_are_refused(dtype: torch.dtype) -> None:
    parts = make_layer(LLAMA, None, dtype).parts
    for other in (replace(LLAMA, intermediate_size=96), replace(LLAMA, rotary_dim=8)):
        with pytest.raises(ValueError, match="do not follow each other"):
            DecoderLayers([parts, make_layer(other, None, dtype).parts], LayerScratch())


def test_caches_that_are_others_are_refused(dtype: torch.dtype) -> None:
    computing = DecoderLayers([layer.parts for layer in make_layers(LLAMA, dtype)], LayerScratch())
    cache = torch.zeros(3, 16, 2, 16, dtype=dtype)
    for wrong in (cache.half(), cache[..., :15], cache[:, :8], cache.transpose(2, 3), cache[:, :, :1]):
        with pytest.raises(ValueError, match="is no cache for"):
            computing.use([LayerCache(cache, cache), LayerCache(cache, wrong)], [0, 0])
    with pytest.raises(ValueError, match="shorter"):
        computing.use([LayerCache(cache, cache)], [0])


def test_a_step_that_does_not_fit_is_refused(dtype: torch.dtype) -> None:
    """And what is refused writes nothing."""
    step = make_step(LLAMA, dtype)
    before = step.copy()
    computing = DecoderLayers([layer.parts for layer in make_layers(LLAMA, dtype)], LayerScratch())
    x, angles = step.x, step.angles
    with pytest.raises(ValueError, match=r"no caches in use"):
        computing(x, angles, [], [])
    computing.use(step.caches, step.groups)
    [slots], batches = step.slots(computing), step.batches(computing)
    coarse = make_batch([(10, 64)], num_heads=4, num_kv_heads=2, head_dim=16, dtype=dtype, block_size=32).metadata
    of_others = plan_batch(
        *(coarse.query_start_loc, coarse.seq_lens, coarse.block_tables, 32, computing.kinds[0].heads), num_threads=2
    )
    for arguments, message in (
        ((x.half(), angles, [slots], batches), r"do not take torch.float16 \[10, 48\] on cpu"),
        ((x[:, :47], angles, [slots], batches), r"\[10, 47\]"),
        ((x.T.contiguous().T, angles, [slots], batches), "do not take"),
        ((x, None, [slots], batches), r"10 tokens are not rotated in 16 dimensions by None"),
        ((x, (angles[0], angles[1][:, :9]), [slots], batches), r"by \[\[1, 10, 16\], \[1, 9, 16\]\]"),
        ((x, angles, [slots[:9]], batches), "10 tokens have no place in 9 slots of torch.int64"),
        ((x, angles, [slots.int()], batches), "10 tokens have no place in 10 slots of torch.int32"),
        ((x[:9], (angles[0][:, :9], angles[1][:, :9]), [slots[:9]], batches), "a step of 10 tokens in blocks of 16"),
        ((x, angles, [slots], [of_others]), "a step of 10 tokens in blocks of 32"),
        ((x, angles, [slots], []), "shorter"),
        ((x, angles, [], batches), "shorter"),
    ):
        with pytest.raises(ValueError, match=message):
            computing(*arguments)
    for caches, caches_before in zip(step.caches, before.caches, strict=True):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(caches.tensors, caches_before.tensors, strict=True))


def test_without_the_library_the_error_says_so(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_layer(LLAMA, None, dtype).parts
    monkeypatch.setattr(decoder_layers, "library", lambda _: None)
    assert not decoder_layers.is_available(dtype)
    with pytest.raises(RuntimeError, match="there are no decoder layers for"):
        DecoderLayers([parts], LayerScratch())
