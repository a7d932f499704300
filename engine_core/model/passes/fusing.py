"""Decoder layers of the common kind computed by `kernels.decoder_layers` as a whole.

Those that follow each other are computed in one call: the first one called computes all, the others pass it on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine_core.config import Quantization
from engine_core.model.attention import AttentionOptions, LayerKV, PagedKV
from engine_core.model.kv_pool import KVPool
from engine_core.model.lora.adapter_rooms import OutputSlice, PointerRoom
from engine_core.model.lora.adapter_rows import LayerAdapters
from engine_core.model.probe import Probe
from kernels.attention import MAX_HEAD_DIM
from kernels.decoder_layers import Angles, DecoderLayers, LayerScratch, is_available
from kernels.dispatch import uses_triton
from kernels.layer_parts import LayerParts, LinearName, Norm
from kernels.linear import Activation, PackedWeight, pack_quantized, pack_weight
from kernels.lora_batch import LoraBatch
from kernels.lora_in_c import PackedLora

from .linear_layers import has_hooks, replace
from .packed_layers import KernelLinear
from .packing import packed_layer
from .quantizing import QUANTIZE
from .watched_layers import OTHER_OPERATIONS, ROTARY_OPERATIONS, WatchedCall, WatchedLayer

# What a layer's parts are called, by what they are for. The first that a layer has all names of is meant.
_NORMS: tuple[dict[str, str], ...] = (
    {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    },
    {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
    {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"},
)
_HEAD_NORMS: tuple[dict[str, str], ...] = ({"of_queries": "self_attn.q_norm", "of_keys": "self_attn.k_norm"}, {})
_PROJECTIONS: tuple[dict[str, str], ...] = (
    {"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"},
    {"qkv": "self_attn.qkv_proj"},
)
_OUTPUTS: tuple[dict[str, str], ...] = ({"output": "self_attn.o_proj", "down": "mlp.down_proj"},)
_GATES: tuple[dict[str, str], ...] = (
    {"gate": "mlp.gate_proj", "up": "mlp.up_proj"},
    {"gate_up": "mlp.gate_up_proj"},
)
_ACTIVATIONS: tuple[dict[str, str], ...] = ({"activation": "mlp.act_fn"}, {"activation": "mlp.activation_fn"})

_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU: F.gelu,
    Activation.RELU: F.relu,
}
# Of what a layer adds to its input, as a share, and of its output: the last bits of the latter are rounding.
_FLOAT32_TOLERANCES = (1e-4, 1e-6)
_HALF_PRECISION_TOLERANCES = (3e-2, 1e-2)


class _StandIn(nn.Module):
    """For a decoder layer. Who reads plain attributes of the original finds them here."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class ComputedLayer(_StandIn):
    """Stands in for a decoder layer that one before it has computed."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


@dataclass(frozen=True, slots=True)
class _Fused:
    """What is kept of a layer. `linears` are the paths of its linear layers by part, and how many outputs they have."""

    seen: WatchedCall
    parts: LayerParts
    layer_idx: int
    attributes: dict[str, Any]
    linears: dict[str, tuple[str, int]]


class FusedLayers(_StandIn):
    """Stands in for the first of some decoder layers, and computes all of them, with what `adapters` add."""

    def __init__(self, layers: Sequence[_Fused], scratch: LayerScratch, adapters: LayerAdapters | None = None) -> None:
        super().__init__(layers[0].attributes)
        self._layers = [layer.parts for layer in layers]
        self._indices = [layer.layer_idx for layer in layers]
        self._linears = [layer.linears for layer in layers]
        self._adapters = adapters
        self._computing = DecoderLayers(self._layers, scratch, 0 if adapters is None else adapters.num_slots)
        self._pool: KVPool | None = None

    def adapter_rooms(self) -> Iterator[PointerRoom]:
        """Of every product."""
        for index, (parts, linears) in enumerate(zip(self._layers, self._linears, strict=True)):
            for name, slices in _adapted_slices(linears).items():
                weight: PackedWeight = getattr(parts, name)
                place = partial(self._place, index, name)
                yield PointerRoom(slices, weight.in_features, weight.dtype, place)

    def _place(self, index: int, name: LinearName, slot: int, packed: PackedLora | None) -> None:
        self._computing.place(slot, index, name, packed)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: Angles | None = None,
        layer_kv: LayerKV,
        **_: Any,
    ) -> torch.Tensor:
        x = hidden_states[0].contiguous()
        lora = None if self._adapters is None else self._adapters.rows.tokens
        if isinstance(layer_kv, PagedKV) and not uses_triton(x):
            return self._compute(x, position_embeddings, layer_kv, lora)[None]
        for index, (layer_idx, parts) in enumerate(zip(self._indices, self._layers, strict=True)):
            heads = self._computing.before_attention(index, x, position_embeddings, lora)
            options = AttentionOptions(parts.scaling, parts.sliding_window, parts.softcap, parts.sinks)
            x = self._computing.after_attention(index, x, layer_kv.attend(layer_idx, *heads, options), lora)
        return x[None]

    def _compute(self, x: torch.Tensor, angles: Angles | None, kv: PagedKV, lora: LoraBatch | None) -> torch.Tensor:
        pool = kv.pool
        if pool is not self._pool:
            self._computing.use(*zip(*((pool.caches[idx], pool.group_of[idx]) for idx in self._indices), strict=True))
            self._pool = pool
        kinds = [(kv.metadata[kind.group], kind) for kind in self._computing.kinds]
        slots = [metadata.slots.tensor for metadata, _ in kinds]
        batches = [metadata.cpu_batch(kind.heads, kind.sliding_window) for metadata, kind in kinds]
        return self._computing(x, angles, slots, batches, lora)


def parts_of(module: nn.Module) -> dict[str, nn.Module]:
    """The norms, linear layers and activation of what looks like a decoder layer; nothing of all else."""
    modules = dict(module.named_modules())
    if "self_attn" not in modules or "mlp" not in modules or not hasattr(modules["self_attn"], "layer_idx"):
        return {}
    names: dict[str, str] = {}
    for alternatives in (_NORMS, _HEAD_NORMS, _PROJECTIONS, _OUTPUTS, _GATES, _ACTIVATIONS):
        found = next((each for each in alternatives if modules.keys() >= set(each.values())), None)
        if found is None:
            return {}
        names |= found
    return {part: modules[name] for part, name in names.items()}


def fuse_layers(
    model: nn.Module,
    watched: dict[str, tuple[nn.Module, WatchedLayer]],
    *,
    join: bool,
    quantization: Quantization | None,
    adapters: LayerAdapters | None = None,
) -> list[str]:
    """Replace those of the watched layers that compute nothing else than the kernel does, and return their paths.

    With `join`, layers each of which was given what the one before returned are computed together. With `quantization`
    their weights are stored in it. With `adapters` there is room for some in all of them. `watched` is emptied.

    Raises:
        ArithmeticError: one that should compute the same does not.
    """
    scratch = LayerScratch()
    runs: list[list[tuple[str, _Fused]]] = []
    # One layer after the other, so that few weights exist twice at any time.
    for name in list(watched):
        layer, seen = watched.pop(name)
        if any(has_hooks(module) for module in layer.modules()) or (parts := _layer_parts(seen, quantization)) is None:
            continue
        fused = _Fused(seen.call, parts, layer.self_attn.layer_idx, _attributes(layer), _linears(name, layer, seen))
        _compare(name, layer, seen.call, FusedLayers([fused], scratch))
        replace(model, name, ComputedLayer(fused.attributes))
        if not (join and runs and _follows(fused, runs[-1][-1][1])):
            runs.append([])
        runs[-1].append((name, fused))
        del layer, seen
    for run in runs:
        _put(model, [name for name, _ in run], FusedLayers([fused for _, fused in run], scratch, adapters))
    return [name for run in runs for name, _ in run]


def _put(model: nn.Module, names: list[str], fused: FusedLayers) -> None:
    """In the place of these layers; where they are all there are, nobody has to go through the others any more."""
    parent = names[0].rpartition(".")[0]
    layers = model.get_submodule(parent)
    if isinstance(layers, nn.ModuleList) and len(layers) == len(names):
        replace(model, parent, nn.ModuleList([fused]))
    else:
        replace(model, names[0], fused)


def _attributes(layer: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if not name.startswith("_") and name != "training"}


def _linears(name: str, layer: nn.Module, seen: WatchedLayer) -> dict[str, tuple[str, int]]:
    paths = {id(module): path for path, module in layer.named_modules()}
    return {
        part: (f"{name}.{paths[id(module)]}", module.out_features)
        for part, module in seen.parts.items()
        if isinstance(module, nn.Linear)
    }


def _adapted_slices(linears: Mapping[str, tuple[str, int]]) -> dict[LinearName, list[OutputSlice]]:
    """Which outputs of which linear layers a product computes. `linears` as `_Fused` has them."""
    whole = {part: OutputSlice(path, 0, size) for part, (path, size) in linears.items()}
    qkv = [whole[part] for part in ("qkv", "query", "key", "value") if part in whole]
    if "gate_up" in whole:
        path, size = linears["gate_up"]
        gate, up = OutputSlice(path, 0, size // 2), OutputSlice(path, size // 2, size // 2)
    else:
        gate, up = whole["gate"], whole["up"]
    return {"qkv": qkv, "output": [whole["output"]], "gate": [gate], "up": [up], "down": [whole["down"]]}


def _follows(fused: _Fused, before: _Fused) -> bool:
    """Whether it was given what `before` returned, and rotates as that does."""
    call, call_before = fused.seen, before.seen
    return (
        call.x is call_before.y
        and (not fused.parts.rotary_dim or (call.cosines is call_before.cosines and call.sines is call_before.sines))
        and (fused.parts.rotary_dim, fused.parts.scratch_sizes) == (before.parts.rotary_dim, before.parts.scratch_sizes)
    )


def _compare(name: str, layer: nn.Module, call: WatchedCall, fused: FusedLayers) -> None:
    angles = None if call.cosines is None or call.sines is None else (call.cosines, call.sines)
    expected, actual = (
        each(call.x, position_embeddings=angles, layer_kv=Probe(torch.arange(call.x.shape[1]))).float()
        for each in (layer, fused)
    )
    x = call.x.float()
    of_added, of_all = _FLOAT32_TOLERANCES if call.x.dtype == torch.float32 else _HALF_PRECISION_TOLERANCES
    tolerance = of_added * (expected - x).norm().item() + of_all * expected.norm().item()
    difference = (actual - expected).norm().item()
    # Written so that NaN is a difference.
    if not difference <= tolerance:
        raise ArithmeticError(f"{name} differs by {difference:.2e} where {tolerance:.2e} would be rounding")


def _layer_parts(seen: WatchedLayer, quantization: Quantization | None) -> LayerParts | None:
    """None where the layer is of another kind."""
    rotary_dim = _rotary_dim(seen)
    activation = _activation(seen.parts["activation"])
    names = (*_NORMS[0], *_HEAD_NORMS[0])
    norms = {name: _norm(seen.parts[name]) for name in names if name in seen.parts}
    linears = [part for part in seen.parts.values() if isinstance(part, nn.Linear)]
    num_other_parts = len(norms) + 1
    if (
        rotary_dim is None
        or activation is None
        or None in norms.values()
        or len(linears) + num_other_parts != len(seen.parts)
        or any(type(linear) is not nn.Linear or linear.weight.dtype is not seen.call.x.dtype for linear in linears)
        or seen.shape is None
        or seen.options is None
        or seen.shape[2] > MAX_HEAD_DIM
        or not is_available(seen.call.x.dtype)
        # Quantized weights are computed with nowhere else.
        or (quantization is None and packed_layer(seen.call.x.dtype, kernel=True) is not KernelLinear)
    ):
        return None
    num_heads, num_kv_heads, head_dim = seen.shape
    qkv = [seen.parts[name] for name in ("qkv", "query", "key", "value") if name in seen.parts]
    gate_up = [seen.parts[name] for name in ("gate_up", "gate", "up") if name in seen.parts]
    gate, up = _packed(gate_up, quantization, num_parts=2)
    return LayerParts(
        **{name: norms.get(name) for name in names},
        qkv=_packed(qkv, quantization)[0],
        output=_packed([seen.parts["output"]], quantization)[0],
        gate=gate,
        up=up,
        down=_packed([seen.parts["down"]], quantization)[0],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        activation=activation,
        scaling=seen.options.scaling,
        sliding_window=seen.options.sliding_window,
        softcap=seen.options.softcap,
        sinks=None if seen.options.sinks is None else seen.options.sinks.detach().clone(),
    )


def _rotary_dim(seen: WatchedLayer) -> int | None:
    if seen.operations == OTHER_OPERATIONS:
        return 0
    cosines = seen.call.cosines
    if seen.operations != OTHER_OPERATIONS + ROTARY_OPERATIONS or cosines is None or cosines.dim() != 3:
        return None
    return cosines.shape[-1]


def _activation(module: nn.Module) -> Activation | None:
    x = torch.linspace(-12, 12, 1001)
    try:
        y = module(x)
    except Exception:  # one that takes something else is another
        return None
    return next((kind for kind, compute in _FUNCTIONS.items() if torch.allclose(y, compute(x), atol=1e-6)), None)


def _norm(module: nn.Module) -> Norm | None:
    """The root mean square norm that `module` is, whose weight may be stored less one; None if it is another."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = dict(module.named_parameters())
    if not isinstance(epsilon, float) or parameters.keys() != {"weight"}:
        return None
    exact, stored = copy.deepcopy(module).float(), parameters["weight"].detach().float()
    generator = torch.Generator().manual_seed(0)
    # Small and large ones: the least shows what epsilon does.
    x = torch.randn(8, len(stored), generator=generator) * torch.logspace(-3, 3, 8)[:, None]
    for weight in (stored, 1 + stored):
        expected = F.rms_norm(x, (len(stored),), weight, epsilon)
        if torch.allclose(exact(x), expected, rtol=1e-5, atol=1e-6):
            # A copy: what `stored` is may lie in a weight file.
            return Norm(weight.clone(), epsilon)
    return None


def _packed(linears: Sequence[Any], quantization: Quantization | None, num_parts: int = 1) -> list[PackedWeight]:
    """These side by side, in so many equal parts. If they are quantized, they have what is left of them afterwards."""
    weights = [linear.weight.detach() for linear in linears]
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = torch.cat([x.weight.new_zeros(x.out_features) if x.bias is None else x.bias for x in linears])
    side_by_side = torch.cat(weights).chunk(num_parts)
    biases = [None] * num_parts if bias is None else bias.chunk(num_parts)
    if quantization is None:
        return [pack_weight(weight, b) for weight, b in zip(side_by_side, biases, strict=True)]
    quantized = [QUANTIZE[quantization](weight) for weight in side_by_side]
    dtype = weights[0].dtype
    left = torch.cat([weight.dequantized(dtype).to(dtype) for weight in quantized])
    for linear, weight in zip(linears, left.split([len(weight) for weight in weights]), strict=True):
        linear.weight = nn.Parameter(weight, requires_grad=False)
    return [pack_quantized(weight, dtype, b) for weight, b in zip(quantized, biases, strict=True)]
