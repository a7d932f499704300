"""Which linear layers of a model may be replaced, found by watching a forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def watch_linears(model: nn.Module, forward: Callable[[], object]) -> dict[str, torch.Tensor]:
    """What the linear layers that may be replaced were first called with by `forward`, by path."""
    return {name: inputs[0] for name, inputs in watch_calls(model, forward).items()}


def watch_calls(model: nn.Module, forward: Callable[[], object]) -> dict[str, list[torch.Tensor]]:
    """Watch what `forward` does with the linear layers of `model`. Returns what those that may be replaced were called
    with, by path: it called them with one tensor each time and did nothing else with them.

    Never replaceable are subclasses (quantized or otherwise special), layers with hooks, and layers that are reached
    by more than one path.
    """
    watched = {name: _WatchedLinear(linear) for name, linear in replaceable_linears(model).items()}
    for name, layer in watched.items():
        replace(model, name, layer)
    try:
        forward()
    finally:
        for name, layer in watched.items():
            replace(model, name, layer.linear)
    return {name: layer.inputs for name, layer in watched.items() if layer.inputs and not layer.is_more_than_called}


def replaceable_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers that look as if something else that computes the same could take their place, by path."""
    num_paths = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and num_paths[id(module)] == 1 and not has_hooks(module)
    }


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place that the path `name` leads to."""
    parent, _, own_name = name.rpartition(".")
    model.get_submodule(parent).register_module(own_name, module)


class _WatchedLinear(nn.Module):
    """Stands in for a linear layer, and notes what is done with it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        # Not as a submodule: nobody is to reach the layer but through us.
        self._watched = (linear,)
        self.inputs: list[torch.Tensor] = []
        self.is_more_than_called = False

    @property
    def linear(self) -> nn.Linear:
        return self._watched[0]

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 1 and not kwargs:
            self.inputs.append(args[0])
        else:
            self.is_more_than_called = True
        return self.linear(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Called for what a module does not have: `weight`, for instance."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            self.is_more_than_called = True
            return getattr(self.linear, name)


def has_hooks(module: nn.Module) -> bool:
    """Whether anybody else does something when `module` is called."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
