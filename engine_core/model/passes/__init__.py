"""Passes over the loaded model: what transformers computes slowly, replaced without changing what it computes.

Each is a function over the module that `EngineConfig` can switch off. `linear_layers` finds by watching what may be
replaced, `merging` joins layers that read the same tensor, `packing` stores weights the way the CPU's matrix library
computes with them. `apply_passes` runs them and looks whether the model still says the same.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from engine_core.model.probe import disagreement, probe_logits, tolerance

from .linear_layers import watch_linears
from .merging import merge_linears
from .packing import can_pack, leave_weight_files, pack_linears

logger = logging.getLogger(__name__)


class PassError(Exception):
    """The passes broke the model: it must be loaded again and served without them."""


@torch.inference_mode()
def apply_passes(model: torch.nn.Module, config: Any, *, merge: bool, pack: bool) -> None:
    """Change `model` in place. What a pass does not know it leaves alone, and a model that is not on a CPU altogether.

    Args:
        merge: linear layers that read the same tensor become one.
        pack: weights of linear layers are stored in the layout the CPU's matrix library computes with.

    Raises:
        PassError: the model fails, or its logits are others than before by more than rounding. It is unusable now.
    """
    weight = next(model.parameters())
    pack = pack and can_pack(weight.dtype)
    if weight.device.type != "cpu" or not (merge or pack):
        return
    linears, expected = watch_linears(model, lambda: probe_logits(model, config))
    try:
        merged = merge_linears(model, linears.groups()) if merge else {}
        packed = dict.fromkeys(merged.get(name, name) for name in linears.names) if pack else {}
        pack_linears(model, packed)
        if packed:
            leave_weight_files(model)
        actual = probe_logits(model, config)
    except Exception as error:  # any architecture may do anything with what was replaced
        raise PassError(f"{type(error).__name__}: {error}") from error
    changed = disagreement(expected, actual)
    # Written so that NaN is a difference.
    if not changed <= tolerance(expected.dtype):
        raise PassError(f"a sequence's logits changed by {changed:.1%} of their spread")
    logger.info("passes_applied merged=%d packed=%d", len(merged), len(packed))
