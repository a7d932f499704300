"""The passes change how a model is computed and nothing else; what they do not understand they leave alone.

This is about linear layers; whole decoder layers are in `test_fused_layers.py`.

That greedy tokens stay the reference's is what `test_equality.py` shows, for passes are on unless switched off.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from engine_core import EngineConfig
from engine_core.model import passes
from engine_core.model.loader import load_config, load_model
from engine_core.model.passes import PassError, apply_passes
from engine_core.model.passes.fusing import FusedLayers
from engine_core.model.passes.linear_layers import watch_linears
from engine_core.model.passes.packed_layers import KernelLinear, OnednnLinear, PackedEmbedding, padded_rows
from engine_core.model.passes.packing import pack_linears, packed_layer
from engine_core.model.probe import disagreement, probe_logits, tolerance
from engine_core.model.runner import ModelRunner
from kernels import linear as linear_kernel
from tests.tiny_models import TINY_ARCHITECTURES, make_tiny_model

CPU = torch.device("cpu")

needs_packing = pytest.mark.skipif(
    not OnednnLinear.is_usable(torch.float32), reason="this build of torch has no oneDNN"
)
needs_kernel = pytest.mark.skipif(not linear_kernel.is_available(torch.bfloat16), reason="no compiler")


@pytest.fixture(autouse=True)
def inference() -> object:
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True)
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without AMX, whichever this is."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, object]:
    config = load_config(directory)
    return load_model(directory, config, dtype, CPU), config


# The whole model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=needs_kernel)])
@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_logits_stay_what_they_were(
    name: str, kernel: bool, dtype: torch.dtype, model_directory: Callable[[str], Path]
) -> None:
    model, config = load(model_directory(name), dtype)
    before = probe_logits(model, config)
    apply_passes(model, config, fuse=False, pack=True, kernel=kernel)
    after = probe_logits(model, config)
    assert disagreement(before, after) <= tolerance(dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(after.log_softmax(-1), before.log_softmax(-1), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "kernel", "layer"),
    [
        (torch.float32, False, OnednnLinear),
        pytest.param(torch.float32, True, KernelLinear, marks=needs_kernel),
        (torch.bfloat16, False, OnednnLinear),
        pytest.param(torch.bfloat16, True, KernelLinear, marks=needs_kernel),
    ],
)
def test_every_linear_layer_of_a_decoder_is_reached(
    dtype: torch.dtype, kernel: bool, layer: type[nn.Module], tmp_path: Path
) -> None:
    if not layer.is_usable(dtype):
        pytest.skip(f"no packed weights of {dtype} here")
    model, config = load(make_tiny_model("llama", tmp_path), dtype)
    linears = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    apply_passes(model, config, fuse=False, pack=True, kernel=kernel)
    modules = dict(model.named_modules())
    assert not any(isinstance(module, nn.Linear) for module in modules.values())
    assert {path for path, module in modules.items() if isinstance(module, layer)} == linears


def test_switched_off_nothing_changes(tmp_path: Path) -> None:
    model, config = load(make_tiny_model("llama", tmp_path))
    before = dict(model.named_modules())
    apply_passes(model, config, fuse=True, pack=False, kernel=True)
    assert dict(model.named_modules()) == before


def test_settings_reach_the_passes(tmp_path: Path) -> None:
    directory = make_tiny_model("llama", tmp_path)
    layers = {nn.Linear, FusedLayers, OnednnLinear, KernelLinear}

    def kinds(dtype: str = "float32", **settings: bool) -> set[type]:
        config = EngineConfig(model=str(directory), dtype=dtype, device="cpu", num_blocks=8, **settings)
        return {type(module) for module in ModelRunner(config)._model.modules()} & layers

    assert kinds(prepack_weights=False) == {nn.Linear}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        if OnednnLinear.is_usable(dtype):
            assert kinds(name, linear_kernel=False) == {OnednnLinear}
        if KernelLinear.is_usable(dtype):
            assert kinds(name, fuse_layers=False) == {KernelLinear}
            assert kinds(name) == {FusedLayers, KernelLinear}


def test_half_precision_that_is_not_computed_in_is_not_packed(tmp_path: Path) -> None:
    assert packed_layer(torch.float16, kernel=True) is None
    model, _ = load(make_tiny_model("llama", tmp_path), torch.float16)
    assert pack_linears(model, {"lm_head": torch.zeros(1, 64).half()}, kernel=True) == {}
    assert type(model.lm_head) is nn.Linear


def test_where_the_kernel_was_not_built_onednn_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_kernel, "is_available", lambda _: False)
    for dtype in (torch.float32, torch.bfloat16):
        assert packed_layer(dtype, kernel=True) is (OnednnLinear if OnednnLinear.is_usable(dtype) else None)


@needs_kernel
@pytest.mark.skipif(not OnednnLinear.is_usable(torch.bfloat16), reason="oneDNN does not compute in bfloat16 here")
def test_onednn_computes_in_the_types_that_the_cpu_has_tiles_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert packed_layer(torch.bfloat16, kernel=True) is OnednnLinear
    assert packed_layer(torch.float32, kernel=True) is KernelLinear


@needs_kernel
def test_each_layer_is_packed_as_its_own_type_asks() -> None:
    """Some models keep single layers in float32."""
    model = Layers(lambda m, x: None, a=nn.Linear(4, 4, dtype=torch.bfloat16), b=nn.Linear(4, 4))
    samples = {"a": torch.randn(2, 4).bfloat16(), "b": torch.randn(2, 4)}
    assert pack_linears(model, samples, kernel=True) == {"a": KernelLinear, "b": KernelLinear}
    assert [model.get_submodule(name)(x).dtype for name, x in samples.items()] == [torch.bfloat16, torch.float32]


def test_a_pass_that_breaks_the_model_is_noticed_and_the_model_served_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_tiny_model("llama", tmp_path)

    def spoil(model: nn.Module, *_: object, **__: object) -> dict[str, type[nn.Module]]:
        model.get_output_embeddings().weight.neg_()
        return {}

    monkeypatch.setattr(passes, "pack_linears", spoil)
    model, config = load(directory)
    expected = probe_logits(model, config)
    with pytest.raises(PassError, match=r"changed by \d+\.\d% of their spread"):
        apply_passes(model, config, fuse=False, pack=True, kernel=False)

    with caplog.at_level(logging.WARNING):
        runner = ModelRunner(EngineConfig(model=str(directory), dtype="float32", device="cpu", num_blocks=8))
    assert "passes_skipped" in caplog.text
    assert torch.equal(probe_logits(runner._model, config), expected)


@needs_kernel
@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_a_kernel_that_computes_something_else_is_noticed_and_the_model_served_without(
    wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In one of 64 outputs, for one of the probe's tokens."""
    directory = make_tiny_model("llama", tmp_path)

    def spoiled(x: torch.Tensor, weight: linear_kernel.PackedWeight) -> torch.Tensor:
        y = linear(x, weight)
        y[..., 3, 5] *= wrong
        return y

    linear = linear_kernel.linear
    monkeypatch.setattr(linear_kernel, "linear", spoiled)
    with caplog.at_level(logging.WARNING):
        config = EngineConfig(model=str(directory), dtype="bfloat16", device="cpu", num_blocks=8, fuse_layers=False)
        runner = ModelRunner(config)
    assert "passes_skipped" in caplog.text
    assert "in packed weights" in caplog.text
    assert not any(isinstance(module, KernelLinear) for module in runner._model.modules())


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=needs_packing), pytest.param(torch.bfloat16, marks=needs_kernel)]
)
@pytest.mark.parametrize("tied", [False, True])
def test_no_weight_is_kept_beside_its_packed_form(
    tied: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor embeddings that a tied head has: they are looked up there."""
    model, config = load(make_tiny_model("llama", tmp_path, tie_word_embeddings=tied), dtype)
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    weights = {name: weakref.ref(module.weight) for name, module in linears}
    del linears
    alive_when_packed: set[str] = set()

    def pack_and_look(
        model: nn.Module, samples: Mapping[str, torch.Tensor], *, kernel: bool
    ) -> dict[str, type[nn.Module]]:
        packed = pack_linears(model, samples, kernel=kernel)
        alive_when_packed.update(name for name, weight in weights.items() if weight() is not None)
        return packed

    monkeypatch.setattr(passes, "pack_linears", pack_and_look)
    apply_passes(model, config, fuse=False, pack=True, kernel=True)
    assert alive_when_packed == set()


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_embeddings_are_looked_up_in_the_packed_head(dtype: torch.dtype, tmp_path: Path) -> None:
    model, config = load(make_tiny_model("llama", tmp_path, tie_word_embeddings=True, vocab_size=331), dtype)
    ids = torch.tensor([[0, 330, 31, 32, 33], [5, 5, 299, 1, 64]])
    expected = model.get_input_embeddings()(ids)
    apply_passes(model, config, fuse=True, pack=True, kernel=True)
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, PackedEmbedding)
    assert embeddings.num_embeddings == 331
    assert torch.equal(embeddings(ids), expected)


@needs_kernel
def test_tied_embeddings_that_are_more_than_looked_up_stay(tmp_path: Path) -> None:
    """Gemma scales them."""
    model, config = load(make_tiny_model("gemma3_text", tmp_path, tie_word_embeddings=True))
    expected = model.get_input_embeddings()(torch.arange(9))
    apply_passes(model, config, fuse=True, pack=True, kernel=True)
    assert torch.equal(model.get_input_embeddings()(torch.arange(9)), expected)
    assert not isinstance(model.get_input_embeddings(), PackedEmbedding)


@needs_packing
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=needs_kernel)])
def test_packed_weights_leave_their_file(kernel: bool, tmp_path: Path) -> None:
    model, config = load(make_tiny_model("qwen2", tmp_path))
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    apply_passes(model, config, fuse=False, pack=True, kernel=kernel)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


# What may be replaced


class Layers(nn.Module):
    """Linear layers, and a forward given by the test."""

    def __init__(self, run: Callable[[Layers, torch.Tensor], object], **layers: nn.Module) -> None:
        super().__init__()
        self._run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> object:
        return self._run(self, x)


class SpecialLinear(nn.Linear):
    pass


def replaceable(model: Layers) -> list[str]:
    samples = watch_linears(model, lambda: model(torch.ones(2, 4)))
    assert all(torch.equal(sample, torch.ones(2, 4)) for sample in samples.values())
    return list(samples)


def test_layers_that_are_merely_called_are_replaceable() -> None:
    assert replaceable(Layers(lambda m, x: m.a(x), a=nn.Linear(4, 4), never_called=nn.Linear(4, 4))) == ["a"]


@pytest.mark.parametrize(
    "run",
    [lambda m, x: m.a(x.to(m.a.weight.dtype)), lambda m, x: m.a(input=x), lambda m, x: m.a(x) * m.a.out_features],
)
def test_layers_that_are_looked_into_are_left_alone(run: Callable[[Layers, torch.Tensor], object]) -> None:
    assert replaceable(Layers(run, a=nn.Linear(4, 4))) == []


def test_special_shared_and_hooked_layers_are_left_alone() -> None:
    shared, hooked = nn.Linear(4, 4), nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    model = Layers(
        lambda m, x: [layer(x) for layer in m.children()], a=SpecialLinear(4, 4), b=shared, c=shared, d=hooked
    )
    assert replaceable(model) == []


def test_watching_leaves_the_model_as_it_was_even_if_it_fails() -> None:
    def fail(m: Layers, x: torch.Tensor) -> object:
        m.a(x)
        raise ValueError("no")

    a = nn.Linear(4, 4)
    model = Layers(fail, a=a)
    with pytest.raises(ValueError, match="no"):
        replaceable(model)
    assert model.a is a


# Packing


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [(OnednnLinear, torch.float32), (OnednnLinear, torch.bfloat16), (KernelLinear, torch.bfloat16)],
)
@pytest.mark.parametrize("shape", [(1, 48), (1, 1, 48), (1, 17, 48), (3, 700, 48), (0, 48), (1, 0, 48)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_layers_give_what_they_gave(
    bias: bool, shape: tuple[int, ...], layer: type[nn.Module], dtype: torch.dtype
) -> None:
    if not layer.is_usable(dtype):
        pytest.skip(f"no packed weights of {dtype} here")
    linear = nn.Linear(48, 80, bias=bias, dtype=dtype)
    x = torch.randn(shape, dtype=dtype)
    torch.testing.assert_close(layer(linear)(x), linear(x), atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=0)


@needs_packing
def test_onednn_meets_few_numbers_of_rows() -> None:
    sizes = [padded_rows(num_rows) for num_rows in range(2049)]
    assert sizes[:17] == [*range(17)]
    assert all(num_rows <= size <= num_rows * 9 / 8 for num_rows, size in enumerate(sizes))
    assert all(size <= num_rows * 17 / 16 for num_rows, size in enumerate(sizes) if num_rows > 256)
    assert len(set(sizes)) <= 100
    assert all(padded_rows(size) == size for size in sizes)


@needs_packing
def test_onednn_takes_tensors_that_are_not_contiguous() -> None:
    linear = nn.Linear(48, 80)
    x = torch.randn(2, 9, 96)[:, ::2, 24:72]
    torch.testing.assert_close(OnednnLinear(linear)(x), linear(x))
