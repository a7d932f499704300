"""A loaded model with room for adapters: how they get there, and whose tokens are computed with which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from engine_core.config import EngineConfig
from engine_core.errors import AdapterError
from engine_core.lora.adapter import Adapter
from engine_core.model.device_queue import DeviceQueue
from engine_core.model.passes.fusing import FusedLayers
from engine_core.model.passes.linear_layers import replace
from engine_core.model.staging import Staging
from engine_core.runner import ScheduledRequest
from kernels import lora_in_c
from kernels.lora import LoraPart, LoraWeights
from kernels.lora_batch import LoraBatch, lora_batch
from kernels.lora_in_c import LoraSlots
from kernels.one_thread import chunks

from .adapter_rooms import AdapterRooms, OutputSlice, PointerRoom, PointerRooms, TensorRooms, TensorShape
from .adapter_rows import AdapterRows, LayerAdapters, RowKind
from .adapter_tensors import ModuleShape
from .lora_linear import LoraLinear
from .pace import Pace, Work
from .read_adapter import read_adapter_tensors
from .target_layers import TargetLayer, find_targets, linear_shapes


class AdapterTargets:
    """What has to be known of a model before passes change it.

    Attributes:
        adapters: for layers that passes make.
        linears: all there are, by path.
        layers: those that can have adapters.
        output_head: the path of what makes logits.
    """

    def __init__(self, model: Any, model_config: Any, config: EngineConfig, *, takes_pictures: bool) -> None:
        self.max_rank = config.max_lora_rank
        self.adapters = LayerAdapters(config.max_loras, AdapterRows())
        self.linears: Mapping[str, ModuleShape] = linear_shapes(model)
        self.layers: Mapping[str, TargetLayer] = find_targets(model, model_config, takes_pictures=takes_pictures)
        head = model.get_output_embeddings()
        self.output_head = next((name for name, module in model.named_modules() if module is head), None)


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """Of a step: `slots` `[num_tokens]`, −1 where a token has none, and the same for layers that see every token."""

    slots: np.ndarray
    tokens: LoraBatch


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """`Adapter.weights`: what each of the rooms made of it."""

    by_rooms: Sequence[Any]
    changes_logits: bool


class ModelAdapters:
    """Makes room in `model`, whose passes have been applied, in every layer that can have adapters.

    Attributes:
        rows: what its layers look at; nothing but while something is computed.
        pace: is told when a step begins; adapters are read in the pauses.
    """

    def __init__(
        self, model: nn.Module, targets: AdapterTargets, device: torch.device, queue: DeviceQueue | None
    ) -> None:
        self._targets, self._device = targets, device
        self.rows = targets.adapters.rows
        self.pace = Pace()
        self._rooms = _make_rooms(model, targets, device, queue)
        self._changes_logits = np.zeros(targets.adapters.num_slots, dtype=bool)

    @property
    def num_slots(self) -> int:
        return self._targets.adapters.num_slots

    def read(self, path: Path, root: Path | None) -> Adapter:
        """As `engine_core.runner.Runner.read_adapter`."""
        targets, work = self._targets, Work(self.pace)
        found = read_adapter_tensors(
            path, root, targets.linears, targets.max_rank, output_head=targets.output_head, pause=work.pause
        )
        for name, part in found.parts.items():
            _check(name, part, targets.layers.get(name))
            work.pause()
        packed, num_bytes = zip(*(rooms.pack(found.parts, work.pause) for rooms in self._rooms), strict=True)
        kinds = {targets.layers[name].rows for name in found.parts}
        return Adapter(
            digest=found.digest,
            rank=max(len(part.a) for part in found.parts.values()),
            target_modules=tuple(sorted({name.rpartition(".")[2] for name in found.parts})),
            targets_encoder=RowKind.PICTURES in kinds,
            base_model=found.base_model,
            num_bytes=sum(num_bytes),
            weights=_Packed(packed, RowKind.LOGITS in kinds),
        )

    def place(self, slot: int, adapter: Adapter) -> None:
        """As `engine_core.runner.Runner.place_adapter`."""
        weights: _Packed = adapter.weights
        for rooms, packed in zip(self._rooms, weights.by_rooms, strict=True):
            rooms.place(slot, packed)
        self._changes_logits[slot] = weights.changes_logits

    def clear(self, slot: int) -> None:
        """As `engine_core.runner.Runner.clear_adapter`."""
        for rooms in self._rooms:
            rooms.clear(slot)
        self._changes_logits[slot] = False

    def of_step(self, batch: Sequence[ScheduledRequest], staging: Staging) -> StepAdapters | None:
        """None if nobody has an adapter."""
        of_requests = slots_of_requests(batch)
        if of_requests is None:
            return None
        slots = np.repeat(of_requests, [item.num_tokens for item in batch])
        return StepAdapters(slots, lora_batch(slots, self._device, upload=staging.upload))

    def computing(self, step: StepAdapters, places: np.ndarray, staging: Staging) -> AbstractContextManager[None]:
        """Within it, `step` is computed, and logits of what is at these `places`."""
        slots = step.slots[places]
        slots = np.where((slots >= 0) & self._changes_logits[slots], slots, -1)
        logits = lora_batch(slots, self._device, upload=staging.upload) if (slots >= 0).any() else None
        return self.rows.of_step(step.tokens, logits)


def slots_of_requests(batch: Sequence[ScheduledRequest]) -> np.ndarray | None:
    """`[num_requests]`, −1 where there is no adapter; None if nobody has one."""
    if all(item.adapter_slot is None for item in batch):
        return None
    return np.array([-1 if item.adapter_slot is None else item.adapter_slot for item in batch], dtype=np.int64)


def _check(name: str, part: LoraPart, layer: TargetLayer | None) -> None:
    """Raises AdapterError for what cannot be computed here, though PEFT could."""
    if layer is None:
        raise AdapterError(
            f"the adapter changes {name}, which this model does not compute once for every token (experts, for"
            " instance); that cannot be served",
            "invalid_adapter",
            "lora_path",
        )
    if layer.dtype is torch.float16:
        largest = torch.finfo(torch.float16).max
        if any(chunk.abs().max() > largest for tensor in (part.a, part.b) for chunk in chunks(tensor)):
            raise AdapterError(
                f"the adapter's weights for {name} are beyond {largest:.0f}, the largest number of float16, in which"
                " the model is computed",
                "invalid_adapter",
                "lora_path",
            )


def _make_rooms(
    model: nn.Module, targets: AdapterTargets, device: torch.device, queue: DeviceQueue | None
) -> list[AdapterRooms]:
    pointers = list(_rooms_of_fused(model))
    fused = {of_slice.path for room in pointers for of_slice in room.slices}
    in_tensors: list[str] = []
    for name, layer in targets.layers.items():
        if name in fused:
            continue
        if queue is not None or not lora_in_c.is_available(layer.dtype):
            in_tensors.append(name)
            continue
        shape = layer.shape
        slots = LoraSlots(targets.adapters.num_slots, shape.in_features, shape.out_features, layer.dtype)
        pointers.append(
            PointerRoom([OutputSlice(name, 0, shape.out_features)], shape.in_features, layer.dtype, slots.place)
        )
        _wrap(model, name, slots, targets)
    rooms: list[AdapterRooms] = [PointerRooms(pointers)]
    if in_tensors:
        shapes = [
            TensorShape(name, layer.shape.in_features, layer.shape.out_features, layer.dtype)
            for name, layer in ((name, targets.layers[name]) for name in in_tensors)
        ]
        tensors = TensorRooms(shapes, targets.adapters.num_slots, targets.max_rank, device, queue)
        for name, weights in zip(in_tensors, tensors.weights, strict=True):
            _wrap(model, name, weights, targets)
        rooms.append(tensors)
    return rooms


def _rooms_of_fused(model: nn.Module) -> Iterator[PointerRoom]:
    for module in model.modules():
        if isinstance(module, FusedLayers):
            yield from module.adapter_rooms()


def _wrap(model: nn.Module, name: str, weights: LoraWeights | LoraSlots, targets: AdapterTargets) -> None:
    replace(
        model, name, LoraLinear(model.get_submodule(name), weights, targets.adapters.rows, targets.layers[name].rows)
    )
