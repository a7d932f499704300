"""The attention function transformers calls in every decoder layer, and what it calls in turn.

It is registered once under the name "foreword". What a step attends to travels as the keyword argument `layer_kv`
of the model's forward; no mask function is registered, so transformers builds no masks for us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from kernels.attention_metadata import AttentionMetadata
from kernels.paged_attention import paged_attention
from kernels.write_kv import write_kv

from .kv_pool import KVPool
from .support import UnsupportedModelError

ATTENTION_NAME = "foreword"


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer attends; the meanings are those of `kernels.paged_attention.paged_attention`."""

    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class LayerKV(Protocol):
    """What answers a layer's attention: the paged cache, or a probe."""

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """`[num_tokens, heads, head_dim]` each; returns `[num_tokens, num_heads, value_head_dim]`."""
        ...


@dataclass(slots=True)
class PagedKV:
    """The KV pool as one step sees it. `metadata` are those of its groups."""

    pool: KVPool
    metadata: Sequence[AttentionMetadata]

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        cache, metadata = self.pool.caches[layer_idx], self.metadata[self.pool.group_of[layer_idx]]
        write_kv(key, value, cache.keys, cache.values, metadata.slots, cache.scales)
        return paged_attention(
            query,
            cache.keys,
            cache.values,
            metadata,
            cache.scales,
            scaling=options.scaling,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
            sinks=options.sinks,
        )


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    layer_kv: LayerKV | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: `[1, heads, num_tokens, head_dim]` in, `[1, num_tokens, heads, head_dim]` out.

    Raises:
        UnsupportedModelError: the layer wants something that a paged cache does not do.
    """
    if layer_kv is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not pass keyword arguments through to its attention")
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} makes an attention mask of its own {tuple(attention_mask.shape)}, which a paged"
            " cache does not use"
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedModelError(f"{type(module).__name__} is not causal: no prefix of it can be reused")
    output = layer_kv.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionOptions(
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        ),
    )
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, attention_forward)
