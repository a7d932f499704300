"""Decoder layers that are of the common kind are computed as a whole; all others are left alone.

What the kernel computes is `tests/kernels/test_decoder_layers.py`; that greedy tokens stay the reference's, over real
steps, is `test_equality.py`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers.models.cohere.modeling_cohere import rotate_half as interleaved_rotate_half
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from engine_core import EngineConfig
from engine_core.model.loader import load_config, load_model
from engine_core.model.passes import PassError, apply_passes, fusing
from engine_core.model.passes.fusing import ComputedLayer, FusedLayers, parts_of
from engine_core.model.passes.packed_layers import KernelLinear, OnednnLinear
from engine_core.model.passes.watched_layers import watch_layers
from engine_core.model.probe import disagreement, probe_logits, tolerance
from engine_core.model.runner import ModelRunner
from kernels import decoder_layers
from tests.tiny_models import TINY_ARCHITECTURES, make_tiny_model

from .any_architecture import save_random_model, tiny_configs

pytestmark = pytest.mark.skipif(not decoder_layers.is_available(torch.float32), reason="no compiler")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def inference() -> object:
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True)
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without AMX, whichever this is."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    config = load_config(directory)
    return load_model(directory, config, dtype, CPU), config


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Any, Any]:
    return load(make_tiny_model("llama", tmp_path))


def fuse(model: nn.Module, config: Any) -> list[int]:
    """How many layers are computed in each call, afterwards."""
    apply_passes(model, config, fuse=True, pack=True, kernel=True)
    return [len(module._layers) for module in model.modules() if isinstance(module, FusedLayers)]


# What is fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_logits_stay_what_they_were(name: str, dtype: torch.dtype, model_directory: Callable[[str], Path]) -> None:
    model, config = load(model_directory(name), dtype)
    before = probe_logits(model, config)
    assert sum(fuse(model, config)) == 4
    after = probe_logits(model, config)
    assert disagreement(before, after) <= tolerance(dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(after.log_softmax(-1), before.log_softmax(-1), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("llama", [4]),
        ("gemma2", [4]),
        ("olmo2", [4]),
        # Each kind has cosines and sines of its own.
        ("gemma3_text", [1, 1, 1, 1]),
        # The last one rotates nothing.
        ("smollm3", [3, 1]),
    ],
)
def test_layers_that_follow_each_other_are_computed_together(
    name: str, runs: list[int], model_directory: Callable[[str], Path]
) -> None:
    model, config = load(model_directory(name))
    attributes = [vars(layer) for layer in model.model.layers]
    assert fuse(model, config) == runs
    kinds = {type(layer) for layer in model.model.layers}
    assert len(model.model.layers) == (1 if len(runs) == 1 else 4) and kinds <= {FusedLayers, ComputedLayer}
    for layer, before in zip(model.model.layers, attributes, strict=False):
        for attribute in {"attention_type", "hidden_size"} & before.keys():
            assert getattr(layer, attribute) == before[attribute]


@pytest.mark.parametrize("name", ["Phi3", "SeedOss"])
def test_projections_that_are_one_layer_and_dropout_that_is_off_are_of_the_common_kind(
    name: str, tmp_path: Path
) -> None:
    [config, *_] = tiny_configs(getattr(transformers, f"{name}Config"), windowed=False)
    save_random_model(getattr(transformers, f"{name}ForCausalLM"), config, tmp_path)
    model, config = load(tmp_path)
    before = probe_logits(model, config)
    assert fuse(model, config) == [config.num_hidden_layers]
    assert disagreement(before, probe_logits(model, config)) <= tolerance(torch.float32)


def test_only_pictures_are_fed_between_layers(vlm_directory: Callable[[str], Path]) -> None:
    """Where a model does that, each layer is a call of its own."""
    model, config = load(vlm_directory("llava"))
    assert fuse(model, config) == [4]
    assert any(isinstance(module, nn.Linear) for name, module in model.named_modules() if "vision" in name)
    model, config = load(vlm_directory("qwen3_vl"))
    assert fuse(model, config) == [1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_no_weight_is_kept_beside_its_packed_form(
    tied: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those of a single layer while it is looked at."""
    model, config = load(make_tiny_model("llama", tmp_path, tie_word_embeddings=tied), dtype)
    weights = {
        name: weakref.ref(module.weight) for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    alive_in_layers: list[int] = []

    def compare_and_look(*arguments: Any) -> None:
        alive_in_layers.append(sum(weight() is not None for name, weight in weights.items() if "layers" in name))
        compare(*arguments)

    compare = fusing._compare
    monkeypatch.setattr(fusing, "_compare", compare_and_look)
    fuse(model, config)
    assert alive_in_layers == [28, 21, 14, 7]
    assert not any(weight() is not None for weight in weights.values())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_packed_weights_leave_their_file(tmp_path: Path) -> None:
    model, config = load(make_tiny_model("qwen2", tmp_path))
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    assert fuse(model, config) == [4]
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_a_kernel_that_computes_something_else_is_noticed_and_the_model_served_without(
    wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In one of 64 outputs of one layer, for one of the probe's tokens."""
    directory = make_tiny_model("llama", tmp_path)
    num_calls = 0

    def spoiled(self: decoder_layers.DecoderLayers, *arguments: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        y = after_attention(self, *arguments)
        if num_calls == 2:
            y[3, 5] *= wrong
        return y

    after_attention = decoder_layers.DecoderLayers.after_attention
    monkeypatch.setattr(decoder_layers.DecoderLayers, "after_attention", spoiled)
    with caplog.at_level(logging.WARNING):
        runner = ModelRunner(EngineConfig(model=str(directory), dtype="bfloat16", device="cpu", num_blocks=8))
    assert "passes_skipped" in caplog.text
    assert "model.layers.1 differs by" in caplog.text
    assert type(runner._model.model.layers[1]) is LlamaDecoderLayer


# What is left alone


class Clipping(LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs).clamp(-1e9, 1e9)


class FadingFarAway(LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        far = (kwargs["position_ids"] > 1000)[..., None]
        return super().forward(*args, **kwargs).masked_fill(far, 0)


class Scaling(LlamaDecoderLayer):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().forward(x * 1.0, **kwargs)


class AskingWhatItIsGiven(LlamaDecoderLayer):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().forward(x, **kwargs) if x.abs().max() < 1e9 else x


class SpecialLinear(nn.Linear):
    pass


class Ungated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.act_fn, self.down_proj = nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


def become(kind: type[nn.Module]) -> Callable[[Any], None]:
    return lambda layer: setattr(layer, "__class__", kind)


def put(path: str, make: Callable[[], nn.Module]) -> Callable[[Any], None]:
    return lambda layer: layer.set_submodule(path, make())


def hook(path: str) -> Callable[[Any], None]:
    return lambda layer: layer.get_submodule(path).register_forward_hook(lambda *_: None)


def special(layer: Any) -> None:
    layer.mlp.up_proj.__class__ = SpecialLinear


@pytest.mark.parametrize(
    "change",
    [
        *(
            pytest.param(become(kind), id=kind.__name__)
            for kind in (Clipping, FadingFarAway, Scaling, AskingWhatItIsGiven)
        ),
        pytest.param(put("input_layernorm", lambda: nn.LayerNorm(64)), id="layer norm"),
        pytest.param(put("input_layernorm", lambda: nn.LayerNorm(64, bias=False)), id="layer norm without bias"),
        pytest.param(put("mlp.act_fn", nn.Mish), id="unknown activation"),
        pytest.param(put("mlp.act_fn", nn.Hardtanh), id="activation that clips"),
        pytest.param(put("mlp", Ungated), id="nothing is gated"),
        pytest.param(special, id="special linear layer"),
        *(pytest.param(hook(path), id=f"hook on {path}") for path in ("", "self_attn", "mlp.act_fn", "mlp.up_proj")),
        pytest.param(hook("post_attention_layernorm"), id="hook on a norm"),
    ],
)
def test_layers_of_other_kinds_are_left_alone(change: Callable[[Any], None], llama: tuple[Any, Any]) -> None:
    """And those around them are fused."""
    model, config = llama
    change(model.model.layers[1])
    layer, kind = model.model.layers[1], type(model.model.layers[1])
    before = probe_logits(model, config)
    assert fuse(model, config) == [1, 2]
    assert model.model.layers[1] is layer and type(layer) is kind
    assert disagreement(before, probe_logits(model, config)) <= tolerance(torch.float32)


def test_interleaved_rotation_is_left_alone(llama: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "rotate_half", interleaved_rotate_half)
    assert fuse(*llama) == []


def test_layers_that_are_called_twice_are_left_alone(llama: tuple[Any, Any]) -> None:
    model, config = llama
    watched, _ = watch_layers(model, parts_of, lambda: [probe_logits(model, config) for _ in range(2)])
    assert watched == {}
    watched, _ = watch_layers(model, parts_of, lambda: probe_logits(model, config))
    assert list(watched) == [f"model.layers.{index}" for index in range(4)]


def test_where_the_kernel_was_not_built_linear_layers_are_packed(
    llama: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusing, "is_available", lambda _: False)
    assert fuse(*llama) == []
    assert not any(isinstance(module, nn.Linear) for module in llama[0].modules())


@pytest.mark.skipif(not OnednnLinear.is_usable(torch.bfloat16), reason="oneDNN does not compute in bfloat16 here")
def test_where_the_cpu_has_tiles_only_quantized_layers_are_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN computes in them, but not with quantized weights."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    directory = make_tiny_model("llama", tmp_path)
    model, config = load(directory, torch.bfloat16)
    assert fuse(model, config) == []
    assert {type(module) for module in model.modules()} & {OnednnLinear, KernelLinear} == {OnednnLinear}
    model, config = load(directory, torch.bfloat16)
    apply_passes(model, config, fuse=True, pack=True, kernel=True, quantization="int8")
    assert any(isinstance(module, FusedLayers) for module in model.modules())
    assert fuse(*load(directory)) != []


def test_other_types_are_left_alone(tmp_path: Path) -> None:
    assert fuse(*load(make_tiny_model("llama", tmp_path), torch.float16)) == []


# Watching


@pytest.mark.parametrize("failing", ["", "self_attn.o_proj", "mlp", "mlp.act_fn"])
def test_watching_leaves_nothing_behind_even_if_the_model_fails(failing: str, llama: tuple[Any, Any]) -> None:
    model, config = llama

    def fail(*_: Any) -> None:
        raise ValueError("no")

    handle = model.model.layers[2].get_submodule(failing).register_forward_pre_hook(fail)
    hooks = [dict(module._forward_hooks) | dict(module._forward_pre_hooks) for module in model.modules()]
    with pytest.raises(PassError, match="ValueError: no"):
        fuse(model, config)
    assert _get_current_dispatch_mode() is None
    assert hooks == [dict(module._forward_hooks) | dict(module._forward_pre_hooks) for module in model.modules()]
    handle.remove()
    assert fuse(model, config) == [4]
