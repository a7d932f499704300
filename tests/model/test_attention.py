"""The seam between transformers and the paged cache: what passes it, and what is stopped there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from engine_core.model.attention import ATTENTION_NAME, AttentionOptions, attention_forward
from engine_core.model.loader import load_config, load_model
from engine_core.model.probe import Probe, probe_layers
from engine_core.model.support import UnsupportedModelError
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")
QKV = (torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))


def test_no_mask_is_built_for_us(tmp_path: Path) -> None:
    directory = make_tiny_model("mistral", tmp_path)
    config = load_config(directory)
    model = load_model(directory, config, torch.float32, CPU)
    masks = []

    def watch(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        masks.append(attention_mask)
        return attention_forward(module, query, key, value, attention_mask, **options)

    transformers.AttentionInterface.register(ATTENTION_NAME, watch)
    try:
        probe_layers(model, config)
    finally:
        transformers.AttentionInterface.register(ATTENTION_NAME, attention_forward)
    assert masks and all(mask is None for mask in masks)


def test_a_model_that_swallows_our_argument_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="does not pass keyword arguments through"):
        attention_forward(SimpleNamespace(layer_idx=0), *QKV, None)


def test_attention_that_is_not_causal_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="is not causal"):
        attention_forward(SimpleNamespace(layer_idx=0, is_causal=False), *QKV, None, layer_kv=Probe(torch.arange(3)))
    with pytest.raises(UnsupportedModelError, match="is not causal"):
        attention_forward(SimpleNamespace(layer_idx=0), *QKV, None, is_causal=False, layer_kv=Probe(torch.arange(3)))


def test_a_mask_that_the_model_makes_itself_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"an attention mask of its own \(1, 1, 3, 3\)"):
        attention_forward(SimpleNamespace(layer_idx=0), *QKV, torch.zeros(1, 1, 3, 3), layer_kv=Probe(torch.arange(3)))


def test_two_layers_of_one_number_are_refused() -> None:
    probe = Probe(torch.arange(3))
    module = SimpleNamespace(layer_idx=0)
    attention_forward(module, *QKV, None, layer_kv=probe)
    with pytest.raises(UnsupportedModelError, match="share the number 0"):
        attention_forward(module, *QKV, None, layer_kv=probe)


def test_keys_of_something_else_are_refused() -> None:
    """Cross-attention: more keys than tokens."""
    options = AttentionOptions(scaling=1.0, sliding_window=None, softcap=None, sinks=None)
    with pytest.raises(UnsupportedModelError, match="attends to 7 keys for 3 tokens"):
        Probe(torch.arange(3)).attend(0, torch.zeros(3, 4, 8), torch.zeros(7, 2, 8), torch.zeros(7, 2, 8), options)
