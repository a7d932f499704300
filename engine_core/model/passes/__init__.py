"""Passes over the loaded model: what transformers computes slowly, replaced without changing what it computes; and
`quantizing`, which changes it as far as it was asked to.

Each is a function over the module that `EngineConfig` can switch off. `linear_layers` finds by watching what may be
replaced, `merging` joins layers that read the same tensor, `packing` stores weights the way the CPU computes with them
(`packed_layers`), `quantizing` in fewer bits. `apply_passes` runs them and looks whether the model still says the same.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from engine_core.config import Quantization
from engine_core.model.probe import disagreement, probe_logits, tolerance

from .linear_layers import watch_linears
from .merging import merge_linears
from .packed_layers import KernelLinear
from .packing import leave_weight_files, pack_linears
from .quantizing import quantize_linears

logger = logging.getLogger(__name__)


class PassError(Exception):
    """The passes broke the model: it must be loaded again and served without them."""


@torch.inference_mode()
def apply_passes(
    model: torch.nn.Module,
    config: Any,
    *,
    merge: bool,
    pack: bool,
    kernel: bool,
    quantization: Quantization | None = None,
) -> None:
    """Change `model` in place. What a pass does not know it leaves alone, and a model that is not on a CPU altogether.

    Args:
        merge: linear layers that read the same tensor become one.
        pack: weights of linear layers are stored in the layout the CPU computes with.
        kernel: packed weights are computed with by `kernels.linear` where it can, else by the CPU's matrix library.
        quantization: what they are packed in, where `quantizing.check_quantization` allows it. Each layer is then
            compared with what its quantized weight stands for, and the model's logits are not.

    Raises:
        PassError: the model fails, its logits are others than before by more than rounding, or no layer could be
            quantized. It is unusable now.
    """
    if next(model.parameters()).device.type != "cpu" or not (merge or pack):
        return
    linears, expected = watch_linears(model, lambda: probe_logits(model, config))
    merged: dict[str, str] = {}
    packed: dict[str, type[torch.nn.Module]] = {}
    try:
        if merge:
            merged = merge_linears(model, linears.groups())
            _compare(expected, probe_logits(model, config), tolerance(expected.dtype))
        if pack:
            samples = {merged.get(name, name): sample for name, sample in linears.samples.items()}
            if quantization is not None:
                packed = quantize_linears(model, samples, quantization)
                if not packed:
                    raise PassError("no linear layer of it could be quantized")
            else:
                packed = pack_linears(model, samples, kernel=kernel)
            if packed:
                leave_weight_files(model)
        if pack and quantization is None:
            _compare(expected, probe_logits(model, config), _tolerance_of_packing(expected.dtype))
    except PassError:
        raise
    except Exception as error:  # any architecture may do anything with what was replaced
        raise PassError(f"{type(error).__name__}: {error}") from error
    num_kernel = sum(kind is KernelLinear for kind in packed.values())
    logger.info(
        "passes_applied merged=%d packed=%d linear_kernel=%d quantization=%s",
        len(merged),
        len(packed),
        num_kernel,
        quantization,
    )


def _tolerance_of_packing(dtype: torch.dtype) -> float:
    """As `tolerance`, but sums are added up in another order, whose last bit in half precision a model amplifies: exact
    sums, rounded once, change SmolLM2's logits by 5 % of their spread. `pack_linears` has looked closely already.
    """
    return tolerance(dtype) if dtype == torch.float32 else 0.2


def _compare(expected: torch.Tensor, actual: torch.Tensor, tolerance: float) -> None:
    changed = disagreement(expected, actual)
    # Written so that NaN is a difference.
    if not changed <= tolerance:
        raise PassError(f"a sequence's logits changed by {changed:.1%} of their spread")
