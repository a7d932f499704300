"""Decoder layers with adapters are, for each request, those whose weights have its adapter added: B · A · scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from kernels import attention as attention_kernel
from kernels import attention_batch, decoder_layers, lora_in_c
from kernels.decoder_layers import DecoderLayers, LayerScratch
from kernels.layer_parts import LINEAR_NAMES, LinearName
from kernels.linear import pack_quantized
from kernels.lora import LoraPart
from kernels.lora_batch import LoraBatch, lora_batch
from kernels.lora_in_c import pack_lora
from kernels.quantize import quantize_int4, quantize_int8

from .libraries import each_library
from .plain_layers import (
    KINDS,
    LENGTHS,
    LLAMA,
    Kind,
    Plain,
    Step,
    assert_close,
    exact_layer,
    make_layer,
    make_layers,
    make_step,
    stored_slots,
)
from .tensors import fresh

NONE = -1
# By adapter, and in it by linear layer (or slice of it): its rank. The last slot is empty.
ADAPTERS: list[dict[str, int]] = [
    {"query": 16, "key": 16, "value": 16, "output": 16, "gate": 16, "up": 16, "down": 16},
    {"query": 3, "value": 40, "up": 7, "down": 70},
    {"gate": 20, "output": 1},
    {"key": 2},
]
EMPTY = len(ADAPTERS)

dtype = each_library(decoder_layers, attention_kernel, attention_batch, lora_in_c)
pytestmark = pytest.mark.usefixtures("inference")


def slices_of(kind: Kind, name: LinearName) -> dict[str, int]:
    """Their sizes, in order."""
    if name == "qkv":
        kv_size = kind.num_kv_heads * kind.head_dim
        return {"query": kind.num_heads * kind.head_dim, "key": kv_size, "value": kv_size}
    return {name: kind.intermediate_size if name in ("gate", "up") else kind.hidden_size}


@dataclass
class Adapted:
    """Layers with `ADAPTERS`, and by slot those that have the adapter in their weights."""

    plain: list[Plain]
    merged: list[list[Plain]]
    computing: DecoderLayers

    def output(self, step: Step, lora: LoraBatch | None) -> torch.Tensor:
        self.computing.use(step.caches, step.groups)
        return self.computing(step.x, step.angles, step.slots(self.computing), step.batches(self.computing), lora)


def adapted(plain: list[Plain], dtype: torch.dtype, max_tokens: int = 300) -> Adapted:
    scratch = LayerScratch()
    computing = DecoderLayers([layer.parts for layer in plain], scratch, EMPTY + 1)
    merged = [[replace(layer, weights=dict(layer.weights)) for layer in plain] for _ in range(EMPTY + 1)]
    for slot, ranks in enumerate(ADAPTERS):
        for index, layer in enumerate(plain):
            for name in LINEAR_NAMES:
                sizes, in_features = slices_of(layer.kind, name), layer.weights[name].shape[1]
                parts: list[LoraPart | None] = []
                for each, size in sizes.items():
                    rank = ranks.get(each, 0)
                    a = fresh(rank, in_features, dtype=dtype, scale=in_features**-0.5)
                    b = fresh(size, rank, dtype=dtype, scale=0.3 * max(rank, 1) ** -0.5)
                    parts.append(LoraPart(a, b, 1.0 + index) if rank else None)
                if not any(parts):
                    continue
                computing.place(slot, index, name, pack_lora(parts, tuple(sizes.values()), in_features, dtype))
                added = [
                    torch.zeros(size, in_features, dtype=torch.float64)
                    if part is None
                    else part.scaling * part.b.double() @ part.a.double()
                    for part, size in zip(parts, sizes.values(), strict=True)
                ]
                merged[slot][index].weights[name] = layer.weights[name].double() + torch.cat(added)
    # What is read of it before it is written shows.
    scratch.take("shrunk", max_tokens * 256, dtype).fill_(float("nan"))
    return Adapted(plain, merged, computing)


def batch_of(of_requests: Sequence[int], lengths: Sequence[tuple[int, int]]) -> LoraBatch:
    return lora_batch(np.repeat(of_requests, [length for length, _ in lengths]), torch.device("cpu"))


def check(adapted: Adapted, step: Step, of_requests: Sequence[int], lengths: Sequence[tuple[int, int]]) -> None:
    """Outputs, and keys and values in the caches."""
    lora = batch_of(of_requests, lengths)
    references = {slot: step.copy() for slot in {*of_requests}}
    actual = adapted.output(step, lora)
    for slot, reference in references.items():
        of_slot = lora.slots == slot
        layers, y = adapted.plain if slot == NONE else adapted.merged[slot], step.x.double()
        for layer, case in zip(layers, reference.cases, strict=True):
            y = exact_layer(layer, y, reference, case)
        assert_close(actual[of_slot], y[of_slot])
        written = stored_slots(step.cases[0])[of_slot]
        for caches, expected in zip(step.caches, reference.caches, strict=True):
            for cache, of_reference in zip(caches.tensors, expected.tensors, strict=True):
                assert_close(cache.flatten(0, 1)[written].flatten(1), of_reference.flatten(0, 1)[written].flatten(1))


# Without any norms, what attention makes of larger keys is rounded too coarsely to tell anything.
@pytest.mark.parametrize("name", [name for name in KINDS if name != "no norms"])
def test_each_request_is_computed_with_its_own_adapter(dtype: torch.dtype, name: str) -> None:
    layers = adapted(make_layers(KINDS[name], dtype), dtype)
    for of_requests in ([0, NONE, 1, 2], [3, 1, EMPTY, 1]):
        check(layers, make_step(KINDS[name], dtype), of_requests, LENGTHS)


def test_many_rows_of_one_adapter_and_few_of_others(dtype: torch.dtype) -> None:
    """More than a chunk of a panel's rows."""
    lengths = [(1, 9), (100, 100), (1, 3), (20, 30), (1, 12)]
    layers = adapted([make_layer(LLAMA, None, dtype)], dtype)
    check(layers, make_step(replace(LLAMA, windows=(None,)), dtype, lengths), [0, 1, 1, NONE, 0], lengths)


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4], ids=["int8", "int4"])
def test_quantized_weights_have_adapters_too(
    dtype: torch.dtype, quantize: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [(1, 9), (50, 50), (1, 3)]
    layers = []
    packed = {}
    for layer in make_layers(LLAMA, dtype):
        codes = {name: quantize(weight.float()) for name, weight in layer.weights.items()}
        layers.append(replace(layer, weights={name: code.dequantized(dtype) for name, code in codes.items()}))
        packed[id(layers[-1])] = {name: pack_quantized(code, dtype) for name, code in codes.items()}
    of_plain = Plain.parts.fget
    assert of_plain is not None
    monkeypatch.setattr(Plain, "parts", property(lambda layer: replace(of_plain(layer), **packed[id(layer)])))
    check(adapted(layers, dtype), make_step(LLAMA, dtype, lengths), [0, 1, NONE], lengths)


def test_tokens_without_an_adapter_have_the_bits_of_a_step_without_any(dtype: torch.dtype) -> None:
    layers, step = adapted(make_layers(KINDS["gemma3"], dtype), dtype), make_step(KINDS["gemma3"], dtype)
    again, nobody = step.copy(), step.copy()
    lora = batch_of([0, NONE, 1, NONE], LENGTHS)
    without = lora.slots == NONE
    expected = layers.output(step, None)
    assert torch.equal(layers.output(again, lora)[without], expected[without])
    assert torch.equal(layers.output(nobody, batch_of([NONE, EMPTY, NONE, NONE], LENGTHS)), expected)


@pytest.mark.parametrize("name", ["llama", "olmo2"])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_but_for_attention_a_token_does_not_depend_on_others(dtype: torch.dtype, name: str, num_threads: int) -> None:
    kind = KINDS[name]
    slots = np.array([1, 1, 0, NONE, 1, *[0] * 12, 2, 0, 1, EMPTY, 3, 0])
    num_tokens = len(slots)
    computing = adapted([make_layer(kind, None, dtype)], dtype).computing
    step = make_step(kind, dtype, [(num_tokens, num_tokens)])
    attended = fresh(num_tokens, kind.num_heads, kind.head_dim, dtype=dtype)

    def parts_of(rows: slice) -> list[torch.Tensor]:
        lora = lora_batch(slots[rows], torch.device("cpu"))
        angles = step.angles[0][:, rows], step.angles[1][:, rows]
        before = [heads.clone() for heads in computing.before_attention(0, step.x[rows], angles, lora)]
        return [*before, computing.after_attention(0, step.x[rows], attended[rows], lora)]

    torch.set_num_threads(1)
    alone = [parts_of(slice(row, row + 1)) for row in range(num_tokens)]
    torch.set_num_threads(num_threads)
    for num_rows in (2, 9, num_tokens):
        together = parts_of(slice(num_tokens - num_rows, num_tokens))
        for part, rows in zip(together, zip(*alone[-num_rows:], strict=True), strict=True):
            assert torch.equal(part, torch.cat(rows))


def test_a_slot_has_what_was_placed_last(dtype: torch.dtype) -> None:
    layers, step = adapted(make_layers(LLAMA, dtype), dtype), make_step(LLAMA, dtype)
    again = step.copy()
    expected = layers.output(step, batch_of([NONE, 1, NONE, 1], LENGTHS))
    for index in range(len(layers.plain)):
        for name in LINEAR_NAMES:
            layers.computing.place(0, index, name, None)
    actual = layers.output(again, batch_of([0, 1, 0, 1], LENGTHS))
    assert torch.equal(actual, expected)


def test_what_does_not_fit_is_refused(dtype: torch.dtype) -> None:
    layers, step = adapted(make_layers(LLAMA, dtype), dtype), make_step(LLAMA, dtype)
    for lora, message in (
        (batch_of([0], [(9, 9)]), r"slots \(0,\) of 9 tokens are not for 10 tokens"),
        (batch_of([0, 5, NONE, NONE], LENGTHS), r"slots \(0, 5\) of 10 tokens are not for 10 tokens and 5 slots"),
    ):
        with pytest.raises(ValueError, match=message):
            layers.output(step, lora)
    part = LoraPart(fresh(2, 48), fresh(80, 2), 1.0)
    with pytest.raises(ValueError, match="is not for 80 and 48"):
        layers.computing.place(0, 0, "down", pack_lora([part], [80], 48, dtype))
