"""Models that would answer wrongly are refused, and the message says why."""

from __future__ import annotations

import pytest
import transformers

from engine_core import InvalidConfigError
from engine_core.model.attention import ATTENTION_NAME
from engine_core.model.loader import _attention_names, _model_class, takes_pictures
from engine_core.model.support import (
    LayerShape,
    UnsupportedModelError,
    check_config,
    check_layers,
    check_model_class,
    check_picture_class,
    usable_model_len,
)


def check(config: transformers.PreTrainedConfig) -> None:
    check_config(config)
    check_model_class(_model_class(config))
    if takes_pictures(config):
        check_picture_class(_model_class(config))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.PaliGemmaConfig(), "prefix-LM"),
        (transformers.Gemma3TextConfig(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (transformers.Gemma3Config(text_config={"use_bidirectional_attention": True}), "use_bidirectional_attention"),
        (transformers.MllamaConfig(), "cross-attention"),
        (transformers.RwkvConfig(), "recurrent state"),
        (transformers.MambaConfig(), "linear_attention"),
        (transformers.Qwen3NextConfig(), "linear_attention"),
        (transformers.Llama4TextConfig(), "chunked_attention"),
        (transformers.MptConfig(), "_supports_attention_backend"),
        (transformers.VideoLlama3Config(), "no logits_to_keep"),
        (transformers.FuyuConfig(), "no get_image_features"),
        (transformers.Emu3Config(), "no get_image_features"),
        (transformers.BertConfig(is_decoder=True, add_cross_attention=True), "cross-attention"),
        (transformers.ViTConfig(), "neither a causal nor an image-text-to-text model"),
    ],
    ids=lambda value: value.model_type if isinstance(value, transformers.PreTrainedConfig) else "",
)
def test_refused_with_the_reason(config: transformers.PreTrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check(config)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(),
        transformers.Qwen2Config(),
        transformers.Qwen3Config(),
        transformers.MistralConfig(),
        transformers.Gemma2Config(),
        transformers.Gemma3TextConfig(),
        transformers.SmolLM3Config(),
        transformers.Olmo2Config(),
        transformers.Gemma3Config(),
        transformers.LlavaConfig(),
        transformers.Qwen2_5_VLConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_accepted(config: transformers.PreTrainedConfig) -> None:
    check(config)


def test_without_a_vision_tower_a_model_is_one_of_texts() -> None:
    assert takes_pictures(transformers.LlavaConfig())
    assert not takes_pictures(transformers.Gemma4Config(vision_config=None))
    assert not takes_pictures(transformers.LlamaConfig())


def test_a_text_model_attends_through_us() -> None:
    assert _attention_names(transformers.LlamaConfig()) == ATTENTION_NAME


def test_of_several_towers_only_the_text_decoder_does() -> None:
    assert _attention_names(transformers.LlavaConfig()) == {"text_config": ATTENTION_NAME}


def test_a_window_that_only_a_mask_would_enforce_is_refused() -> None:
    config = transformers.MistralConfig(sliding_window=24)
    check_layers(config, {0: LayerShape(1, 8, 8, sliding_window=24)})
    with pytest.raises(UnsupportedModelError, match=r"layer 0 should see 24 tokens back, .* is told None"):
        check_layers(config, {0: LayerShape(1, 8, 8, sliding_window=None)})


def test_full_layers_of_a_mixed_model_have_no_window() -> None:
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=24
    )
    check_layers(config, {0: LayerShape(1, 8, 8, 24), 1: LayerShape(1, 8, 8, None)})
    with pytest.raises(UnsupportedModelError, match="layer 0 should see 24 tokens back"):
        check_layers(config, {0: LayerShape(1, 8, 8, None), 1: LayerShape(1, 8, 8, None)})
    with pytest.raises(UnsupportedModelError, match=r"layer 1 should see all tokens back, .* is told 24"):
        check_layers(config, {0: LayerShape(1, 8, 8, 24), 1: LayerShape(1, 8, 8, 24)})


def test_a_window_the_configuration_knows_nothing_of_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"layer 0 should see all tokens back, .* is told 24"):
        check_layers(transformers.LlamaConfig(), {0: LayerShape(1, 8, 8, 24)})


def test_a_model_that_never_calls_our_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no layer of the decoder called our attention"):
        check_layers(transformers.LlamaConfig(), {})


def test_the_context_is_the_models_unless_less_is_asked_for() -> None:
    config = transformers.LlamaConfig(max_position_embeddings=4096)
    assert usable_model_len(config, None) == 4096
    assert usable_model_len(config, 100) == 100
    with pytest.raises(InvalidConfigError, match=r"max_model_len: 5000 exceeds the model's 4096"):
        usable_model_len(config, 5000)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_batch_dependent_rope_is_used_up_to_its_original_length(rope_type: str) -> None:
    factors = {"short_factor": [1.0] * 32, "long_factor": [4.0] * 32} if rope_type == "longrope" else {}
    rope = {
        "rope_type": rope_type,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        **factors,
    }
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=rope
    )
    assert usable_model_len(config, None) == 1024
    with pytest.raises(InvalidConfigError, match=rf"1025 exceeds the model's 1024 .*{rope_type}"):
        usable_model_len(config, 1025)
