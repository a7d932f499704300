"""Linear layers in 8 or 4 bits: weights only, rounded to the nearest, computed by Foreword's own kernel.

Which layers these are is found like those of the other passes: by watching a text being computed. So embeddings and a
vision tower stay as they are, while an output head is quantized, as a copy if it is tied to the embeddings. The head
is in 8 bits in any case: in 4 it costs 6 to 10 % of perplexity (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from engine_core.config import EngineConfig, Quantization
from engine_core.errors import InvalidConfigError
from kernels.quantize import QuantizedWeight, quantize_int4, quantize_int8

from .linear_layers import replace
from .packed_layers import KernelLinear
from .packing import check_same

QUANTIZE: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {"int8": quantize_int8, "int4": quantize_int4}
# Whose weights exist twice while a layer is compared.
_OUTPUTS_AT_ONCE = 4096


def check_quantization(config: EngineConfig, model_config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what cannot be computed, before anything is loaded.

    Raises:
        InvalidConfigError: `quantization` is unknown, or does not go with the model, the device, `dtype`, another
            setting or this installation.
    """
    name = config.quantization
    if name is None:
        return
    if name not in QUANTIZE:
        raise InvalidConfigError(f"quantization: {name!r} is none of {', '.join(QUANTIZE)}")
    if (theirs := getattr(model_config, "quantization_config", None)) is not None:
        method = theirs.get("quant_method") if isinstance(theirs, dict) else getattr(theirs, "quant_method", None)
        raise InvalidConfigError(f"quantization: the model's weights are quantized already ({method})")
    if device.type != "cpu":
        raise InvalidConfigError(f"quantization: {name} weights are computed with on a CPU, not on {device.type}")
    if dtype not in {torch.bfloat16, torch.float32}:
        raise InvalidConfigError(
            f"quantization: {name} weights are computed with in bfloat16 or float32,"
            f" not in {str(dtype).removeprefix('torch.')}"
        )
    for setting in ("prepack_weights", "linear_kernel"):
        if not getattr(config, setting):
            raise InvalidConfigError(f"quantization: {name} needs {setting}, which is switched off")
    if not KernelLinear.is_usable(dtype):
        raise InvalidConfigError(
            f"quantization: {name} needs Foreword's kernels for CPUs; there was no C compiler when it was installed"
        )


def quantize_linears(
    model: nn.Module, samples: Mapping[str, torch.Tensor], quantization: Quantization
) -> dict[str, type[nn.Module]]:
    """Quantize the `nn.Linear`s at these paths, one after the other. `samples` are tensors they were called with.

    Returns the paths of those that were quantized; those in another type than bfloat16 and float32 are left alone.

    Raises:
        ArithmeticError: for its sample, a layer gives something else than its quantized weight stands for.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    quantized: dict[str, type[nn.Module]] = {}
    for name, sample in samples.items():
        linear = model.get_submodule(name)
        if not KernelLinear.is_usable(linear.weight.dtype):
            continue
        weight = QUANTIZE["int8" if linear is head else quantization](linear.weight.detach())
        layer = KernelLinear(linear, weight)
        check_same(name, _expected(sample, weight, linear.bias), layer(sample))
        replace(model, name, layer)
        quantized[name] = KernelLinear
    return quantized


def _expected(sample: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    x = sample.float()
    parts = [nn.functional.linear(x, part.dequantized(sample.dtype).float()) for part in weight.split(_OUTPUTS_AT_ONCE)]
    y = torch.cat(parts, dim=-1)
    return (y if bias is None else y + bias.float()).to(sample.dtype)
