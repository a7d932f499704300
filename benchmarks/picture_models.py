"""Vision-language models with random weights and the shape of small real ones: they cost as much, and say nothing.

The text model is SmolLM2-135M's configuration and tokenizer, which are built in, the tower SigLIP-base's; in bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_core import resolve_model

_SIGLIP_BASE = {
    "model_type": "siglip_vision_model",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "patch_size": 16,
    "vision_use_head": False,
}
_VALUES = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
}
_TEMPLATE = (
    "{%% for message in messages %%}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'image' %%}{{ '%s' }}{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}"
    "{{ '<|im_end|>\n' }}{%% endfor %%}{%% if add_generation_prompt %%}{{ '<|im_start|>assistant\n' }}{%% endif %%}"
)


@dataclass(frozen=True)
class _Kind:
    """`tokens`: fields of the configuration that are ids of them; `files` belong to the processor."""

    config_class: str
    vision: dict[str, Any]
    whole: dict[str, Any]
    tokens: dict[str, str]
    special_tokens: tuple[str, ...]
    files: dict[str, dict[str, Any]]
    picture: str = "<image>"
    named_tokens: Mapping[str, str] | None = None
    rope: Mapping[str, Any] | None = None


_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_KINDS = {
    # A picture of any size is 576 tokens.
    "llava": _Kind(
        "LlavaConfig",
        _SIGLIP_BASE | {"image_size": 384},
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        {"image_token_index": "<image>"},
        ("<image>",),
        {
            "preprocessor_config.json": _VALUES
            | {
                "image_processor_type": "SiglipImageProcessor",
                "processor_class": "LlavaProcessor",
                "resample": 3,
                "size": {"height": 384, "width": 384},
            },
            "processor_config.json": {
                "image_token": "<image>",
                "num_additional_image_tokens": 0,
                "patch_size": 16,
                "processor_class": "LlavaProcessor",
                "vision_feature_select_strategy": "full",
            },
        },
    ),
    # A square picture is four tiles and a small one of the whole, 64 tokens each and some between.
    "smolvlm": _Kind(
        "SmolVLMConfig",
        _SIGLIP_BASE | {"model_type": "smolvlm_vision", "image_size": 512},
        {"scale_factor": 4},
        {"image_token_id": "<image>"},
        ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *_TILES),
        {
            "preprocessor_config.json": _VALUES
            | {
                "image_processor_type": "SmolVLMImageProcessor",
                "processor_class": "SmolVLMProcessor",
                "do_image_splitting": True,
                "do_pad": True,
                "max_image_size": {"longest_edge": 512},
                "resample": 1,
                "size": {"longest_edge": 1024},
            },
            "processor_config.json": {"image_seq_len": 64, "processor_class": "SmolVLMProcessor"},
        },
        named_tokens={
            "end_of_utterance_token": "<end_of_utterance>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "image_token": "<image>",
        },
    ),
    # A picture of a megapixel is 1,296 tokens, whose positions are counted in three dimensions.
    "qwen2_vl": _Kind(
        "Qwen2VLConfig",
        {"depth": 12, "embed_dim": 768, "num_heads": 12, "mlp_ratio": 4, "hidden_size": 576, "patch_size": 14},
        {},
        {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        {
            "preprocessor_config.json": _VALUES
            | {
                "image_processor_type": "Qwen2VLImageProcessor",
                "processor_class": "Qwen2VLProcessor",
                "merge_size": 2,
                "patch_size": 14,
                "resample": 3,
                "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1296},
                "temporal_patch_size": 2,
            },
            "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor"},
        },
        picture="<|vision_start|><|image_pad|><|vision_end|>",
        rope={"rope_type": "default", "rope_theta": 100000.0, "mrope_section": [8, 12, 12]},
    ),
}
KINDS = tuple(_KINDS)


def save_picture_model(kind: str, directory: Path) -> None:
    """Write a model of one of `KINDS`, with its processor and tokenizer, about 500 MB."""
    import torch
    import transformers

    described = _KINDS[kind]
    built_in = resolve_model("smollm2").path
    tokenizer = transformers.AutoTokenizer.from_pretrained(built_in)
    tokenizer.add_special_tokens({"additional_special_tokens": list(described.special_tokens)})
    for name, token in (described.named_tokens or {}).items():
        tokenizer.init_kwargs[name] = token
    tokenizer.chat_template = _TEMPLATE % described.picture
    tokenizer.save_pretrained(directory)
    for name, content in described.files.items():
        (directory / name).write_text(json.dumps(content))
    text = json.loads((built_in / "config.json").read_bytes()) | {"vocab_size": len(tokenizer)}
    if described.rope is not None:
        text = {name: value for name, value in text.items() if name != "model_type"}
        text["rope_parameters"] = dict(described.rope)
    config = getattr(transformers, described.config_class)(
        text_config=text,
        vision_config=described.vision,
        tie_word_embeddings=True,
        **described.whole,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in described.tokens.items()},
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
