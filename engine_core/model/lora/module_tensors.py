"""Names of an adapter's tensors → which is A and which is B of which module of the model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from .refusals import invalid_adapter, quoted, trained_on

# `base_model.model.` is where PEFT keeps the model. A name of the adapter's own stands in what old versions wrote.
_NAME = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")

_WHY_REFUSED = {
    "lora_embedding_": "LoRA on embeddings is not computed here",
    "lora_magnitude_vector": "DoRA is not computed here",
    "modules_to_save": "whole layers that replace the model's are not computed here",
    ".bias": "biases of LoRA layers are not computed here",
}

# What transformers called parts of models with pictures before its version 4.52, and calls them since.
_RENAMED = (
    ("language_model.lm_head", "lm_head"),
    ("language_model.model.", "model.language_model."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("visual.", "model.visual."),
)
# Only beside `visual`: elsewhere such a path is a text model's.
_RENAMED_BESIDE_VISUAL = ("model.", "model.language_model.")


class ModuleTensors(NamedTuple):
    """Names of one module's tensors in the file, and what the file calls the module."""

    a: str
    b: str
    called: str


def tensors_by_module(
    names: Collection[str], modules: Collection[str], file_name: str, base_model: str
) -> Mapping[str, ModuleTensors]:
    """By path. `modules` are the model's linear layers, `base_model` is what the adapter says it was trained on.

    Raises AdapterError for any name that is not of an A or B of one of them, and for one without the other.
    """
    found: dict[str, dict[str, str]] = {}
    called: dict[str, str] = {}
    adapters = set()
    renamed = _renamed(modules)
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise invalid_adapter(f"{file_name}: {quoted(name)} is no weight of LoRA on a linear layer{_why(name)}")
        path = next((path for path in _paths(match["path"], renamed) if path in modules), None)
        if path is None:
            raise invalid_adapter(
                f"{file_name}: {quoted(match['path'])} is no linear layer of this model, so it looks like an adapter "
                f"of another one{trained_on(base_model)}"
            )
        adapters.add(match["adapter"])
        if len(adapters) > 1:
            raise invalid_adapter(f"{file_name} has weights of several adapters: {quoted(sorted(map(str, adapters)))}")
        if called.setdefault(path, match["path"]) != match["path"]:
            raise invalid_adapter(f"{file_name} has weights for {quoted(path)} under two names")
        found.setdefault(path, {})[match["side"]] = name
    for path, sides in found.items():
        if len(sides) == 1:
            have, miss = ("A", "B") if "A" in sides else ("B", "A")
            raise invalid_adapter(f"{file_name}: {quoted(path)} has lora_{have} and no lora_{miss}")
    return {path: ModuleTensors(sides["A"], sides["B"], called[path]) for path, sides in found.items()}


def _why(name: str) -> str:
    return next((f": {why}" for part, why in _WHY_REFUSED.items() if part in name), "")


def _renamed(modules: Collection[str]) -> tuple[tuple[str, str], ...]:
    has_visual = any(path.startswith("model.visual.") for path in modules)
    return (*_RENAMED, _RENAMED_BESIDE_VISUAL) if has_visual else _RENAMED


def _paths(path: str, renamed: tuple[tuple[str, str], ...]) -> Iterator[str]:
    yield path
    for before, since in renamed:
        if path.startswith(before):
            yield since + path.removeprefix(before)
