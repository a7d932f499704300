"""Pictures through a model's own vision tower."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ipc.vocabulary import MultimodalFeature

from .support import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """What `Runner.encode` makes of a feature: `rows` `[num_embeds, hidden_size]` take the place of its placeholders'
    embeddings. What the first decoder layers add to the same places is in `deepstack`, of the same shape each.
    """

    rows: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()


def picture_owner(model: Any) -> Any:
    """The module that turns pictures into rows and knows their positions: mostly the one below the head."""
    base = getattr(model, "model", None)
    return base if hasattr(base, "get_image_features") else model


class PictureEncoder:
    """Calls `get_image_features` of a loaded model.

    Attributes:
        num_deepstack: how many decoder layers are given rows of their own.
        row_bytes: what one row weighs, those for the layers included.

    Raises:
        UnsupportedModelError: its decoder layers are given rows in another way than Qwen3-VL's.
    """

    def __init__(self, model: Any, config: Any) -> None:
        self._owner = picture_owner(model)
        parameters = inspect.signature(self._owner.get_image_features).parameters.values()
        named = [p for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
        self._known = frozenset(p.name for p in named)
        self._required = [p.name for p in named if p.default is p.empty]
        self._embeddings = model.get_input_embeddings()
        self.num_deepstack = _num_deepstack(model, config)
        weight = self._embeddings.weight
        self._hidden_size: int = config.get_text_config(decoder=True).hidden_size
        self.row_bytes: int = self._hidden_size * weight.dtype.itemsize * (1 + self.num_deepstack)

    @torch.inference_mode()
    def encode(
        self,
        feature: MultimodalFeature,
        inputs: Mapping[str, np.ndarray],
        computing: AbstractContextManager[None] | None = None,
    ) -> EncodedRows:
        """The rows of one feature, in the model's dtype on its device. Inputs the model does not name are left out. The
        tower is called within `computing`.

        Raises:
            ValueError: the inputs are not those of this feature, or not numbers the tower can compute with.
            RuntimeError, MemoryError: the machine has no room for it, or failed.
        """
        tensors = self._tensors(feature, inputs)
        try:
            with computing or nullcontext():
                output = self._owner.get_image_features(**tensors, return_dict=True)
        except Exception as error:  # whatever a tower raises for shapes it does not expect
            if _is_the_machines(error):
                raise
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
            raise ValueError(f"the vision tower cannot compute {shapes}: {error}") from error
        layers = getattr(output, "deepstack_features", None) or ()
        if len(layers) != self.num_deepstack:
            raise ValueError(f"the vision tower made rows for {len(layers)} decoder layers, not {self.num_deepstack}")
        return EncodedRows(
            self._rows(feature, output.pooler_output), tuple(self._rows(feature, layer) for layer in layers)
        )

    def _tensors(self, feature: MultimodalFeature, inputs: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        missing = [name for name in self._required if name not in inputs]
        if missing:
            raise ValueError(f"the model needs {', '.join(missing)}; there is {', '.join(sorted(inputs)) or 'nothing'}")
        for name, numbers in feature.layout.items():
            if name in inputs and tuple(inputs[name].flat) != numbers:
                raise ValueError(f"{name}: {inputs[name].tolist()} is not the layout of this picture, {list(numbers)}")
        return {name: self._tensor(name, inputs[name]) for name in inputs if name in self._known}

    def _tensor(self, name: str, array: np.ndarray) -> torch.Tensor:
        if array.dtype.kind not in "fiub":
            raise ValueError(f"{name}: is of {array.dtype}, not numbers")
        if array.size == 0:
            raise ValueError(f"{name}: is empty, of shape {array.shape}")
        if array.dtype.kind == "f":
            if not np.isfinite(array).all():
                raise ValueError(f"{name}: has values that are not finite")
            return torch.tensor(array).to(self._embeddings.weight.device, self._embeddings.weight.dtype)
        if array.dtype.kind != "b":
            array = array.astype(np.int64)
        return torch.tensor(array).to(self._embeddings.weight.device)

    def _rows(self, feature: MultimodalFeature, output: Any) -> torch.Tensor:
        """Of one tensor, or of one for each picture or tile."""
        parts = [output] if isinstance(output, torch.Tensor) else list(output)
        rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        if rows.shape != (feature.num_embeds, self._hidden_size):
            raise ValueError(
                f"the vision tower made {rows.shape[0]} rows of {rows.shape[1]} values; the prompt has room for"
                f" {feature.num_embeds} of {self._hidden_size}"
            )
        # A copy: a view would keep all that the tower computed.
        return rows.to(self._embeddings.weight.dtype, copy=True)


def _is_the_machines(error: Exception) -> bool:
    """Whether no other inputs would have helped: there was no memory, or the device failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    # What torch raises on a CPU is of no kind of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _num_deepstack(model: Any, config: Any) -> int:
    if "deepstack_visual_embeds" in inspect.signature(model.get_decoder().forward).parameters:
        return len(config.vision_config.deepstack_visual_indexes)
    parts = (config, getattr(config, "vision_config", config))
    deepstack = sorted(
        {f for part in parts for f, value in part.to_dict().items() if f.startswith("deepstack") and value}
    )
    if deepstack:
        raise UnsupportedModelError(
            f"{config.model_type}: its decoder layers are given pictures in a way of its own ({', '.join(deepstack)})"
        )
    return 0
