"""Passes over the loaded model: what transformers computes slowly, replaced without changing what it computes; and
`quantizing`, which changes it as far as it was asked to.

Each is a function over the module that `EngineConfig` can switch off, and finds by watching a forward what it may
replace. `fusing` makes one of decoder layers (`watched_layers`), `packing` stores weights of the linear layers that are
left (`linear_layers`) the way the CPU computes with them (`packed_layers`), `quantizing` in fewer bits. `apply_passes`
runs them and looks whether the model still says the same.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from engine_core.config import Quantization
from engine_core.model.lora.adapter_rows import LayerAdapters
from engine_core.model.probe import disagreement, probe_logits, tolerance

from .fusing import fuse_layers, parts_of
from .linear_layers import watch_linears
from .packed_layers import KernelLinear
from .packing import leave_weight_files, pack_linears
from .quantizing import quantize_linears
from .watched_layers import watch_layers

logger = logging.getLogger(__name__)


class PassError(Exception):
    """The passes broke the model: it must be loaded again and served without them."""


@torch.inference_mode()
def apply_passes(
    model: torch.nn.Module,
    config: Any,
    *,
    fuse: bool,
    pack: bool,
    kernel: bool,
    quantization: Quantization | None = None,
    adapters: LayerAdapters | None = None,
) -> None:
    """Change `model` in place. What a pass does not know it leaves alone, and a model that is not on a CPU altogether.

    Args:
        fuse: with `pack` and `kernel`, decoder layers of the common kind are computed by `kernels.decoder_layers`.
        pack: weights of linear layers are stored in the layout the CPU computes with.
        kernel: packed weights are computed with by `kernels.linear` where it can, else by the CPU's matrix library.
        quantization: what they are packed in, where `quantizing.check_quantization` allows it. Each layer is then
            compared with what its quantized weights stand for, and the model's logits are not.
        adapters: for which fused layers are to have room.

    Raises:
        PassError: the model fails, its logits are others than before by more than rounding, or no layer could be
            quantized. It is unusable now.
    """
    if next(model.parameters()).device.type != "cpu" or not pack:
        return
    try:
        wanted_parts_of = parts_of if fuse and kernel else lambda _: {}
        layers, expected = watch_layers(model, wanted_parts_of, lambda: probe_logits(model, config))
        join = not _is_fed_between_layers(model)
        fused = fuse_layers(model, layers, join=join, quantization=quantization, adapters=adapters)
        samples = watch_linears(model, lambda: probe_logits(model, config))
        packed: dict[str, type[torch.nn.Module]] = {}
        if quantization is None:
            packed = pack_linears(model, samples, kernel=kernel)
        else:
            packed = quantize_linears(model, samples, quantization)
            if not fused and not packed:
                raise PassError("no linear layer of it could be quantized")
        if fused or packed:
            leave_weight_files(model)
        if quantization is None:
            _compare(expected, probe_logits(model, config))
    except PassError:
        raise
    except Exception as error:  # any architecture may do anything with what was replaced
        raise PassError(f"{type(error).__name__}: {error}") from error
    logger.info(
        "passes_applied fused=%d packed=%d linear_kernel=%d quantization=%s",
        len(fused),
        len(packed),
        sum(kind is KernelLinear for kind in packed.values()),
        quantization,
    )


def _is_fed_between_layers(model: Any) -> bool:
    """Whether rows of pictures are added to what layers have computed. The forward that was watched had none."""
    return "deepstack_visual_embeds" in inspect.signature(model.get_decoder().forward).parameters


def _compare(expected: torch.Tensor, actual: torch.Tensor) -> None:
    # Sums are added up in another order, whose last bit in half precision a model amplifies: exact sums, rounded once,
    # change SmolLM2's logits by 5 % of their spread. Each layer has been looked at closely already.
    allowed = tolerance(expected.dtype) if expected.dtype == torch.float32 else 0.2
    changed = disagreement(expected, actual)
    # Written so that NaN is a difference.
    if not changed <= allowed:
        raise PassError(f"a sequence's logits changed by {changed:.1%} of their spread")
