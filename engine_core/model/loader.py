"""A local transformers directory → a module on the device whose decoder attends through us."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from engine_core.errors import InvalidConfigError

from .attention import ATTENTION_NAME
from .progress import transformers_progress
from .support import UnsupportedModelError, check_config, check_model_class, check_picture_class

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU.

    Raises:
        InvalidConfigError: no such device, or not one this build of torch can use.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidConfigError(f"device: {name!r} is not a device torch knows") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidConfigError(f"device: {name!r} was asked for, but torch sees no CUDA device")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes in it, else float32: emulated bfloat16 is slow and no more exact."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        computes = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        computes = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if computes else torch.float32


def load_config(path: Path) -> Any:
    """The model's configuration, if a model of this kind can be served.

    Raises:
        UnsupportedModelError: saying why not.
        InvalidConfigError: `path` is no transformers directory with a known configuration and safetensors weights.
    """
    if not (path / "config.json").is_file():
        raise InvalidConfigError(f"model: {path} has no config.json (see engine_core.resolve_model)")
    if not any(path.glob("*.safetensors")):
        raise InvalidConfigError(f"model: {path} has no *.safetensors (other weight formats are not loaded)")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise InvalidConfigError(f"model: transformers cannot read {path / 'config.json'}: {error}") from error
    check_config(config)
    check_model_class(_model_class(config))
    if takes_pictures(config):
        check_picture_class(_model_class(config))
    return config


def load_model(path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """The module in evaluation mode, its decoder calling `attention.attention_forward`. Nothing is downloaded.

    Raises:
        InvalidConfigError: the weight files cannot be read, lack a tensor or have one of another shape.
    """
    try:
        with transformers_progress(shown=sys.stderr.isatty()):
            model, loading = _model_class(config).from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=_attention_names(config),
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise InvalidConfigError(
            f"model: a *.safetensors file in {path} cannot be read (was it copied or downloaded to its end?): {error}"
        ) from error
    # transformers fills them with random numbers and goes on.
    missing = sorted(loading["missing_keys"])
    if missing:
        raise InvalidConfigError(f"model: the weights in {path} lack {', '.join(missing[:5])} ({len(missing)} missing)")
    return model.to(device).eval()


def end_of_sequence_ids(model: Any, config: Any) -> frozenset[int]:
    """Every token after which the model has ended, from its generation and its model configuration."""
    found: set[int] = set()
    for source in (model.generation_config, config.get_text_config(decoder=True)):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return frozenset(found)


def takes_pictures(config: Any) -> bool:
    """Whether it is a model for pictures and text, and this one has a vision tower (Gemma 4's is optional)."""
    has_tower = getattr(config, "vision_config", config) is not None
    return has_tower and type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def _model_class(config: Any) -> Any:
    # Some are in both: there the causal LM may be the decoder alone.
    for mapping in (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise UnsupportedModelError(
        f"{config.model_type} is neither a causal nor an image-text-to-text model in transformers"
    )


def _attention_names(config: Any) -> str | dict[str, str]:
    """Ours for the text decoder only: a plain string would also reach a vision tower, which keeps what transformers
    chooses for it (`sdpa`, where it can).
    """
    text_config = config.get_text_config(decoder=True)
    if text_config is config:
        return ATTENTION_NAME
    return {part: ATTENTION_NAME for part in config.sub_configs if getattr(config, part) is text_config}
