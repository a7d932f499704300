"""Weights of linear layers in the layout in which the CPU computes, brought there once and not on every call."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .linear_layers import replace
from .packed_layers import KernelLinear, OnednnLinear, PackedEmbedding

# Shares of the output's norm. Adding up in another order stays far below them.
_FLOAT32_TOLERANCE = 1e-4
_HALF_PRECISION_TOLERANCE = 1e-2


def packed_layer(dtype: torch.dtype, *, kernel: bool) -> type[KernelLinear] | type[OnednnLinear] | None:
    """What computes fastest here in packed weights of `dtype`; None if nothing does. `kernel` allows our own."""
    if OnednnLinear.is_usable(dtype) and OnednnLinear.uses_tiles(dtype):
        return OnednnLinear
    if kernel and KernelLinear.is_usable(dtype):
        return KernelLinear
    return OnednnLinear if OnednnLinear.is_usable(dtype) else None


def pack_linears(model: nn.Module, samples: Mapping[str, torch.Tensor], *, kernel: bool) -> dict[str, type[nn.Module]]:
    """Pack the `nn.Linear`s at these paths, one after the other, so that few weights exist twice at any time.

    Embeddings that are tied to an output head are looked up in its packed form, if that is our kernel's and they are
    merely looked up; else they stay as they are. `samples` are tensors the layers were called with. Returns the paths
    of those that were packed, and what they are now.

    Raises:
        ArithmeticError: for its sample, a packed layer gives something else than before by more than rounding.
    """
    packed: dict[str, type[nn.Module]] = {}
    embedding_names = [name for name, module in model.named_modules() if type(module) is nn.Embedding]
    for name, sample in samples.items():
        linear = model.get_submodule(name)
        kind = packed_layer(linear.weight.dtype, kernel=kernel)
        if kind is not None:
            layer = kind(linear)
            check_same(name, linear(sample), layer(sample))
            replace(model, name, layer)
            packed[name] = kind
            if isinstance(layer, KernelLinear):
                for embedding_name in embedding_names:
                    embedding = model.get_submodule(embedding_name)
                    if isinstance(embedding, nn.Embedding) and embedding.weight is linear.weight:
                        replace(model, embedding_name, PackedEmbedding(embedding, layer))
    return packed


def check_same(name: str, expected: torch.Tensor, actual: torch.Tensor) -> None:
    """Compare what the layer `name` gave and gives.

    Raises:
        ArithmeticError: they differ by more than rounding.
    """
    # Here and not only in the model's logits: there, a model may have made anything of the last bit of a half.
    tolerance = _FLOAT32_TOLERANCE if expected.dtype == torch.float32 else _HALF_PRECISION_TOLERANCE
    norm = expected.float().norm().item()
    difference = (actual.float() - expected.float()).norm().item()
    # Written so that NaN is a difference.
    if not difference <= tolerance * norm:
        raise ArithmeticError(f"{name} differs by {difference:.2e} of {norm:.2e} in packed weights")


def leave_weight_files(model: nn.Module) -> None:
    """Copy what is not packed out of the mapped weight files: one tensor in a mapping keeps all of it in memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
