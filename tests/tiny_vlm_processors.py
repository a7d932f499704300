"""Processors of every vision-language family Foreword is tested with, as small as they can be: no weights, no torch.

Each directory has the files that published checkpoints of its family have (they differ: one nests the image processor
in `processor_config.json`, another has it in `preprocessor_config.json`), a byte-level tokenizer with the family's own
special tokens, and a chat template that shows pictures as the family's real one does. A picture becomes few tokens
(the vision towers they are made for see `GEOMETRY[family]`), yet every rule by which the family cuts, tiles, pads and
wraps pictures is the real one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

_HALF = [0.5, 0.5, 0.5]
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
_VALUES: dict[str, Any] = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True}
_CLIP = _VALUES | {"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD, "resample": 3, "rescale_factor": 1 / 255}
_SIGLIP = _VALUES | {"image_mean": _HALF, "image_std": _HALF, "resample": 2, "rescale_factor": 1 / 255}
_IMAGE_SIZE, _PATCH_SIZE = 28, 7  # LLaVA's towers: 16 patches, and CLIP's class token
_TILE_SIZE = 16  # Idefics3's, InternVL's and Gemma 3's, in patches of 4: four tokens after pooling

# Pictures stand where the family's own template puts them: LLaVA hoists them to the front of the message.
_HOISTED = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
)
_IN_PLACE = (
    "{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'image' %%}{{ '%s' }}{%% elif part['type'] == 'text' %%}{{ part['text'] }}{%% endif %%}"
    "{%% endfor %%}{%% endif %%}"
)


def _chatml(content: str) -> str:
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}" + content + "{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def _turns(content: str) -> str:
    return (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] | capitalize + ': ' }}" + content + "{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )


def _instructions(content: str) -> str:
    return (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ ' ' + message['content'] + eos_token }}{% else %}{{ '[INST]' }}" + content + "{{ '[/INST]' }}{% endif %}"
        "{% endfor %}"
    )


def _gemma_turns(content: str) -> str:
    return (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
        + content
        + "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    )


@dataclass(frozen=True)
class _Family:
    """`files` are written as they are; `image_size` and `patch_size` are the vision tower's, None where any will do."""

    processor_class: str
    special_tokens: tuple[str, ...]
    chat_template: str
    files: dict[str, dict[str, Any]]
    named_tokens: dict[str, str] = field(default_factory=dict)
    bos_token: str = "<s>"
    eos_token: str = "</s>"
    adds_bos: bool = False
    image_size: int | None = None
    patch_size: int = 4


def _qwen(processor_class: str, image_processor_type: str, values: dict[str, Any], patch_size: int = 4) -> _Family:
    image_processor = values | {
        "image_processor_type": image_processor_type,
        "processor_class": processor_class,
        "size": {"shortest_edge": 16 * patch_size**2, "longest_edge": 256 * patch_size**2},
        "patch_size": patch_size,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    return _Family(
        processor_class,
        ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        _chatml(_IN_PLACE % "<|vision_start|><|image_pad|><|vision_end|>"),
        {
            "preprocessor_config.json": image_processor,
            "video_preprocessor_config.json": _video("Qwen2VLVideoProcessor"),
        },
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        patch_size=patch_size,
    )


def _video(video_processor_type: str) -> dict[str, Any]:
    return {"video_processor_type": video_processor_type}


def _tiles(name: str) -> tuple[str, ...]:
    rows_and_columns = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    return ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *rows_and_columns, name)


def _idefics(name: str) -> dict[str, Any]:
    return _SIGLIP | {
        "image_processor_type": f"{name}ImageProcessor",
        "processor_class": f"{name}Processor",
        "do_image_splitting": True,
        "do_pad": True,
        "resample": 1,
        "size": {"longest_edge": 4 * _TILE_SIZE},
        "max_image_size": {"longest_edge": _TILE_SIZE},
    }


_FAMILIES: dict[str, _Family] = {
    "llava": _Family(
        "LlavaProcessor",
        ("<image>",),
        _turns(_HOISTED),
        {
            "preprocessor_config.json": _CLIP
            | {
                "image_processor_type": "CLIPImageProcessor",
                "processor_class": "LlavaProcessor",
                "do_center_crop": True,
                "crop_size": {"height": _IMAGE_SIZE, "width": _IMAGE_SIZE},
                "size": {"shortest_edge": _IMAGE_SIZE},
            },
            "processor_config.json": {
                "image_token": "<image>",
                "num_additional_image_tokens": 1,
                "patch_size": _PATCH_SIZE,
                "processor_class": "LlavaProcessor",
                "vision_feature_select_strategy": "default",
            },
        },
        adds_bos=True,
        image_size=_IMAGE_SIZE,
        patch_size=_PATCH_SIZE,
    ),
    "llava_next": _Family(
        "LlavaNextProcessor",
        ("[INST]", "[/INST]", "<image>"),
        _instructions(_HOISTED),
        {
            "preprocessor_config.json": _CLIP
            | {
                "image_processor_type": "LlavaNextImageProcessor",
                "processor_class": "LlavaNextProcessor",
                "do_center_crop": True,
                "crop_size": {"height": _IMAGE_SIZE, "width": _IMAGE_SIZE},
                "size": {"shortest_edge": _IMAGE_SIZE},
                "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
            },
            "processor_config.json": {
                "image_token": "<image>",
                "num_additional_image_tokens": 1,
                "patch_size": _PATCH_SIZE,
                "processor_class": "LlavaNextProcessor",
                "vision_feature_select_strategy": "default",
            },
        },
        image_size=_IMAGE_SIZE,
        patch_size=_PATCH_SIZE,
    ),
    "llava_onevision": _Family(
        "LlavaOnevisionProcessor",
        ("<|im_start|>", "<|im_end|>", "<image>", "<video>"),
        _chatml(_HOISTED),
        {
            "preprocessor_config.json": _SIGLIP
            | {
                "image_processor_type": "LlavaOnevisionImageProcessor",
                "processor_class": "LlavaOnevisionProcessor",
                "do_pad": True,
                "resample": 3,
                "size": {"height": _IMAGE_SIZE, "width": _IMAGE_SIZE},
                "image_grid_pinpoints": [[_IMAGE_SIZE * r, _IMAGE_SIZE * c] for r in range(1, 5) for c in range(1, 5)],
            },
            "video_preprocessor_config.json": _video("LlavaOnevisionVideoProcessor"),
            "processor_config.json": {
                "image_token": "<image>",
                "num_image_tokens": (_IMAGE_SIZE // _PATCH_SIZE) ** 2,
                "processor_class": "LlavaOnevisionProcessor",
                "video_token": "<video>",
                "vision_aspect_ratio": "anyres_max_9",
                "vision_feature_select_strategy": "full",
            },
        },
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        image_size=_IMAGE_SIZE,
        patch_size=_PATCH_SIZE,
    ),
    "qwen2_vl": _qwen("Qwen2VLProcessor", "Qwen2VLImageProcessor", _CLIP),
    "qwen2_5_vl": _qwen("Qwen2_5_VLProcessor", "Qwen2VLImageProcessorFast", _CLIP),
    "qwen3_vl": _qwen("Qwen3VLProcessor", "Qwen2VLImageProcessorFast", _SIGLIP | {"resample": 3}, patch_size=6),
    "idefics3": _Family(
        "Idefics3Processor",
        _tiles("<|begin_of_text|>"),
        _turns(_IN_PLACE % "<image>").replace("{{ '\n' }}", "{{ '<end_of_utterance>\n' }}"),
        {
            "preprocessor_config.json": _idefics("Idefics3"),
            "processor_config.json": {"image_seq_len": 4, "processor_class": "Idefics3Processor"},
        },
        bos_token="<|begin_of_text|>",
        eos_token="<end_of_utterance>",
        image_size=_TILE_SIZE,
    ),
    "smolvlm": _Family(
        "SmolVLMProcessor",
        _tiles("<|im_start|>"),
        _turns(_IN_PLACE % "<image>").replace("{{ '\n' }}", "{{ '<end_of_utterance>\n' }}"),
        {
            "preprocessor_config.json": _idefics("SmolVLM"),
            "processor_config.json": {"image_seq_len": 4, "processor_class": "SmolVLMProcessor"},
        },
        named_tokens={
            "end_of_utterance_token": "<end_of_utterance>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "image_token": "<image>",
        },
        bos_token="<|im_start|>",
        eos_token="<end_of_utterance>",
        image_size=_TILE_SIZE,
    ),
    "internvl": _Family(
        "InternVLProcessor",
        ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        _chatml(_IN_PLACE % "<IMG_CONTEXT>\n"),
        {
            "preprocessor_config.json": _CLIP
            | {
                "image_processor_type": "GotOcr2ImageProcessorFast",
                "processor_class": "InternVLProcessor",
                "crop_to_patches": False,  # the processor turns it on
                "max_patches": 6,
                "min_patches": 1,
                "size": {"height": _TILE_SIZE, "width": _TILE_SIZE},
            },
            "video_preprocessor_config.json": _video("InternVLVideoProcessor"),
            "processor_config.json": {"image_seq_length": 4, "processor_class": "InternVLProcessor"},
        },
        named_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        image_size=_TILE_SIZE,
    ),
    "gemma3": _Family(
        "Gemma3Processor",
        ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        _gemma_turns(_IN_PLACE % "<start_of_image>"),
        {
            "preprocessor_config.json": _SIGLIP
            | {
                "do_convert_rgb": None,
                "do_pan_and_scan": None,
                "image_processor_type": "Gemma3ImageProcessor",
                "image_seq_length": 4,
                "pan_and_scan_max_num_crops": None,
                "pan_and_scan_min_crop_size": None,
                "pan_and_scan_min_ratio_to_activate": None,
                "processor_class": "Gemma3Processor",
                "size": {"height": _TILE_SIZE, "width": _TILE_SIZE},
            },
            "processor_config.json": {"image_seq_length": 4, "processor_class": "Gemma3Processor"},
        },
        named_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        bos_token="<bos>",
        eos_token="<eos>",
        adds_bos=True,
        image_size=_TILE_SIZE,
    ),
    "mistral3": _Family(
        "PixtralProcessor",
        ("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        _instructions(_IN_PLACE % "[IMG]"),
        {
            "processor_config.json": {
                "image_break_token": "[IMG_BREAK]",
                "image_end_token": "[IMG_END]",
                "image_processor": _CLIP
                | {
                    "image_processor_type": "PixtralImageProcessorFast",
                    "patch_size": {"height": 4, "width": 4},
                    "size": {"longest_edge": 64},
                },
                "image_token": "[IMG]",
                "patch_size": 4,
                "processor_class": "PixtralProcessor",
                "spatial_merge_size": 2,
            },
        },
        image_size=64,
    ),
}
FAMILIES = tuple(_FAMILIES)

# What a family's vision tower must be made with: (image size, patch size). Qwen's takes pictures of any size.
GEOMETRY: dict[str, tuple[int | None, int]] = {name: (f.image_size, f.patch_size) for name, f in _FAMILIES.items()}


def save_tiny_processor(family: str, directory: Path) -> None:
    """Write tokenizer, chat template and processor files of one of `FAMILIES`; no `config.json`, no weights.

    `AutoTokenizer` reads it; the ids of the special tokens are its to tell (`convert_tokens_to_ids("<image>")`).
    """
    described = _FAMILIES[family]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(described)
    tokenizer.save_pretrained(directory)
    for name, content in described.files.items():
        (directory / name).write_text(json.dumps(content, indent=2))


def _tokenizer(family: _Family) -> transformers.PreTrainedTokenizerFast:
    special_tokens = list(dict.fromkeys([family.bos_token, family.eos_token, "<pad>", *family.special_tokens]))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    if family.adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos_token} $A",
            special_tokens=[(family.bos_token, tokenizer.token_to_id(family.bos_token))],
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.bos_token,
        eos_token=family.eos_token,
        pad_token="<pad>",
        extra_special_tokens=dict(family.named_tokens),
        chat_template=family.chat_template,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


_TRAINING_TEXT = """
What is in this picture? There are two pictures, and in both of them a cat sits on a chair beside a dog. The first one
is red, the second one is blue.\n\nHere is the original image and here are some crops to help you see better.\n\n
Compare the first image with the second image. Describe what you see. User: Assistant: system user assistant model
"""
