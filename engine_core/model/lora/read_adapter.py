"""PEFT directory → `AdapterTensors`: everything right for the model at hand, or a reason why not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .adapter_tensors import AdapterTensors, ModuleShape


def read_adapter_tensors(
    path: Path, root: Path | None, modules: Mapping[str, ModuleShape], max_rank: int, *, output_head: str | None
) -> AdapterTensors:
    """The LoRA adapter in the directory `path`, checked to compute on this model what PEFT would compute.

    Args:
        path: has `adapter_config.json` and `adapter_model.safetensors`.
        root: where given, the directory and both files must lie below it, links followed.
        modules: all `nn.Linear` of the base model by their paths in it, as transformers names them.
        max_rank: of any module.
        output_head: which of `modules` makes logits; `all-linear` leaves it out.

    Any thread may call this. Raises AdapterError.
    """
    raise NotImplementedError
