"""Decoder layers of all kinds, their steps, and what should come out of them in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kernels.attention_batch import AttentionBatch, plan_batch
from kernels.attention_metadata import AttentionMetadata
from kernels.decoder_layers import Angles, AttentionKind, DecoderLayers, LayerScratch
from kernels.kv_cache import LayerCache
from kernels.layer_parts import NORM_NAMES, LayerParts, Norm
from kernels.linear import Activation, pack_weight

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
COMMON = ("before_attention", "before_mlp")


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
            **{name: self.norms.get(name) for name in NORM_NAMES},
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
