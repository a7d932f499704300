"""Decoder layers are what is written in `kernels.decoder_layers`, in every library that this CPU can use.

Which layers of a model they take the place of is `tests/model/test_fused_layers.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels import attention as attention_kernel
from kernels import attention_batch, decoder_layers, write_kv
from kernels.attention import attention
from kernels.attention_batch import AttentionBatch, plan_batch
from kernels.attention_metadata import AttentionMetadata
from kernels.compiled import ELEMENT_TYPES, INSTRUCTION_SETS, load
from kernels.decoder_layers import Angles, AttentionKind, DecoderLayers, LayerParts, LayerScratch, Norm
from kernels.kv_cache import LayerCache
from kernels.linear import Activation, pack_weight
from kernels.quantize_kv import LARGEST, KVScales, quantize
from kernels.slot_mapping import SlotMapping

from .paged_batch import PagedBatch, make_batch
from .tensors import fresh

# Shares of the output's norm.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 2e-6}
FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU: F.gelu,
    Activation.RELU: F.relu,
}
NORMS = ("before_attention", "of_queries", "of_keys", "after_attention", "before_mlp", "after_mlp")
COMMON = ("before_attention", "before_mlp")


@pytest.fixture(params=[(name, dtype) for name in INSTRUCTION_SETS for dtype in ELEMENT_TYPES], ids=str, autouse=True)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    instruction_set, dtype = request.param
    found = load(instruction_set, dtype)
    if found is None:
        pytest.skip("not built, or not for this CPU")
    for module in (decoder_layers, attention_kernel, attention_batch):
        monkeypatch.setattr(module, "library", {dtype: found}.get)
    return dtype


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    random.seed(0)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Kind:
    """What layers have. `head_norms`: none, of each `head`, or of `all` heads together. `options` are attention's."""

    norms: tuple[str, ...] = COMMON
    head_norms: str | None = None
    activation: Activation = Activation.SILU
    biases: tuple[str, ...] = ()
    rotary_dim: int = 16
    hidden_size: int = 48
    intermediate_size: int = 80
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    windows: tuple[int | None, ...] = (None, None)
    options: dict[str, Any] = field(default_factory=dict)


FOUR_NORMS = (*COMMON, "after_attention", "after_mlp")
LLAMA = Kind()
KINDS = {
    "llama": LLAMA,
    "gemma2": Kind(FOUR_NORMS, activation=Activation.GELU_TANH, windows=(4, None), options={"softcap": 3.0}),
    "qwen3": Kind(head_norms="head", head_dim=32, rotary_dim=32),
    "gemma3": Kind(FOUR_NORMS, head_norms="head", activation=Activation.GELU_TANH, windows=(None, 3)),
    "olmo2": Kind(("after_attention", "after_mlp"), head_norms="all"),
    "qwen2": Kind(biases=("qkv",)),
    "biases everywhere": Kind(biases=("qkv", "output", "gate", "up", "down"), activation=Activation.GELU),
    "part of a head is rotated": Kind(rotary_dim=6, activation=Activation.RELU),
    "nothing is rotated": Kind(rotary_dim=0),
    "odd sizes": Kind(
        head_norms="head", hidden_size=37, intermediate_size=51, num_heads=3, num_kv_heads=1, head_dim=21, rotary_dim=10
    ),
    "sinks": Kind(windows=(5, 5), options={"sinks": torch.linspace(-1.0, 3.0, 4)}),
    "no norms": Kind(norms=()),
}


@dataclass(frozen=True)
class Plain:
    """A layer's own tensors, by the names of `LayerParts`, and what is made of them."""

    kind: Kind
    window: int | None
    norms: dict[str, Norm]
    weights: dict[str, torch.Tensor]
    biases: dict[str, torch.Tensor]

    @property
    def scaling(self) -> float:
        return 1.5 * self.kind.head_dim**-0.5

    @property
    def parts(self) -> LayerParts:
        kind = self.kind
        return LayerParts(
            **{name: self.norms.get(name) for name in NORMS},
            **{name: pack_weight(weight, self.biases.get(name)) for name, weight in self.weights.items()},
            num_heads=kind.num_heads,
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            rotary_dim=kind.rotary_dim,
            activation=kind.activation,
            scaling=self.scaling,
            sliding_window=self.window,
            **kind.options,
        )


def make_layer(kind: Kind, window: int | None, dtype: torch.dtype) -> Plain:
    heads, kv_heads = kind.num_heads * kind.head_dim, kind.num_kv_heads * kind.head_dim
    shapes = {
        "qkv": (heads + 2 * kv_heads, kind.hidden_size),
        "output": (kind.hidden_size, heads),
        "gate": (kind.intermediate_size, kind.hidden_size),
        "up": (kind.intermediate_size, kind.hidden_size),
        "down": (kind.hidden_size, kind.intermediate_size),
    }
    norm_sizes = dict.fromkeys(kind.norms, kind.hidden_size)
    if kind.head_norms is not None:
        of_one = kind.head_norms == "head"
        norm_sizes |= {
            "of_queries": kind.head_dim if of_one else heads,
            "of_keys": kind.head_dim if of_one else kv_heads,
        }
    return Plain(
        kind,
        window,
        {
            name: Norm(1 + fresh(size, scale=0.3), 10.0 ** -(place + 1))
            for place, (name, size) in enumerate(norm_sizes.items())
        },
        {name: fresh(*shape, dtype=dtype, scale=shape[1] ** -0.5) for name, shape in shapes.items()},
        {name: fresh(shapes[name][0], dtype=dtype) for name in kind.biases},
    )


def make_layers(kind: Kind, dtype: torch.dtype) -> list[Plain]:
    return [make_layer(kind, window, dtype) for window in kind.windows]


@dataclass
class Step:
    """A batch and, by layer, where its keys and values are; what this step's tokens write there is NaN before.

    A case's metadata are those of its group, and layers at the same place in their groups share memory.
    """

    cases: list[PagedBatch]
    groups: list[int]
    x: torch.Tensor
    angles: Angles

    @property
    def caches(self) -> list[LayerCache]:
        return [LayerCache(case.key_cache, case.value_cache, case.scales) for case in self.cases]

    def copy(self) -> Step:
        copies = {id(cache): cache.clone() for case in self.cases for cache in (case.key_cache, case.value_cache)}
        return replace(
            self,
            cases=[
                replace(case, key_cache=copies[id(case.key_cache)], value_cache=copies[id(case.value_cache)])
                for case in self.cases
            ],
        )

    def metadata(self, kind: AttentionKind) -> AttentionMetadata:
        return self.cases[self.groups.index(kind.group)].metadata

    def slots(self, layers: DecoderLayers) -> list[torch.Tensor]:
        return [self.metadata(kind).slots.tensor for kind in layers.kinds]

    def batches(self, layers: DecoderLayers) -> list[AttentionBatch]:
        return [
            plan_batch(
                *(m.query_start_loc, m.seq_lens, m.block_tables, m.block_size, kind.heads),
                sliding_window=kind.sliding_window,
                num_threads=2,
            )
            for kind in layers.kinds
            for m in [self.metadata(kind)]
        ]

    def computed(self, layers: Sequence[Plain]) -> torch.Tensor:
        computing = DecoderLayers([layer.parts for layer in layers], LayerScratch())
        computing.use(self.caches, self.groups)
        return computing(self.x, self.angles, self.slots(computing), self.batches(computing))


LENGTHS = [(1, 20), (5, 9), (3, 3), (1, 17)]


def make_step(
    kind: Kind,
    dtype: torch.dtype,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    nowhere: Sequence[int] = (),
    num_groups: int = 1,
) -> Step:
    """`nowhere`: tokens whose keys and values are in the caches already. Layers belong to the groups by turns."""
    sizes = {"num_heads": kind.num_heads, "num_kv_heads": kind.num_kv_heads, "head_dim": kind.head_dim}
    num_tokens = sum(query_len for query_len, _ in lengths)
    pool = make_batch([*lengths] * num_groups, dtype=dtype, **sizes)
    by_group = []
    for group in range(num_groups):
        rows = slice(group * len(lengths), (group + 1) * len(lengths))
        tables, block_size, slots = pool.block_tables[rows], pool.metadata.block_size, []
        for table, (query_len, seq_len) in zip(tables, lengths, strict=True):
            slots += [table[p // block_size] * block_size + p % block_size for p in range(seq_len - query_len, seq_len)]
        for token in nowhere:
            slots[token] = -1
        by_group.append(
            replace(
                pool,
                block_tables=tables,
                query_lens=pool.query_lens[rows],
                seq_lens=pool.seq_lens[rows],
                metadata=replace(
                    pool.metadata,
                    query_start_loc=pool.metadata.query_start_loc[: len(lengths) + 1],
                    seq_lens=pool.metadata.seq_lens[rows],
                    block_tables=pool.metadata.block_tables[rows],
                    slot_mapping=np.array(slots),
                ),
            )
        )
    cases: list[PagedBatch] = []
    groups = [place % num_groups for place in range(len(kind.windows))]
    for group in groups:
        if group == 0:
            caches = [cache.clone() for cache in (pool.key_cache, pool.value_cache)]
            for cache in caches:
                flat = cache.view(-1, kind.num_kv_heads, kind.head_dim)
                flat += fresh(*flat.shape, dtype=dtype)
                for case in by_group:
                    flat[stored_slots(case)] = float("nan")
        cases.append(replace(by_group[group], key_cache=caches[0], value_cache=caches[1]))
    turns = fresh(1, num_tokens, kind.rotary_dim, scale=3)
    # In float32 whatever the layers compute in, as some models have them, and with halves that differ.
    return Step(cases, groups, fresh(num_tokens, kind.hidden_size, dtype=dtype), (turns.cos(), turns.sin()))


def stored_slots(case: PagedBatch) -> torch.Tensor:
    slots = case.metadata.slots.tensor
    return slots[slots >= 0]


def normalized(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    return x if norm is None else F.rms_norm(x, (len(norm.weight),), norm.weight.double(), norm.epsilon)


def exact_layer(layer: Plain, x: torch.Tensor, step: Step, case: PagedBatch) -> torch.Tensor:
    """In float64; keys and values are put into the caches of `case`."""
    kind, norms = layer.kind, layer.norms

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        bias = layer.biases.get(name)
        return F.linear(x, layer.weights[name].double(), None if bias is None else bias.double())

    def of_heads(x: torch.Tensor, norm: Norm | None, num_heads: int) -> torch.Tensor:
        if norm is not None:
            x = normalized(x.unflatten(-1, (-1, len(norm.weight))), norm).flatten(1)
        x = x.unflatten(-1, (num_heads, kind.head_dim))
        turned, rest = x[..., : kind.rotary_dim], x[..., kind.rotary_dim :]
        cosines, sines = (values[0, :, None].double() for values in step.angles)
        a, b = turned.chunk(2, dim=-1)
        return torch.cat([turned * cosines + torch.cat([-b, a], dim=-1) * sines, rest], dim=-1)

    heads, kv_heads = kind.num_heads * kind.head_dim, kind.num_kv_heads * kind.head_dim
    qkv = product("qkv", normalized(x, norms.get("before_attention")))
    queries, keys, values = qkv.split([heads, kv_heads, kv_heads], dim=-1)
    queries = of_heads(queries, norms.get("of_queries"), kind.num_heads)
    written = case.metadata.slots.tensor >= 0
    for cache, new in (
        (case.key_cache, of_heads(keys, norms.get("of_keys"), kind.num_kv_heads)),
        (case.value_cache, values.unflatten(-1, (kind.num_kv_heads, kind.head_dim))),
    ):
        cache.view(-1, *cache.shape[2:])[stored_slots(case)] = new[written].to(cache.dtype)
    attended = replace(case, query=queries).expected(scaling=layer.scaling, sliding_window=layer.window, **kind.options)
    h = x + normalized(product("output", attended.flatten(1)), norms.get("after_attention"))
    into_mlp = normalized(h, norms.get("before_mlp"))
    gated = FUNCTIONS[kind.activation](product("gate", into_mlp)) * product("up", into_mlp)
    return h + normalized(product("down", gated), norms.get("after_mlp"))


def assert_close(actual: torch.Tensor, exact: torch.Tensor) -> None:
    difference = (actual.double() - exact.double()).norm(dim=-1)
    # Written so that NaN is a difference.
    assert (difference <= TOLERANCES[actual.dtype] * exact.double().norm(dim=-1)).all(), difference.max()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32)


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
