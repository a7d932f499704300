"""Which models can be served, and why others cannot. A model that would answer wrongly is refused, not tried.

Everything here looks at a transformers configuration, or at what a probing forward found; no weights are needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine_core.errors import InvalidConfigError
from kernels.kv_cache import SlotShape

_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Their frequencies depend on the longest sequence of the batch as soon as one exceeds the original length.
_BATCH_DEPENDENT_ROPE_TYPES = frozenset({"dynamic", "longrope"})


class UnsupportedModelError(InvalidConfigError):
    """The model cannot be served correctly; the message says what about it is in the way."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one token leaves in one layer's cache, and how many tokens back that layer looks (None: all)."""

    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    sliding_window: int | None

    def in_cache(self, dtype: torch.dtype) -> SlotShape:
        """What that is in a cache of this type."""
        return SlotShape(self.num_kv_heads, self.key_head_dim, self.value_head_dim, dtype)


def check_config(config: Any) -> None:
    """Refuse what a configuration already gives away.

    Raises:
        UnsupportedModelError
    """
    kind = config.model_type
    text_config = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind} is an encoder-decoder model; only decoders have a reusable prefix")
    if getattr(text_config, "add_cross_attention", False) or getattr(text_config, "cross_attention_layers", None):
        raise UnsupportedModelError(f"{kind} has cross-attention layers, whose K/V do not belong to the token sequence")
    if getattr(text_config, "use_bidirectional_attention", None) in {True, "all"}:
        raise UnsupportedModelError(
            f"{kind} lets prompt tokens see later ones (a prefix-LM or use_bidirectional_attention):"
            " what it computes for a prefix depends on what follows, so no prefix is reusable"
        )
    unknown = sorted(set(getattr(text_config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES)
    if unknown:
        raise UnsupportedModelError(
            f"{kind} has layers of type {', '.join(unknown)}; supported are {', '.join(sorted(_KNOWN_LAYER_TYPES))}"
        )


def check_model_class(model_class: Any) -> None:
    """Refuse what transformers says about a model's code.

    Raises:
        UnsupportedModelError
    """
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModelError(f"{model_class.__name__} keeps a recurrent state, which blocks of K/V cannot hold")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{model_class.__name__} does not let its attention be replaced (_supports_attention_backend is not set)"
        )
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise UnsupportedModelError(
            f"{model_class.__name__} computes the logits of all tokens whether wanted or not (its forward has no"
            " logits_to_keep)"
        )


def check_picture_class(model_class: Any) -> None:
    """Refuse a class for pictures and text of which only the text could be served.

    Raises:
        UnsupportedModelError
    """
    if not hasattr(model_class, "get_image_features"):
        raise UnsupportedModelError(
            f"{model_class.__name__} has no get_image_features: its pictures cannot be encoded apart from their prompt"
        )


def check_layers(config: Any, shapes: Mapping[int, LayerShape]) -> None:
    """Refuse a model whose layers do not attend the way its configuration says.

    Raises:
        UnsupportedModelError
    """
    text_config = config.get_text_config(decoder=True)
    if not shapes:
        raise UnsupportedModelError(f"{config.model_type}: no layer of the decoder called our attention")
    window = getattr(text_config, "sliding_window", None)
    layer_types = getattr(text_config, "layer_types", None)
    for layer_idx, shape in shapes.items():
        slides = window is not None if layer_types is None else layer_types[layer_idx] == "sliding_attention"
        if slides and window is None:
            continue  # the configuration calls its window something else
        if shape.sliding_window != (window if slides else None):
            raise UnsupportedModelError(
                f"{config.model_type}: layer {layer_idx} should see {window if slides else 'all'} tokens back, but its"
                f" attention is told {shape.sliding_window}; it relies on a mask, which a paged cache does not use"
            )


def usable_model_len(config: Any, requested: int | None) -> int:
    """The most tokens of one request: `requested`, by default what the model was made for.

    Raises:
        InvalidConfigError: `requested` exceeds what the model was made for, or where its rotary embedding starts
            to depend on the rest of the batch.
    """
    text_config = config.get_text_config(decoder=True)
    limit, reason = int(text_config.max_position_embeddings), "max_position_embeddings"
    for rope in _rope_parameters(text_config):
        original = int(rope.get("original_max_position_embeddings") or limit)
        if rope["rope_type"] in _BATCH_DEPENDENT_ROPE_TYPES and original < limit:
            limit, reason = original, f"the original length of its {rope['rope_type']} rotary embedding"
    if requested is None:
        return limit
    if requested > limit:
        raise InvalidConfigError(f"max_model_len: {requested} exceeds the model's {limit} ({reason})")
    return requested


def _rope_parameters(text_config: Any) -> Iterator[dict[str, Any]]:
    """One set, or one per layer type."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for candidate in (parameters, *parameters.values()):
        if isinstance(candidate, dict) and "rope_type" in candidate:
            yield candidate
