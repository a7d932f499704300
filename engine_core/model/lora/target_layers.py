"""Which linear layers of a model an adapter may change, and what the rows are that they are called with.

Found by watching a text being computed, in order, in reverse, and a single token of it. A layer of the decoder that is
called once each time, with a row for every token in the order in which they were given, can tell whose row is whose; a
mixture's experts, which are given some rows, cannot. What belongs to neither the decoder nor the head and computes no
text is for pictures: there, all rows are one picture's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine_core.model.passes.linear_layers import replaceable_linears, watch_calls
from engine_core.model.probe import logits_in_order, num_probe_tokens

from .adapter_rows import RowKind
from .adapter_tensors import ModuleShape


@dataclass(frozen=True, slots=True)
class TargetLayer:
    """A linear layer as it was before any pass; `dtype` is its weight's."""

    shape: ModuleShape
    dtype: torch.dtype
    rows: RowKind


def linear_shapes(model: nn.Module) -> dict[str, ModuleShape]:
    """All linear layers of a model as transformers has it, by path, usable or not."""
    return {
        name: ModuleShape(module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }


@torch.inference_mode()
def find_targets(model: Any, config: Any, *, takes_pictures: bool) -> dict[str, TargetLayer]:
    """Those that can be served with adapters, by path. `model` is as transformers has it, without passes."""
    num_tokens = num_probe_tokens(model, config)
    in_order = list(range(num_tokens))
    place = num_tokens // 3

    def watch(order: Sequence[int], places: Sequence[int]) -> dict[str, list[torch.Tensor]]:
        return watch_calls(model, lambda: logits_in_order(model, config, order, places))

    all_places, one_place = watch(in_order, in_order), watch(in_order[::-1], [place])
    one_token = watch([0], [0])
    decoder = {id(module) for module in model.get_decoder().modules()}
    targets: dict[str, TargetLayer] = {}
    for name, linear in replaceable_linears(model).items():
        calls = [seen[name] for seen in (all_places, one_place, one_token) if name in seen]
        kind = None
        if calls:
            kind = _kind(calls, in_order[::-1], place)
        elif takes_pictures and id(linear) not in decoder:
            kind = RowKind.PICTURES
        if kind is not None:
            shape = ModuleShape(linear.in_features, linear.out_features)
            targets[name] = TargetLayer(shape, linear.weight.dtype, kind)
    return targets


def _kind(calls: Sequence[Sequence[torch.Tensor]], reverse: Sequence[int], place: int) -> RowKind | None:
    if len(calls) != 3 or any(len(inputs) != 1 for inputs in calls):
        return None
    in_order, other, one = (inputs[0].reshape(-1, inputs[0].shape[-1]).float() for inputs in calls)
    if len(in_order) != len(reverse) or len(one) != 1:
        return None
    # Whatever rounding or a mixture's choice of experts makes of a row, it is nearest to itself.
    nearest = torch.cdist(other, in_order).argmin(dim=1).tolist()
    if nearest == list(reverse):
        return RowKind.TOKENS
    return RowKind.LOGITS if nearest == [reverse[place]] else None
