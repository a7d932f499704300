"""Tiny random models of architectures nobody here has looked at: whatever transformers maps to a causal LM.

The sizes below bear every name that configurations use for them. What does not go together in one architecture is
left out or changed until the model can be made and computes something.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

_MAX_PARAMETERS = 30_000_000
_WINDOW = 24

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "hidden_size": 64,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "ffn_hidden_size": 96,
    "num_hidden_layers": 4,
    "num_layers": 4,
    "n_layer": 4,
    "decoder_layers": 4,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "kv_channels": 16,
    "rotary_dim": 8,
    "query_pre_attn_scalar": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "zero_expert_num": 2,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
    "max_window_layers": 0,
    "attention_window_size": _WINDOW,
    "sliding_window": _WINDOW,
    "is_decoder": True,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Tried in turn: what to leave out, and what to change.
_ADJUSTMENTS: tuple[tuple[set[str], dict[str, Any]], ...] = (
    (set(), {}),
    ({"head_dim", "qk_head_dim"}, {"num_key_value_heads": 4}),
    (set(), {"num_key_value_heads": 4}),
    ({"head_dim"}, {}),
    ({"num_layers", "num_heads"}, {}),
    ({"rotary_dim"}, {}),
    (set(), {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    (set(), {"layer_types": ["full_attention"] * 4}),
    (set(SIZES), {}),  # the class's own: too large to run, but enough for a refusal
)


class CannotBeMadeError(Exception):
    """None of the adjustments gives a small model that runs."""


def tiny_configs(config_class: Any, *, windowed: bool) -> Iterator[Any]:
    """Configurations that the class accepts, the plainest first; none if it is to be `windowed` and knows no window."""
    known = set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    try:
        known |= set(config_class().to_dict())
    except Exception:  # some configurations have no defaults
        known |= set(SIZES)
    if windowed and "sliding_window" not in known:
        return
    for left_out, changes in _ADJUSTMENTS:
        dropped = left_out if windowed else left_out | {"sliding_window"}
        fields = {name: value for name, value in (SIZES | changes).items() if name in known - dropped}
        aliases = {name for name in fields if config_class.attribute_map.get(name) in fields}
        if not windowed and "sliding_window" in known - left_out:
            fields["sliding_window"] = None
        try:
            yield config_class(**{name: value for name, value in fields.items() if name not in aliases})
        except Exception:  # not a combination this class accepts: each has errors of its own
            continue


def save_random_model(model_class: Any, config: Any, directory: Path) -> None:
    """Write a model with noise in every parameter, those included that begin as ones and zeros.

    Raises:
        CannotBeMadeError: it would not be small.
    """
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in model_class._from_config(config).parameters())
    if num_parameters > _MAX_PARAMETERS:
        raise CannotBeMadeError(f"{num_parameters} parameters")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = model_class(config).float()
        for parameter in model.parameters():
            if not parameter.isfinite().all() or not parameter.any():
                parameter.normal_(std=0.1)
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config = transformers.GenerationConfig(eos_token_id=2)
    model.save_pretrained(directory)


def load_reference(model_class: Any, directory: Path) -> Any:
    """With transformers' own attention, the plain one where there is one."""
    options = {"dtype": torch.float32, "local_files_only": True}
    try:
        model = model_class.from_pretrained(directory, attn_implementation="eager", **options)
    except ValueError:
        model = model_class.from_pretrained(directory, **options)
    return model.eval()
