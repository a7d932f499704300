"""What a configuration does not give away is found by running a few tokens, and refused if it would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine_core.model.loader import load_config, load_model
from engine_core.model.probe import _NUM_TOKENS, ordinary_token_ids, probe_layers
from engine_core.model.support import LayerShape, UnsupportedModelError
from tests.tiny_models import make_tiny_model

from .any_architecture import save_random_model, tiny_configs

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def probe(directory: Path, dtype: torch.dtype = torch.float32) -> dict[int, LayerShape]:
    config = load_config(directory)
    return probe_layers(load_model(directory, config, dtype, CPU), config)


def test_shapes_and_windows_are_found(tmp_path: Path) -> None:
    sliding, full = LayerShape(2, 16, 16, 24), LayerShape(2, 16, 16, None)
    assert probe(make_tiny_model("gemma3_text", tmp_path)) == {0: sliding, 1: full, 2: sliding, 3: full}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("roberta", "it counts them in a way of its own"),
        ("xlm-roberta-xl", "it counts them in a way of its own"),
        ("doge", "DogeAttention makes an attention mask of its own"),
        ("nemotron", "does not pass keyword arguments through"),
        ("diffllama", "share the number 0"),
    ],
)
def test_refused_with_the_reason(model_type: str, reason: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = next(tiny_configs(type(transformers.AutoConfig.for_model(model_type)), windowed=False))
    save_random_model(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        probe(tmp_path, dtype)


def forget_positions(inputs: dict[str, Any]) -> None:
    del inputs["position_ids"]


def forget_which_logits(inputs: dict[str, Any]) -> None:
    inputs["logits_to_keep"] = 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("part", "spoil"),
    [("", forget_which_logits), ("model", forget_positions)],
    ids=["no choice of logits", "positions ignored"],
)
def test_a_row_is_not_a_sequence(
    part: str, spoil: Callable[[dict[str, Any]], None], dtype: torch.dtype, tmp_path: Path
) -> None:
    """The model is right as long as it computes one sequence in order: nobody would notice."""
    directory = make_tiny_model("llama", tmp_path)
    config = load_config(directory)
    model = load_model(directory, config, dtype, CPU)

    def hook(_: torch.nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        if inputs.get("position_ids") is not None:
            spoil(inputs)
        return args, inputs

    model.get_submodule(part).register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="looks at more than their positions"):
        probe_layers(model, config)


def test_tokens_with_a_meaning_of_their_own_are_not_used() -> None:
    config = transformers.LlavaConfig(image_token_index=2000 * 2)
    config.text_config.vocab_size, config.text_config.eos_token_id = 32000, 2000
    token_ids = list(ordinary_token_ids(config))
    assert len(set(token_ids)) == _NUM_TOKENS
    assert not {2000, 4000} & set(token_ids)
