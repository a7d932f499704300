"""Tiny random models of vision-language architectures nobody here has looked at, as `any_architecture` for texts."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import transformers

from engine_core import EngineConfig
from engine_core.model.runner import ModelRunner
from engine_core.model.support import UnsupportedModelError, check_config, check_model_class, check_picture_class

from .any_architecture import SIZES, CannotBeMadeError, save_random_model

_TEXT = SIZES | {
    "num_hidden_layers": 2,
    "num_layers": 2,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 2,
    "image_token_id": 250,
}
# Tried in turn: what to change of a decoder. M-RoPE wants to know which dimensions turn with time, height and width.
_ADJUSTMENTS: tuple[dict[str, Any], ...] = (
    {},
    *(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}}
        for sections in ([2, 3, 3], [2, 1, 1])
    ),
    {"sliding_window": SIZES["sliding_window"], "layer_types": ["sliding_attention", "full_attention"]},
)
_VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size", "num_position_embeddings"), 64),
    **dict.fromkeys(("lm_hidden_size", "text_hidden_size", "projector_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "mlp_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads"), 4),
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 8,
    "mlp_ratio": 2,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
    "initializer_range": 0.2,
}
_WHOLE: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "vision_hidden_size", "projection_dim", "qformer_hidden_size"), 64),
    **dict.fromkeys(("image_token_id", "image_token_index"), 250),
    **dict.fromkeys(("video_token_id", "video_token_index"), 251),
    "mm_tokens_per_image": 4,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def try_to_serve(config_class: Any, directory: Path) -> None:
    """Load a random model of this configuration class as an engine does.

    Raises:
        UnsupportedModelError: it is refused, with the reason.
        CannotBeMadeError: no small model of it can be made from sizes alone.
    """
    model_class = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    _check(model_class, config_class())
    refusals, errors = [], []
    for adjustment in _ADJUSTMENTS:
        shutil.rmtree(directory, ignore_errors=True)
        try:
            config = _tiny_config(config_class, _TEXT | adjustment)
            _check(model_class, config)
            save_random_model(model_class, config, directory)
            runner = ModelRunner(EngineConfig(model=str(directory), dtype="float32", device="cpu", num_blocks=8))
            assert runner.info.multimodal is not None
        except UnsupportedModelError as refusal:
            # Its code failed: for want of pixels, or because of our sizes.
            if refusal.__cause__ is None or "pixel_values" in str(refusal):
                refusals.append(refusal)
            else:
                errors.append(str(refusal))
        except Exception as error:  # each architecture has its own way of refusing sizes
            errors.append(f"{type(error).__name__}: {error}")
        else:
            return
    if refusals:
        raise refusals[0]
    raise CannotBeMadeError(errors[0])


def _check(model_class: Any, config: Any) -> None:
    check_config(config)
    check_model_class(model_class)
    check_picture_class(model_class)


def _tiny_config(config_class: Any, text: dict[str, Any]) -> Any:
    own = config_class()
    text_config = own.get_text_config(decoder=True)
    parts = {}
    for name, part_class in own.sub_configs.items():
        part = getattr(own, name, None)
        if part is None and name == "vision_config":
            part = part_class()  # this class has no tower unless it is asked for one
        if part is not None:
            fields = _known(type(part), text if part is text_config else _VISION)
            parts[name] = {"model_type": part.model_type} | fields
    return config_class(**parts, **_known(config_class, _WHOLE if parts else text))


def _known(config_class: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Those that the class has, under one name each."""
    known = set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    try:
        known |= set(config_class().to_dict())
    except Exception:  # some configurations have no defaults
        known |= set(fields)
    aliases = {name for name, real in config_class.attribute_map.items() if real in fields and real in known}
    return {name: value for name, value in fields.items() if name in known - aliases}
