"""What a loaded model is found to do by running a few tokens through it.

Configurations do not say what an architecture stores per layer, nor how it counts positions. A short sequence is
computed three times: as the model does it by itself, with its positions given, and in reverse order with its
positions given. A flattened batch needs all three to be the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from .attention import AttentionOptions
from .support import LayerShape, UnsupportedModelError, check_layers

_NUM_TOKENS = 8
# Shares of the logits' own spread. Rounding is far below them, also in bfloat16; a shifted position is far above.
_FLOAT32_TOLERANCE = 1e-3
_HALF_PRECISION_TOLERANCE = 0.03


@dataclass(slots=True)
class Probe:
    """Stands in for the KV cache while one sequence is computed, and notes what each layer would store.

    Args:
        positions: `[num_tokens]`, the place of each row's token in the sequence.
    """

    positions: torch.Tensor
    shapes: dict[int, LayerShape] = field(default_factory=dict)

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        if layer_idx in self.shapes:
            raise UnsupportedModelError(
                f"two attention layers share the number {layer_idx}: one KV cache cannot serve both"
            )
        if len(key) != len(query):
            raise UnsupportedModelError(f"layer {layer_idx} attends to {len(key)} keys for {len(query)} tokens")
        self.shapes[layer_idx] = LayerShape(key.shape[1], key.shape[2], value.shape[2], options.sliding_window)
        output = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=self.positions[:, None] >= self.positions[None, :],
            scale=options.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output[0].transpose(0, 1)


@torch.inference_mode()
def probe_layers(model: torch.nn.Module, config: Any) -> dict[int, LayerShape]:
    """What each attention layer stores, by layer number.

    Raises:
        UnsupportedModelError: it computes no text alone, its layers do not attend the way the configuration says, or
            its logits depend on more than the tokens and the positions given.
    """
    token_ids, in_order = _sequence(model, config)

    probe = Probe(in_order)
    try:
        expected = _logits(model, token_ids, probe, logits_to_keep=in_order)
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # every architecture has its own way of wanting more than a text
        raise UnsupportedModelError(
            f"{config.model_type}: a text alone cannot be computed: {type(error).__name__}: {error}"
        ) from error
    check_layers(config, probe.shapes)

    for order, difference in (
        (in_order, "when its positions 0, 1, 2, … are given: it counts them in a way of its own"),
        (in_order.flip(0), "when its tokens are given in reverse order: it looks at more than their positions"),
    ):
        actual = _logits(
            model, token_ids[order], Probe(order), logits_to_keep=order.argsort(), position_ids=order[None]
        )
        changed = disagreement(expected, actual)
        if changed > tolerance(expected.dtype):
            raise UnsupportedModelError(
                f"{config.model_type}: a sequence's logits change by {changed:.1%} of their spread {difference}"
            )
    return probe.shapes


@torch.inference_mode()
def probe_logits(model: torch.nn.Module, config: Any) -> torch.Tensor:
    """`[num_tokens, vocab_size]`, of the sequence that `probe_layers` looks at."""
    token_ids, in_order = _sequence(model, config)
    return _logits(model, token_ids, Probe(in_order), logits_to_keep=in_order, position_ids=in_order[None])


@torch.inference_mode()
def logits_in_order(model: torch.nn.Module, config: Any, order: Sequence[int], places: Sequence[int]) -> torch.Tensor:
    """`[len(places), vocab_size]`: some tokens of that sequence, each at its own position, given in this `order`; of
    those that are then at these places.
    """
    token_ids, in_order = _sequence(model, config)
    positions = in_order[list(order)]
    places_given = torch.tensor(places, device=positions.device)
    inputs = {"logits_to_keep": places_given, "position_ids": positions[None]}
    return _logits(model, token_ids[positions], Probe(positions), **inputs)


def num_probe_tokens(model: torch.nn.Module, config: Any) -> int:
    """How many tokens the sequence has."""
    return len(_sequence(model, config)[0])


def tolerance(dtype: torch.dtype) -> float:
    """The most that rounding in `dtype` makes of `disagreement`."""
    return _FLOAT32_TOLERANCE if dtype == torch.float32 else _HALF_PRECISION_TOLERANCE


def _sequence(model: torch.nn.Module, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions, `[num_tokens]` each."""
    device = next(model.parameters()).device
    token_ids = torch.tensor(list(ordinary_token_ids(config)), device=device)
    return token_ids, torch.arange(len(token_ids), device=device)


def _logits(model: torch.nn.Module, token_ids: torch.Tensor, probe: Probe, **inputs: torch.Tensor) -> torch.Tensor:
    return model(input_ids=token_ids[None], use_cache=False, layer_kv=probe, **inputs).logits[0]


def disagreement(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Of two `[num_tokens, vocab_size]`, as a share of the spread; of the middle token, since rounding may send one or
    another to different experts.
    """
    expected, actual = expected.float(), actual.float()
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    share = (actual - expected).norm(dim=-1) / spread.clamp_min(torch.finfo(torch.float32).tiny)
    return share.median().item()


def ordinary_token_ids(config: Any) -> Iterator[int]:
    """`_NUM_TOKENS` different ids from all over the vocabulary, none that a model treats in a special way."""
    text_config = config.get_text_config(decoder=True)
    special = {
        value
        for part in (config, text_config)
        for name, value in part.to_dict().items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    step = max(1, text_config.vocab_size // (2 * _NUM_TOKENS))
    ordinary = (token for token in range(step, text_config.vocab_size, step) if token not in special)
    return (token for token, _ in zip(ordinary, range(_NUM_TOKENS)))
