"""Which decoder layers are of the common kind, found by watching a forward.

Names say where to look: `self_attn`, `mlp`, `q_proj`. What is there must then do nothing but what
`kernels.decoder_layers` does. A few tokens do not show that alone (a layer may clip what is large, or scale what is far
from the beginning), so besides its output everything that a layer computes outside its linear layers, norms and
activation is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from engine_core.model.attention import AttentionOptions, LayerKV

Result = TypeVar("Result")

# What rotates queries and keys, what gates, and the two residuals.
ROTARY_OPERATIONS = Counter(mul=4, add=2, neg=2)
OTHER_OPERATIONS = Counter(mul=1, add=2)
# They move values or look at them in another way; `dropout` does nothing but in training.
_MOVING = frozenset(
    "_to_copy _unsafe_view alias cat chunk clone copy_ detach dropout empty expand permute reshape select slice split"
    " split_with_sizes squeeze t to transpose unsqueeze view".split()
)


@dataclass(slots=True)
class WatchedCall:
    """A layer's first argument, what it returned, and its `position_embeddings`, `[1, num_tokens, rotary_dim]` each;
    None if it was given none.
    """

    x: torch.Tensor
    cosines: torch.Tensor | None
    sines: torch.Tensor | None
    y: torch.Tensor | None = None


@dataclass(slots=True)
class WatchedLayer:
    """What one call of a layer showed.

    Attributes:
        operations: what it computed itself, by name of the operator, its `parts` and attention left out.
        options, shape: how it attended; heads, KV heads and the size of both, None where keys and values differ.
    """

    parts: dict[str, nn.Module]
    call: WatchedCall
    operations: Counter[str]
    options: AttentionOptions | None = None
    shape: tuple[int, int, int] | None = None


def watch_layers(
    model: nn.Module, parts_of: Callable[[nn.Module], dict[str, nn.Module]], forward: Callable[[], Result]
) -> tuple[dict[str, tuple[nn.Module, WatchedLayer]], Result]:
    """Watch what `forward` does with modules that have parts. Returns those that were called as a decoder calls its
    layers, once, by path, and what `forward` returned.
    """
    watched: dict[str, tuple[nn.Module, WatchedLayer]] = {}
    unusual: set[str] = set()
    handles: list[RemovableHandle] = []
    for name, module in model.named_modules():
        if parts := parts_of(module):
            handles += _hooks(name, module, parts, watched, unusual)
    try:
        result = forward()
    finally:
        for handle in handles:
            handle.remove()
    return {name: layer for name, layer in watched.items() if name not in unusual}, result


def _hooks(
    name: str,
    layer: nn.Module,
    parts: dict[str, nn.Module],
    watched: dict[str, tuple[nn.Module, WatchedLayer]],
    unusual: set[str],
) -> Iterator[RemovableHandle]:
    counting = _Counting()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cosines, sines = kwargs.get("position_embeddings") or (None, None)
        layer_kv = kwargs.get("layer_kv")
        if name in watched or len(args) != 1 or layer_kv is None:
            unusual.add(name)
            return None
        seen = WatchedLayer(parts, WatchedCall(args[0], cosines, sines), counting.operations)
        watched[name] = layer, seen
        counting.__enter__()
        return args, kwargs | {"layer_kv": _WatchedKV(layer_kv, seen, counting)}

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # Others' hooks may have failed before ours.
        if name in unusual or name not in watched:
            return
        counting.__exit__(None, None, None)
        if not isinstance(output, torch.Tensor):
            unusual.add(name)
        watched[name][1].call.y = output

    yield layer.register_forward_pre_hook(before, with_kwargs=True)
    # Also if they fail: a mode that is not left stays with its thread for ever.
    yield layer.register_forward_hook(after, always_call=True)
    for part in parts.values():
        yield part.register_forward_pre_hook(lambda *_: counting.pause())
        yield part.register_forward_hook(lambda *_: counting.resume(), always_call=True)


class _Counting(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self._num_pauses = 0

    def pause(self) -> None:
        self._num_pauses += 1

    def resume(self) -> None:
        self._num_pauses -= 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self._num_pauses and name not in _MOVING:
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class _WatchedKV:
    """Passes on to the layer's own, and notes what it is told."""

    layer_kv: LayerKV
    seen: WatchedLayer
    counting: _Counting

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        self.seen.options = options
        if query.shape[2] == value.shape[2]:
            self.seen.shape = query.shape[1], key.shape[1], query.shape[2]
        with self.counting.paused():
            return self.layer_kv.attend(layer_idx, query, key, value, options)
