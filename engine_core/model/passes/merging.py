"""Linear layers that read the same tensor (query, key and value; gate and up) computed as one.

Small products cost a matrix library more in starting than in computing. The layers keep their places in the module
tree: the first one called computes all, the others take their part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .linear_layers import replace


class MergedLinear(nn.Module):
    """Several linear layers over one input as one, `linear`, whose output is theirs side by side."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.linear = _side_by_side(linears)
        self._sizes = [linear.out_features for linear in linears]
        self._untaken = _Untaken()

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The output of the layer `index` for `x`, computed once for all layers called with the same tensor."""
        untaken = self._untaken
        if x is not untaken.input or index not in untaken.parts:
            untaken.input = x
            untaken.parts = dict(enumerate(self.linear(x).split(self._sizes, dim=-1)))
        output = untaken.parts.pop(index)
        if not untaken.parts:
            untaken.input = None
        return output


@dataclass(slots=True)
class _Untaken:
    """Parts of the output for `input` that their layers have not been called for. An object of its own because
    setting an attribute of a module takes as long as a small product.
    """

    input: torch.Tensor | None = None
    parts: dict[int, torch.Tensor] = field(default_factory=dict)


class MergedPart(nn.Module):
    """One of the layers of a `MergedLinear`, in the place of the original."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self.merged = merged
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.merged.part(self._index, x)


def merge_linears(model: nn.Module, groups: Sequence[Sequence[str]]) -> dict[str, str]:
    """Merge each group of paths of `nn.Linear`s, if all or none have a bias and the weights are nobody else's.

    Returns the path of each merged layer, and that of the `nn.Linear` which now computes it.
    """
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    merged_names: dict[str, str] = {}
    for names in groups:
        linears = [model.get_submodule(name) for name in names]
        if (
            any(owners[id(linear.weight)] > 1 for linear in linears)
            or len({linear.bias is None for linear in linears}) > 1
        ):
            continue
        merged = MergedLinear(linears)
        for index, name in enumerate(names):
            replace(model, name, MergedPart(merged, index))
            merged_names[name] = f"{names[0]}.merged.linear"
    return merged_names


def _side_by_side(linears: Sequence[nn.Linear]) -> nn.Linear:
    first = linears[0]
    size = sum(linear.out_features for linear in linears)
    # On "meta" nothing is allocated for weights that are replaced at once.
    merged = nn.Linear(first.in_features, size, bias=first.bias is not None, device="meta")
    merged.weight = _frozen(torch.cat([linear.weight for linear in linears]))
    if first.bias is not None:
        merged.bias = _frozen(torch.cat([linear.bias for linear in linears]))
    return merged.eval()


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
