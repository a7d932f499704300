"""Small random models that behave like large ones: every architecture Foreword is tested with, in a megabyte or two.

Weights come from a fixed seed, so a directory made twice holds the same model. `initializer_range` is far above
what training starts from and embeddings are untied: otherwise a random model repeats one token for ever, and a
test that compares its outputs would notice nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TINY_VOCAB_SIZE = 512
TINY_MAX_MODEL_LEN = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SIZES: dict[str, Any] = {
    "vocab_size": TINY_VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TINY_MAX_MODEL_LEN,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

# architecture → configuration class, model class, what differs from `_SIZES`
_ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 24, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "layer_types": _MIXED_LAYERS,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24, "layer_types": _MIXED_LAYERS},
    ),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 1, 1, 0]}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
}
TINY_ARCHITECTURES = tuple(_ARCHITECTURES)


def make_tiny_model(architecture: str, directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random float32 model of one of `TINY_ARCHITECTURES` (no tokenizer) and return its directory.

    `overrides` are configuration fields, for instance `num_hidden_layers=2`.
    """
    config_class, model_class, differences = _ARCHITECTURES[architecture]
    config = getattr(transformers, config_class)(**(_SIZES | differences | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config)
    model.generation_config = transformers.GenerationConfig(eos_token_id=config.eos_token_id)
    model.to(torch.float32).save_pretrained(directory)
    return directory


def make_tiny_chat_model(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Llama with a byte-level BPE tokenizer and a ChatML template, and return its directory.

    Context 4096 tokens; `<|im_end|>` ends a turn. It answers at random: bytes that are no UTF-8 included.
    """
    tokenizer = _train_tokenizer()
    make_tiny_model(
        "llama",
        directory,
        seed=seed,
        **(
            {
                "vocab_size": len(tokenizer),
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": tokenizer.eos_token_id,
            }
            | overrides
        ),
    )
    tokenizer.save_pretrained(directory)
    return directory


def _train_tokenizer() -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHATML_TEMPLATE,
        model_max_length=TINY_MAX_MODEL_LEN,
        clean_up_tokenization_spaces=False,
    )


_TRAINING_TEXT = """
A lighthouse keeper wrote down every ship that passed. The first column held the hour, the second the wind, the
third a name, where the fog allowed one. On quiet nights he read the older pages aloud, and found that most of
what he was about to write had been written before: the same harbour, the same ships, the same remarks about the
weather. So he began each new page with a reference to the page it continued, and wrote only what was different.

Years later a visitor asked how he could possibly answer so quickly. "I never start at the beginning," the keeper
said. "I start where the last answer ended." The visitor thought about this for a long time. Then she asked what
would happen if two ships shared the first part of their journey. "Then they share the first part of the page,"
said the keeper, "and neither of them may change it, because the other one is still reading."

What is the capital of France? The capital of France is Paris. What is the capital of Italy? The capital of Italy
is Rome. You are a helpful assistant. Please write a short story about a lighthouse. Count from one to ten: one,
two, three, four, five, six, seven, eight, nine, ten. 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20.
"""
