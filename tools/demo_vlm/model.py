"""The model's parts as transformers knows them: configuration, tokenizer, chat template, processor."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from .drawing import NUM_PATCHES, PATCH
from .scenes import SIDE

VOCAB_SIZE = 1024
MAX_TOKENS = 2048

SPECIAL_TOKENS = ("<pad>", "<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<image>")
PAD, BOS, END, SYSTEM, USER, ASSISTANT, IMAGE = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|' + message['role'] + '|>' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] | trim -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'image' -%}
                {{- '<image>' -}}
            {%- else -%}
                {{- part['text'] | trim -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def new_model() -> Any:
    """`LlavaForConditionalGeneration` with random weights: a SigLIP tower, an MLP projector and a small Llama.

    One patch is one token; the tower's last layer is used, before the norm that would follow it.
    """
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=SiglipVisionConfig(
                hidden_size=192,
                intermediate_size=576,
                num_hidden_layers=4,
                num_attention_heads=6,
                image_size=SIDE,
                patch_size=PATCH,
                vision_use_head=False,
            ),
            text_config=LlamaConfig(
                vocab_size=VOCAB_SIZE,
                hidden_size=256,
                intermediate_size=640,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=4,
                head_dim=32,
                max_position_embeddings=MAX_TOKENS,
                rms_norm_eps=1e-5,
                bos_token_id=BOS,
                eos_token_id=END,
                pad_token_id=PAD,
                tie_word_embeddings=True,
            ),
            image_token_index=IMAGE,
            image_seq_length=NUM_PATCHES,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            pad_token_id=PAD,
            tie_word_embeddings=True,
        )
    )


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE in which every digit is a token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|end|>",
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
        extra_special_tokens={"image_token": "<image>"},
    )


def new_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """The whole picture is squeezed to the side the model sees; nothing is cropped."""
    return LlavaProcessor(
        SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, resample=3),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=CHAT_TEMPLATE,
    )


def save(model: Any, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """A directory that transformers' Auto classes load, weights in bfloat16."""
    import torch

    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=END, pad_token_id=PAD)
    model.to(torch.bfloat16).save_pretrained(directory)
    new_processor(tokenizer).save_pretrained(directory)
