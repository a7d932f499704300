"""A random model of every vision-language family Foreword is tested with, on top of that family's tiny processor.

As in `tiny_models`, weights come from a fixed seed, embeddings are untied and far larger than what training starts
from; the towers, too, are such that what a model answers depends on every part of a picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny_vlm_processors import FAMILIES, GEOMETRY, save_tiny_processor

TINY_VLM_MAX_MODEL_LEN = 1024
TINY_WINDOW = 8

_HIDDEN_SIZE = 64
_HEAD_DIM = 16
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_channels": 3,
    "initializer_range": 0.2,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 3,
    "num_heads": 2,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
}
_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
# Halves of the heads' dimensions that turn with time, height and width.
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_INTERLEAVED = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}

# family → configuration class, text configuration, vision configuration, fields of the whole, tokens by field
_Family = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, str]]
_FAMILIES: dict[str, _Family] = {
    "llava": (
        "LlavaConfig",
        {"model_type": "llama"},
        {"model_type": "clip_vision_model"},
        {"vision_feature_select_strategy": "default"},
        {"image_token_index": "<image>"},
    ),
    "llava_next": (
        "LlavaNextConfig",
        {"model_type": "mistral"},
        {"model_type": "clip_vision_model"},
        {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]},
        {"image_token_index": "<image>"},
    ),
    "llava_onevision": (
        "LlavaOnevisionConfig",
        {"model_type": "qwen2"},
        {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"image_grid_pinpoints": [[28 * row, 28 * column] for row in range(1, 5) for column in range(1, 5)]},
        {"image_token_index": "<image>", "video_token_index": "<video>"},
    ),
    "qwen2_vl": (
        "Qwen2VLConfig",
        {"rope_parameters": _SECTIONS},
        _QWEN_VISION | {"embed_dim": 32, "hidden_size": _HIDDEN_SIZE, "mlp_ratio": 2},
        {},
        _QWEN_TOKENS,
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        {"rope_parameters": _SECTIONS},
        _QWEN_VISION
        | {
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": _HIDDEN_SIZE,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        {},
        _QWEN_TOKENS,
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {"rope_parameters": _INTERLEAVED, "head_dim": _HEAD_DIM},
        _QWEN_VISION
        | {
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": _HIDDEN_SIZE,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        {},
        _QWEN_TOKENS,
    ),
    "idefics3": ("Idefics3Config", {"model_type": "llama"}, {}, {"scale_factor": 2}, {"image_token_id": "<image>"}),
    "smolvlm": ("SmolVLMConfig", {"model_type": "llama"}, {}, {"scale_factor": 2}, {"image_token_id": "<image>"}),
    "internvl": (
        "InternVLConfig",
        {"model_type": "qwen2"},
        {},
        {"image_seq_length": 4},
        {"image_token_id": "<IMG_CONTEXT>"},
    ),
    "gemma3": (
        "Gemma3Config",
        {
            "head_dim": _HEAD_DIM,
            "query_pre_attn_scalar": _HEAD_DIM,
            "sliding_window": TINY_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {"vision_use_head": False},
        {"mm_tokens_per_image": 4, "initializer_range": 0.3},
        {
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
    ),
    "mistral3": (
        "Mistral3Config",
        {"model_type": "mistral", "head_dim": _HEAD_DIM, "sliding_window": None},
        {"model_type": "pixtral", "head_dim": 16},
        {"spatial_merge_size": 2},
        {"image_token_index": "[IMG]"},
    ),
}
assert set(_FAMILIES) == set(FAMILIES)


def make_tiny_vlm(family: str, directory: Path, *, seed: int = 0) -> Path:
    """Write a random float32 model of one of `FAMILIES` with its processor and tokenizer, and return its directory."""
    save_tiny_processor(family, directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    config_class, text, vision, whole, tokens = _FAMILIES[family]
    image_size, patch_size = GEOMETRY[family]
    vision = {"patch_size": patch_size} | (_VISION if vision.get("depth") is None else {}) | vision
    if image_size is not None:
        vision["image_size"] = image_size
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": _HIDDEN_SIZE,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TINY_VLM_MAX_MODEL_LEN,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    } | text
    config = getattr(transformers, config_class)(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **whole,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()},
    )
    model_class = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(config)
        for parameter in model.parameters():
            # Norms and biases begin as ones and zeros, and some parts of a model as all zeros.
            if parameter.dim() == 1 or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.3))
        if family == "gemma3":
            # It multiplies them by 8, and then says again and again what it was told last.
            model.get_input_embeddings().weight.mul_(0.125)
    model.generation_config = transformers.GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.to(torch.float32).save_pretrained(directory)
    return directory
