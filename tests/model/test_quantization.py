"""`quantization`: which layers get fewer bits, what that costs, and what is refused.

What the codes stand for, and that the kernel computes with it, is `tests/kernels/test_quantize.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from benchmarks.perplexity import TEXT, contexts_of, perplexity, token_logprobs
from engine_core import EngineConfig, EngineCore, InvalidConfigError
from engine_core.model.loader import load_config, load_model
from engine_core.model.passes import apply_passes
from engine_core.model.passes.fusing import FusedLayers
from engine_core.model.passes.packed_layers import KernelLinear
from engine_core.model.passes.quantizing import check_quantization, quantize_linears
from engine_core.model.probe import disagreement, probe_logits
from engine_core.model.runner import ModelRunner
from kernels import linear as linear_kernel
from kernels.linear import Format
from kernels.quantize import quantize_int4, quantize_int8
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")

needs_kernel = pytest.mark.skipif(not linear_kernel.is_available(torch.bfloat16), reason="no compiler")
both = pytest.mark.parametrize("quantization", ["int8", "int4"])


def config_of(directory: Path, **settings: object) -> EngineConfig:
    return EngineConfig(**{"model": str(directory), "dtype": "float32", "device": "cpu", "num_blocks": 8} | settings)


def formats_of(model: nn.Module) -> dict[str, Format]:
    """Of each weight, those in fused layers included."""
    formats = {}
    for name, module in model.named_modules():
        if isinstance(module, KernelLinear):
            formats[name] = module.weight.format
        if isinstance(module, FusedLayers):
            for index, parts in enumerate(module._layers):
                weights = (parts.qkv, parts.output, parts.gate, parts.up, parts.down)
                formats |= {f"{name}.{index}.{part}": weight.format for part, weight in enumerate(weights)}
    return formats


# What it costs


@needs_kernel
def test_perplexity_grows_by_little(smollm2: Path) -> None:
    """SmolLM2's weights were in 4 bits with groups of 32 once, so `int4` finds nearly all of them again."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    contexts = contexts_of(tokenizer(TEXT.read_text()).input_ids[:512], 512)

    def measured(quantization: str | None) -> float:
        config = config_of(smollm2, dtype="auto", quantization=quantization, num_blocks=128)
        return perplexity(token_logprobs(EngineCore(config), contexts))

    unquantized = measured(None)
    assert measured("int8") < unquantized * 1.01
    assert measured("int4") < unquantized * 1.02


@needs_kernel
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fuse", [False, True])
def test_logits_are_those_of_the_weights_that_the_codes_stand_for(
    quantization: str, fuse: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    directory = make_tiny_model("qwen2", tmp_path)
    config = load_config(directory)
    expected_of, quantized = (load_model(directory, config, dtype, CPU) for _ in range(2))
    for name, module in expected_of.named_modules():
        if isinstance(module, nn.Linear):
            quantize = quantize_int8 if quantization == "int8" or name == "lm_head" else quantize_int4
            module.weight.data = quantize(module.weight.data).dequantized(dtype).to(dtype)
    before = probe_logits(quantized, config)
    apply_passes(quantized, config, fuse=fuse, pack=True, kernel=True, quantization=quantization)
    actual = probe_logits(quantized, config)
    assert disagreement(probe_logits(expected_of, config), actual) < (1e-4 if dtype == torch.float32 else 0.2)
    assert disagreement(before, actual) > 1e-3


# Which layers


@needs_kernel
@both
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_every_linear_layer_is_quantized_and_the_head_in_8_bits(
    quantization: str, tied: bool, fuse: bool, tmp_path: Path
) -> None:
    directory = make_tiny_model("llama", tmp_path, tie_word_embeddings=tied)
    runner = ModelRunner(config_of(directory, quantization=quantization, fuse_layers=fuse))
    formats = formats_of(runner._model)
    assert len(formats) == 1 + 4 * (5 if fuse else 7)
    assert not any(isinstance(module, nn.Linear) for module in runner._model.modules())
    assert formats.pop("lm_head") is Format.INT8
    assert set(formats.values()) == {Format[quantization.upper()]}
    assert runner._model.get_input_embeddings().weight.dtype is torch.float32


@needs_kernel
def test_a_vision_tower_stays_as_it_is(vlm_directory: Callable[[str], Path]) -> None:
    runner = ModelRunner(config_of(vlm_directory("llava"), quantization="int4", num_blocks=64))
    assert all("language_model" in name or name == "lm_head" for name in formats_of(runner._model))
    towers = [name for name, module in runner._model.named_modules() if isinstance(module, nn.Linear)]
    assert towers and all("vision" in name or "multi_modal" in name for name in towers)


@needs_kernel
def test_layers_in_other_types_are_left_alone(tmp_path: Path) -> None:
    config = load_config(make_tiny_model("llama", tmp_path))
    model = load_model(tmp_path, config, torch.float16, CPU)
    assert quantize_linears(model, {"lm_head": torch.zeros(1, 64).half()}, "int8") == {}


# What others see of it


@needs_kernel
def test_blocks_of_other_bits_are_never_shared(tmp_path: Path) -> None:
    directory = make_tiny_model("llama", tmp_path)
    namespaces = {
        ModelRunner(config_of(directory, quantization=quantization)).info.cache_namespace
        for quantization in (None, "int8", "int4")
    }
    assert len(namespaces) == 3


@needs_kernel
def test_log_and_metrics_name_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = EngineCore(config_of(make_tiny_model("llama", tmp_path), quantization="int4"))
    assert "quantization=int4 device=cpu" in caplog.text
    assert engine.capabilities.cache_config["quantization"] == "int4"


# What is refused


@pytest.mark.parametrize(
    ("settings", "dtype", "device", "message"),
    [
        ({"quantization": "int3"}, torch.float32, "cpu", "quantization: 'int3' is none of int8, int4"),
        ({}, torch.float32, "cuda", "quantization: int8 weights are computed with on a CPU, not on cuda"),
        ({}, torch.float16, "cpu", "quantization: int8 .* in bfloat16 or float32, not in float16"),
        ({"prepack_weights": False}, torch.float32, "cpu", "quantization: int8 needs prepack_weights"),
        ({"linear_kernel": False}, torch.float32, "cpu", "quantization: int8 needs linear_kernel"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    settings: Mapping[str, object], dtype: torch.dtype, device: str, message: str
) -> None:
    config = config_of(Path("/nowhere"), **({"quantization": "int8"} | dict(settings)))
    with pytest.raises(InvalidConfigError, match=message):
        check_quantization(config, transformers.LlamaConfig(), dtype, torch.device(device))


def test_weights_that_are_quantized_already_are_refused() -> None:
    model_config = transformers.LlamaConfig(quantization_config={"quant_method": "torchao"})
    with pytest.raises(InvalidConfigError, match=r"quantization: .* quantized already \(torchao\)"):
        check_quantization(config_of(Path("/nowhere"), quantization="int8"), model_config, torch.float32, CPU)


def test_without_compiled_kernels_it_is_refused_and_else_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_kernel, "is_available", lambda _: False)
    llama = transformers.LlamaConfig()
    with pytest.raises(InvalidConfigError, match="quantization: int4 needs Foreword's kernels for CPUs"):
        check_quantization(config_of(Path("/nowhere"), quantization="int4"), llama, torch.float32, CPU)
    check_quantization(config_of(Path("/nowhere")), llama, torch.float16, torch.device("cuda"))


@needs_kernel
def test_a_layer_that_computes_something_else_is_noticed_and_nothing_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serving the model in more bits than was asked for could need more memory than there is."""

    def spoiled(x: torch.Tensor, weight: linear_kernel.PackedWeight) -> torch.Tensor:
        y = linear(x, weight)
        y[..., 3, 5] *= -1
        return y

    linear = linear_kernel.linear
    monkeypatch.setattr(linear_kernel, "linear", spoiled)
    with pytest.raises(InvalidConfigError, match=r"quantization: llama in int4: .* in packed weights"):
        ModelRunner(config_of(make_tiny_model("llama", tmp_path), quantization="int4"))


@needs_kernel
def test_a_model_without_layers_to_quantize_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_tiny_model("llama", tmp_path)
    # As a model whose layers are all special.
    monkeypatch.setattr("engine_core.model.passes.quantize_linears", lambda *_: {})
    with pytest.raises(InvalidConfigError, match="no linear layer of it could be quantized"):
        ModelRunner(config_of(directory, quantization="int8", fuse_layers=False))
