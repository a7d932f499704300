"""Adapters of a tiny Llama, whole and damaged, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from engine_core.model.lora.adapter_tensors import AdapterTensors, ModuleShape
from engine_core.model.lora.read_adapter import read_adapter_tensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 8


def bare_model(directory: Path) -> torch.nn.Module:
    """The model in that directory, without numbers."""
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        return getattr(transformers, config.architectures[0])(config)


def linear_layers(model: torch.nn.Module) -> dict[str, ModuleShape]:
    return {
        path: ModuleShape(module.in_features, module.out_features)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def read(directory: Path | str, model: Path, *, root: Path | None = None, max_rank: int = MAX_RANK) -> AdapterTensors:
    modules = linear_layers(bare_model(model))
    return read_adapter_tensors(Path(directory), root, modules, max_rank, output_head="lm_head", pause=lambda: None)


def change_settings(directory: Path, **settings: Any) -> None:
    path = directory / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def change_weights(
    directory: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor] | None]
) -> None:
    """`change` may alter the tensors by name, or return others."""
    tensors = load_file(directory / WEIGHTS)
    changed = change(tensors)
    save_file(dict(tensors if changed is None else changed), directory / WEIGHTS)
