"""What is read from a PEFT directory, and what makes two adapters the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from engine_core.model.lora.digest import AdapterDigest
from kernels.lora import LoraPart
from tests.adapters import make_adapter
from tests.model.lora.adapter_files import CONFIG, WEIGHTS, change_settings, change_weights, read
from tests.tiny_models import make_tiny_model

OLD_NAMES = {
    "llava": (
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("lm_head", "language_model.lm_head"),
    ),
    "qwen2_vl": (("model.language_model.", "model."), ("model.visual.", "visual.")),
}


def test_weights_and_scalings_are_those_of_the_file(llama: Path, adapter: Path) -> None:
    stored = load_file(adapter / WEIGHTS)
    found = read(adapter, llama)

    assert found.base_model == str(llama)
    assert len(found.parts) == 4
    for path, part in found.parts.items():
        assert torch.equal(part.a, stored[f"base_model.model.{path}.lora_A.weight"])
        assert torch.equal(part.b, stored[f"base_model.model.{path}.lora_B.weight"])
        assert part.scaling == 2.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_keep_their_type(llama: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    found = read(make_adapter(llama, tmp_path, dtype=dtype), llama)
    assert {tensor.dtype for part in found.parts.values() for tensor in (part.a, part.b)} == {dtype}


def test_rank_and_scaling_may_differ_by_module(llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(
        llama,
        tmp_path,
        targets=["q_proj", "v_proj"],
        rank=4,
        alpha=8,
        use_rslora=True,
        rank_pattern={r"layers\.1\.self_attn\.q_proj": 8},
        alpha_pattern={"v_proj": 6},
    )
    parts = read(adapter, llama).parts
    by_layer = {path.removeprefix("model.layers."): (part.a.shape[0], part.scaling) for path, part in parts.items()}
    assert by_layer == {
        "0.self_attn.q_proj": (4, 8 / 4**0.5),
        "0.self_attn.v_proj": (4, 6 / 4**0.5),
        "1.self_attn.q_proj": (8, 8 / 8**0.5),
        "1.self_attn.v_proj": (4, 6 / 4**0.5),
    }


def test_an_output_head_may_be_a_target_even_if_it_is_the_embedding(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model", num_hidden_layers=1, tie_word_embeddings=True)
    adapter = make_adapter(model, tmp_path / "adapter", targets=["lm_head", "q_proj"])
    assert set(read(adapter, model).parts) == {"lm_head", "model.layers.0.self_attn.q_proj"}


def test_an_adapters_own_name_may_stand_in_its_weights_names(llama: Path, adapter: Path) -> None:
    plain = read(adapter, llama)
    change_weights(adapter, lambda tensors: {k.replace(".weight", ".default.weight"): v for k, v in tensors.items()})
    assert read(adapter, llama).digest == plain.digest


@pytest.mark.parametrize("family", OLD_NAMES)
def test_what_old_transformers_called_the_modules_is_understood(
    family: str, vlm_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    model = vlm_directory(family)
    targets = r".*(q_proj|lm_head|linear_1|attn\.qkv|mlp\.0)"
    adapter = make_adapter(model, tmp_path / "adapter", targets=targets)
    now = read(adapter, model)

    def as_before(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        renamed = {}
        for name, tensor in tensors.items():
            path = name.removeprefix("base_model.model.")
            since, before = next((pair for pair in OLD_NAMES[family] if path.startswith(pair[0])), ("", ""))
            renamed["base_model.model." + before + path.removeprefix(since)] = tensor
        assert renamed.keys() != tensors.keys()
        return renamed

    change_weights(adapter, as_before)
    assert read(adapter, model).digest == now.digest


def test_files_may_be_links_where_no_root_is_given(llama: Path, adapter: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in (CONFIG, WEIGHTS):
        (linked / name).symlink_to(adapter / name)
    assert read(linked, llama).digest == read(adapter, llama).digest


def test_a_relative_path_begins_at_the_root(llama: Path, adapter: Path) -> None:
    assert read(adapter.name, llama, root=adapter.parent).digest == read(adapter, llama, root=adapter.parent).digest


def test_every_setting_peft_writes_by_default_is_accepted(llama: Path, adapter: Path) -> None:
    settings = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, lora_alpha=8).to_dict()
    change_settings(adapter, **settings | {"target_modules": list(settings["target_modules"]), "peft_type": "LORA"})
    read(adapter, llama)


@pytest.mark.parametrize(
    "settings",
    [
        {"task_type": "CAUSAL_LM", "revision": "main", "inference_mode": True, "auto_mapping": {"a": 1}},
        {"lora_dropout": 0.1, "peft_version": "0.99", "runtime_config": {"ephemeral_gpu_offload": True}},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": False, "loftq_config": {"loftq_bits": 4}},
        {"init_lora_weights": "gaussian", "qalora_group_size": 32, "megatron_core": "elsewhere"},
        {"a_later_setting": None, "another": [], "and_another": {}, "yet_another": False},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_without_a_part_in_what_is_computed_do_not_matter(llama: Path, adapter: Path, settings: dict) -> None:
    before = read(adapter, llama).digest
    change_settings(adapter, **settings)
    assert read(adapter, llama).digest == before


def test_the_digest_does_not_depend_on_how_the_file_is_written(llama: Path, adapter: Path) -> None:
    before = read(adapter, llama).digest
    change_weights(adapter, lambda tensors: dict(reversed(tensors.items())))
    # As much scaling, said otherwise.
    change_settings(adapter, lora_alpha=4, use_rslora=True, base_model_name_or_path="elsewhere", peft_version="0.1")
    assert read(adapter, llama).digest == before


def _one_bit(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values())).view(torch.uint8)[0, 0] ^= 1


def _layers_swapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.translate(str.maketrans("01", "10")): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("change", [_one_bit, _layers_swapped])
def test_the_digest_changes_with_the_weights(llama: Path, adapter: Path, change: Callable) -> None:
    before = read(adapter, llama).digest
    change_weights(adapter, change)
    assert read(adapter, llama).digest != before


def test_the_digest_changes_with_one_scaling(llama: Path, adapter: Path) -> None:
    before = read(adapter, llama).digest
    change_settings(adapter, alpha_pattern={"0.self_attn.q_proj": 9})
    assert read(adapter, llama).digest != before


def test_equal_bytes_that_mean_something_else_have_another_digest() -> None:
    a, b = torch.zeros(2, 4, dtype=torch.float16), torch.zeros(4, 2, dtype=torch.float16)
    digests = set()
    modules = [
        [("q", LoraPart(a, b, 1.0))],
        [("k", LoraPart(a, b, 1.0))],
        [("q", LoraPart(a, b, 2.0))],
        [("q", LoraPart(a.bfloat16(), b.bfloat16(), 1.0))],
        [("q", LoraPart(a.view(4, 2), b.view(2, 4), 1.0))],
        [("q", LoraPart(a[:1], torch.zeros(12, 1, dtype=torch.float16), 1.0))],
        [("k", LoraPart(a, b, 1.0)), ("q", LoraPart(a, b, 1.0))],
    ]
    for each in modules:
        digest = AdapterDigest()
        for path, part in each:
            digest.add(path, part)
        digests.add(digest.digest())
    assert len(digests) == len(modules)


def test_nothing_is_left_open(llama: Path, adapter: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        read(adapter, llama, root=adapter.parent)
    assert len(os.listdir("/proc/self/fd")) == before
