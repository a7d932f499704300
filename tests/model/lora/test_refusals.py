"""What is refused, with which reason, and that nothing else is told or done."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from engine_core.errors import AdapterError
from engine_core.model.lora.peft_config import parse_peft_config
from tests.adapters import make_adapter
from tests.model.lora.adapter_files import CONFIG, WEIGHTS, change_settings, change_weights, read
from tests.tiny_models import make_tiny_model

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
Tensors = dict[str, torch.Tensor]


def refused(directory: Path | str, model: Path, match: str, *, reason: str = "invalid_adapter", **how: Any) -> str:
    with pytest.raises(AdapterError, match=match) as caught:
        read(directory, model, **how)
    assert (caught.value.reason, caught.value.param) == (reason, "lora_path")
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only 'LORA'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"use_dora": True}, "'use_dora' is True: DoRA"),
        ({"modules_to_save": ["lm_head"]}, r"'modules_to_save' is \['lm_head'\]: whole layers"),
        ({"bias": "all"}, "'bias' is 'all': biases"),
        ({"bias": "lora_only"}, "'bias' is 'lora_only': biases"),
        ({"lora_bias": True}, "'lora_bias' is True: biases"),
        ({"fan_in_fan_out": True}, "'fan_in_fan_out'"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "'target_parameters'"),
        ({"trainable_token_indices": {"embed_tokens": [1]}}, "'trainable_token_indices'"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "'layer_replication'"),
        ({"alora_invocation_tokens": [1, 2]}, "'alora_invocation_tokens'"),
        ({"use_qalora": True}, "'use_qalora'"),
        ({"megatron_config": {"a": 1}}, "'megatron_config'"),
        ({"arrow_config": {"top_k": 1}}, "'arrow_config'"),
        ({"velora_config": {"num_groups": 4}}, "'velora_config'"),
        ({"kasa_config": {"beta": 1e-4}}, "'kasa_config'"),
        ({"use_bdlora": {"nblocks": 2}}, "'use_bdlora'"),
        ({"monteclora_config": {"num_samples": 8}}, "'monteclora_config'"),
        ({"ensure_weight_tying": True}, "'ensure_weight_tying'"),
        ({"a_later_setting": "on"}, "'a_later_setting' is 'on': this setting is not known"),
        *(
            ({"init_lora_weights": start}, f"init_lora_weights is '{start}'.*path_initial_model_for_weight_conversion")
            for start in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "a_later_one")
        ),
        ({"target_modules": None}, "target_modules must say"),
        ({"target_modules": [1]}, r"Expected `str`, got `int` - at `\$.target_modules\[0\]`"),
        ({"r": 0}, "r is 0; it must be from 1"),
        ({"r": -4}, "r is -4"),
        ({"r": True}, r"Expected `int`, got `bool` - at `\$.r`"),
        ({"r": 4.5}, r"Expected `int`, got `float` - at `\$.r`"),
        ({"r": "4"}, r"Expected `int`, got `str` - at `\$.r`"),
        ({"r": None}, r"at `\$.r`"),
        ({"r": 10**400}, "r is 1000+…; it must be from 1 to"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\] is 0"),
        ({"lora_alpha": 0}, "lora_alpha is 0; it must be above 0"),
        ({"lora_alpha": -8}, "lora_alpha is -8"),
        ({"lora_alpha": 1e30}, r"lora_alpha is 1e\+30; .* at most 1,000,000"),
        ({"lora_alpha": True}, r"at `\$.lora_alpha`"),
        ({"alpha_pattern": {"q_proj": -1.0}}, r"alpha_pattern\['q_proj'\] is -1.0"),
        ({"target_modules": ["q_proj"]}, "has weights for 'model.layers.0.mlp.down_proj', which .* leave out"),
        ({"layers_to_transform": [0]}, "has weights for 'model.layers.1.mlp.down_proj', which .* leave out"),
        ({"exclude_modules": "model.layers.0.*"}, "has weights for 'model.layers.0.mlp.down_proj'"),
        ({"target_modules": ["q_proj", "down_proj", "k_proj"]}, "no weights for 'model.layers.0.self_attn.k_proj'"),
        ({"r": 2}, r"'base_model.*lora_A.weight' has the shape \[4, (64|128)\]; .* must be \[2, (64|128)\]"),
        ({"r": 9}, r"its rank is 9 .* at most 8: raise --max-lora-rank"),
        (
            {"rank_pattern": {"0.self_attn.q_proj": 64}},
            "its rank is 64 .*layers.0.self_attn.q_proj",
        ),
    ],
    ids=str,
)
def test_settings(llama: Path, adapter: Path, settings: dict[str, Any], match: str) -> None:
    change_settings(adapter, **settings)
    refused(adapter, llama, match)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is no JSON that can be read"),
        (b"\x80\x04pickled", "is no JSON that can be read"),
        (b'{"peft_type": "LORA", "r": NaN}', "is no JSON that can be read"),
        (b'{"peft_type": "LORA", "r": 1e999}', "is no JSON that can be read"),
        (b"[" * 500_000, "is no JSON that can be read"),
        (b'{"a":' * 100_000, "is no JSON that can be read"),
        (b"[]", "must be a JSON object"),
        (b'{"x": "' + b"a" * 1_000_000 + b'"}', "has more than 1,000,000 bytes"),
    ],
    ids=lambda value: value[:20],
)
def test_settings_that_are_none(llama: Path, adapter: Path, content: bytes, match: str) -> None:
    (adapter / CONFIG).write_bytes(content)
    refused(adapter, llama, f"^{CONFIG} {match}")


def test_settings_that_are_all_wrong_are_not_quoted_at_length(llama: Path, adapter: Path) -> None:
    change_settings(adapter, **{"x" * 10_000: "y" * 10_000 + "\n"})
    message = refused(adapter, llama, "this setting is not known")
    assert len(message) < 500 and "\n" not in message


def _renamed(before: str, after: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(before, after): tensor for name, tensor in tensors.items()}


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def _with_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda tensors: {}, "no weights for 'model.layers.0.self_attn.q_proj'"),
        (lambda tensors: {A: tensors[A]}, "'model.layers.0.self_attn.q_proj' has lora_A and no lora_B"),
        (lambda tensors: {B: tensors[B]}, "'model.layers.0.self_attn.q_proj' has lora_B and no lora_A"),
        (
            lambda tensors: {k: v for k, v in tensors.items() if k != A},
            "'model.layers.0.self_attn.q_proj' has lora_B and no lora_A",
        ),
        (
            _renamed("layers.0", "layers.7"),
            "'model.layers.7.mlp.down_proj' is no linear layer of this model.*; it was trained on",
        ),
        (_renamed("base_model.model.", ""), "'model.layers.0.mlp.down_proj.lora_A.weight' is no weight of LoRA"),
        (_renamed("lora_A.weight", "lora_embedding_A"), "LoRA on embeddings"),
        (_renamed("lora_A.weight", "lora_magnitude_vector"), "DoRA"),
        (_renamed("lora_B.weight", "lora_B.bias"), "biases"),
        (_renamed("layers.1", "layers.1.modules_to_save"), "is no linear layer of this model"),
        (lambda tensors: tensors | {"base_model.model.lm_head.weight": torch.ones(1)}, "is no weight of LoRA"),
        (
            lambda tensors: tensors | {A.replace(".weight", ".b.weight"): tensors[A] + 1},
            r"several adapters: \['None', 'b'\]",
        ),
        (_set(A, lambda t: t[:, :-1]), r"q_proj.lora_A.weight' has the shape \[4, 63\]; .* must be \[4, 64\]"),
        (_set(A, lambda t: t.T), r"q_proj.lora_A.weight' has the shape \[64, 4\]"),
        (_set(B, lambda t: t.reshape(-1)), r"q_proj.lora_B.weight' has the shape \[256\]; .* must be \[64, 4\]"),
        (_set(B, lambda t: t.half()), "is of another type than .*: torch.float32, torch.float16"),
        (_set(B, lambda t: t.double()), "is of type 'F64'; float32, float16 and bfloat16 are read"),
        (_set(B, lambda t: t.to(torch.int8)), "is of type 'I8'"),
        (_set(B, lambda t: t.to(torch.float8_e4m3fn)), "is of type 'F8_E4M3'"),
        (_set(B, _with_value(float("nan"))), f"'{B}' has values that are infinite or no numbers"),
        (_set(A, _with_value(float("-inf"))), f"'{A}' has values that are infinite or no numbers"),
    ],
)
def test_weights(llama: Path, adapter: Path, change: Callable[[Tensors], Tensors | None], match: str) -> None:
    change_weights(adapter, change)
    refused(adapter, llama, match)


def _header(tensors: dict[str, Any], data: bytes = b"", *, length: int | None = None) -> bytes:
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _entry(shape: list[Any], start: Any, end: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is cut off after 0 bytes"),
        (b"\x01\x02", "is cut off after 2 bytes"),
        (struct.pack("<Q", 2**63), "is no safetensors file, or is cut off"),
        (_header({}, length=100), "is no safetensors file, or is cut off"),
        (struct.pack("<Q", 5_000_000) + b" " * 5_000_000, "at most 4,194,304 are read"),
        (struct.pack("<Q", 4) + b"[{]}", "its header is not that of a safetensors file"),
        (struct.pack("<Q", 100_000) + b'{"a":' * 20_000, "its header is not that of a safetensors file"),
        (_header({A: 1}), "its header is not that of a safetensors file"),
        (_header({A: {"dtype": "F32", "shape": [1]}}), "missing required field `data_offsets`"),
        (_header({A: _entry([-1], 0, 4)}, b"1234"), "its header is not that"),
        (_header({A: _entry([1.5], 0, 4)}, b"1234"), "its header is not that"),
        (_header({A: _entry([10**30], 0, 4)}, b"1234"), "its header is not that"),
        (_header({A: _entry([2**53] * 9, 0, 4)}, b"1234"), "its header is not that .* of length <= 8"),
        (_header({A: _entry([2**40], 0, 4)}, b"1234"), "lies from byte 0 to 4; its shape .* has 4,398,046,511,104"),
        (_header({A: _entry([1], 4, 0)}, b"1234"), "lies from byte 4 to 0"),
        (_header({A: _entry([1], 0, 4), B: _entry([1], 0, 4)}, b"1234"), "and those before it end at 4"),
        (_header({A: _entry([1], 0, 4), B: _entry([1], 8, 12)}, b"1" * 12), "and those before it end at 4"),
        (_header({A: _entry([1], 0, 4)}, b"12345678"), "has .* bytes; by its header it should have"),
        (_header({A: _entry([2], 0, 8)}, b"1234"), "has .* bytes; by its header it should have"),
    ],
    ids=lambda value: str(value[-40:]),
)
def test_weights_that_are_none(llama: Path, adapter: Path, content: bytes, match: str) -> None:
    (adapter / WEIGHTS).write_bytes(content)
    refused(adapter, llama, f"^{WEIGHTS}.*{match}")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (WEIGHTS, _header({A: {**_entry([1], 0, 4), "x" * 1_000_000: 1}}, b"1234")),
        (CONFIG, json.dumps({"peft_type": "LORA", "target_modules": f"(?P<{'x' * 900_000}!>)"}).encode()),
    ],
)
def test_no_message_is_as_long_as_what_it_quotes(llama: Path, adapter: Path, name: str, content: bytes) -> None:
    (adapter / name).write_bytes(content)
    assert len(refused(adapter, llama, "x{100}")) < 1100


def test_settings_as_deep_as_can_be_read_are_refused() -> None:
    for setting in ("peft_type", "a_later_setting"):
        for depth in range(500, 1000):
            settings = f'"target_modules": "q_proj", "{setting}": {"[" * depth}{"]" * depth}'
            with pytest.raises(AdapterError, match=f"{CONFIG}(: .*{setting}| is no JSON)"):
                parse_peft_config(f'{{"peft_type": "LORA", {settings}}}'.encode())


def test_a_rank_that_is_too_large_costs_no_reading(llama: Path, adapter: Path) -> None:
    """Of gigabytes of weights nothing but the header is read: there is nothing else in the file."""
    layers = 64 * 2**24
    entry = {A: _entry([layers, 64], 0, layers * 256), B: _entry([64, layers], layers * 256, layers * 512)}
    header = _header(entry)
    with (adapter / WEIGHTS).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + layers * 512)
    change_settings(adapter, target_modules=["0.self_attn.q_proj"], r=2**20)
    refused(adapter, llama, r"its rank is 1048576 .* at most 8: raise --max-lora-rank")
    change_settings(adapter, r=4)
    refused(adapter, llama, r"has the shape \[1073741824, 64\]; .* must be \[4, 64\]")


def test_an_adapter_of_a_larger_model_names_that(adapter: Path, tmp_path: Path) -> None:
    other = make_tiny_model("llama", tmp_path / "other", num_hidden_layers=2, hidden_size=32)
    refused(adapter, other, r"has the shape \[4, 64\]; .* layer it must be \[4, 32\]; it was trained on")


def test_adapters_made_by_peft_that_are_none_of_plain_lora(llama: Path, tmp_path: Path) -> None:
    targets = ["q_proj"]
    for at, (settings, match) in enumerate(
        [
            ({"use_dora": True}, "'use_dora'"),
            ({"bias": "all"}, "'bias'"),
            ({"modules_to_save": ["lm_head"]}, "'modules_to_save'"),
            ({"trainable_token_indices": [1, 2]}, "'trainable_token_indices'"),
            ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
            ({"layer_replication": [(0, 2), (0, 2)]}, "'layer_replication'"),
        ]
    ):
        refused(make_adapter(llama, tmp_path / str(at), targets=targets, **settings), llama, match)
    embeddings = ["embed_tokens", "q_proj"]
    refused(_embedding_adapter(llama, tmp_path / "embedding", embeddings), llama, "LoRA on embeddings")


def _embedding_adapter(model: Path, directory: Path, targets: list[str]) -> Path:
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(base, LoraConfig(target_modules=targets)).save_pretrained(
        str(directory), save_embedding_layers=False
    )
    return directory


def test_what_peft_converted_to_plain_lora_is_accepted(llama: Path, tmp_path: Path) -> None:
    """The way out that the message about `init_lora_weights` names."""
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights="olora"))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(str(tmp_path / "start"), save_embedding_layers=False)
    model.peft_config["default"].init_lora_weights = "olora"
    model.save_pretrained(
        str(tmp_path / "plain"),
        save_embedding_layers=False,
        path_initial_model_for_weight_conversion=str(tmp_path / "start"),
    )
    assert {part.a.shape[0] for part in read(tmp_path / "plain", llama).parts.values()} == {4}


@pytest.mark.parametrize("root_is_given", [False, True])
def test_what_is_missing_is_said_to_be(llama: Path, adapter: Path, root_is_given: bool) -> None:
    how = {"root": adapter.parent} if root_is_given else {}
    refused(adapter / "nowhere", llama, "nowhere' does not exist", reason="path_not_found", **how)
    refused(adapter / CONFIG / "below", llama, "does not exist", reason="path_not_found", **how)
    refused(adapter / CONFIG, llama, "is no directory", **how)
    (adapter / WEIGHTS).rename(adapter / "moved")
    refused(adapter, llama, f"has no {WEIGHTS}", reason="path_not_found", **how)
    (adapter / CONFIG).unlink()
    refused(adapter, llama, f"has no {CONFIG}", reason="path_not_found", **how)


@pytest.mark.parametrize("path", ["nul\0byte", "\udc80", "a" * 300, "a/" * 3000, ""], ids=repr)
def test_what_can_be_no_path(llama: Path, adapter: Path, path: str) -> None:
    for root in (None, adapter.parent):
        with pytest.raises(AdapterError) as caught:
            read(path, llama, root=root)
        assert caught.value.reason in ("path_not_found", "invalid_adapter") and len(str(caught.value)) < 400


def test_a_pickle_is_never_loaded_and_the_message_says_how_to_convert_it(
    llama: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (adapter / "ran",))

    whole = read(adapter, llama).digest
    tensors = load_file(adapter / WEIGHTS)
    (adapter / WEIGHTS).unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Trap()))
    message = refused(adapter, llama, "has only adapter_model.bin, a pickle")
    assert not (adapter / "ran").exists()

    torch.save(tensors, adapter / "adapter_model.bin")
    monkeypatch.chdir(adapter)
    exec(message[message.index('-c "') + 4 : -1], {})
    assert read(adapter, llama).digest == whole


def test_with_a_root_nothing_that_lies_elsewhere_is_read_or_told_of(llama: Path, adapter: Path) -> None:
    root = adapter.parent / "root"
    root.mkdir()
    (root / "in").mkdir()
    (root / "link").symlink_to(adapter)
    (root / "dangling").symlink_to("/nowhere")
    elsewhere = [
        *(str(adapter), "../adapter", "in/../../adapter", str(root / ".." / "adapter"), "link", "link/"),
        *("/nowhere", "../nowhere", "dangling", "link/nowhere", "/", "/dev/zero", "/proc/self/mem"),
        str(root) + "2",
    ]
    messages = set()
    for path in elsewhere:
        message = refused(path, llama, "must lie below", reason="outside_lora_root", root=root)
        messages.add(message.partition("must")[2])
    assert len(messages) == 1

    for name in (CONFIG, WEIGHTS):
        (root / "in" / name).write_bytes((adapter / name).read_bytes())
    assert read("in", llama, root=root).digest == read(adapter, llama).digest
    for name in (CONFIG, WEIGHTS):
        (root / "in" / name).unlink()
        (root / "in" / name).symlink_to(adapter / name)
        refused("in", llama, "must lie below", reason="outside_lora_root", root=root)
        (root / "in" / name).unlink()
        (root / "in" / name).write_bytes((adapter / name).read_bytes())


def test_links_within_a_root_are_followed(llama: Path, adapter: Path) -> None:
    (adapter.parent / "link").symlink_to(adapter)
    (adapter / "weights").write_bytes((adapter / WEIGHTS).read_bytes())
    (adapter / WEIGHTS).unlink()
    (adapter / WEIGHTS).symlink_to("weights")
    assert read("link", llama, root=adapter.parent).parts


def test_links_in_a_circle(llama: Path, adapter: Path) -> None:
    (adapter.parent / "a").symlink_to("b")
    (adapter.parent / "b").symlink_to("a")
    for root in (None, adapter.parent):
        with pytest.raises(AdapterError):
            read(adapter.parent / "a", llama, root=root)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_what_is_no_regular_file_blocks_nobody(llama: Path, adapter: Path, name: str) -> None:
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        (adapter / name).rename(adapter / "kept")
        make(adapter / name)
        refused(adapter, llama, f"{name} in lora_path .* is no regular file")
        (adapter / name).rmdir() if (adapter / name).is_dir() else (adapter / name).unlink()
        (adapter / "kept").rename(adapter / name)


def test_a_file_cut_off_while_it_is_read_is_refused(
    llama: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file would end the process here."""
    import engine_core.model.lora.read_adapter as module

    def cut_off_first(*arguments: Any) -> torch.Tensor:
        os.truncate(adapter / WEIGHTS, (adapter / WEIGHTS).stat().st_size - 4096)
        return original(*arguments)

    original = module.read_tensor
    monkeypatch.setattr(module, "read_tensor", cut_off_first)
    refused(adapter, llama, f"{WEIGHTS} is cut off after [0-9,]+ bytes")
