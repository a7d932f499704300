"""The same modules have LoRA, with the same ranks and scalings, as where PEFT itself puts it into the model."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from engine_core.errors import AdapterError
from engine_core.model.lora.adapter_tensors import ModuleShape
from engine_core.model.lora.peft_config import parse_peft_config
from engine_core.model.lora.target_modules import Target, find_targets
from tests.model.lora.adapter_files import bare_model, linear_layers

NUM_CONFIGS = 20

EXPRESSIONS = (
    r".*(q_proj|v_proj|up_proj)",
    r".*\.layers\.\d*[13]\..*_proj",
    r"model\.layers\.0\.mlp\.(gate|down)_proj",
    r"^(?!.*(vision|visual)).*(?:q_proj|o_proj|fc1).*",
    r"(?i).*Q_PROJ",
    r".*(?:vision|language|layers).*?(?:self_attn|attn|mlp).*?(?:q_proj|qkv|down_proj|fc2)$",
    r"q_proj",
    r".*lm_head",
)
ENDS = ("q_proj", "k_proj", "o_proj", "down_proj", "lm_head", "mlp.up_proj", "0.self_attn.v_proj", "fc1", "proj", "j")
KEYS = (
    *(
        "q_proj",
        "v_proj|o_proj",
        r"layers\.1\..*",
        "^model.layers.0.mlp.down_proj",
        "mlp.+",
        "layers.2.self_attn.q_proj",
    ),
    *(r".*vision.*", "no_such_module", r"(up|gate)_proj", "down"),
)


def _random_settings(rng: random.Random, paths: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {"r": rng.choice((2, 4, 8)), "lora_alpha": rng.choice((1, 8, 12.5))}
    kind = rng.choice(("ends", "ends", "ends", "paths", "expression", "all"))
    if kind == "ends":
        settings["target_modules"] = rng.sample(ENDS, rng.randint(1, 5))
    elif kind == "paths":
        # PEFT shortens lists of 20 and more.
        some = rng.sample(paths, min(len(paths), rng.choice((1, 3, 25))))
        settings["target_modules"] = [path.split(".", rng.randint(0, 2))[-1] for path in some]
    else:
        settings["target_modules"] = (
            rng.choice(EXPRESSIONS) if kind == "expression" else rng.choice(("all-linear", "ALL-LINEAR"))
        )
    if rng.random() < 0.4:
        settings["exclude_modules"] = rng.choice(
            (rng.choice(EXPRESSIONS), rng.sample(ENDS, 2), rng.sample(paths, 3), [])
        )
    if kind in ("ends", "paths") and rng.random() < 0.5:
        settings["layers_to_transform"] = rng.choice((0, 1, [1, 3], [0], [], [17]))
        settings["layers_pattern"] = rng.choice(
            (None, "layers", ["blocks", "layers"], ["h"], [], "", "lay[e]rs", "encoder.layers")
        )
    for name in ("rank_pattern", "alpha_pattern"):
        if rng.random() < 0.4:
            settings[name] = {key: rng.randint(1, 16) for key in rng.sample(KEYS, rng.randint(1, 3))}
    settings["use_rslora"] = rng.random() < 0.3
    return settings


def _peft_targets(model: torch.nn.Module, settings: dict[str, Any]) -> tuple[bytes, dict[str, Target]]:
    """The settings as PEFT saves them, and what it makes of them: nothing if it refuses them."""
    config = LoraConfig(**settings)
    saved = config.to_dict()
    saved |= {name: sorted(value) for name, value in saved.items() if isinstance(value, set)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted = get_peft_model(model, config, low_cpu_mem_usage=True)
        except ValueError:
            return json.dumps(saved).encode(), {}
    layers = [
        (path.removeprefix("base_model.model."), module)
        for path, module in adapted.named_modules()
        if isinstance(module, LoraLayer) and isinstance(module.get_base_layer(), torch.nn.Linear)
    ]
    targets = {path: Target(module.r["default"], module.scaling["default"]) for path, module in layers}
    adapted.unload()
    return json.dumps(saved).encode(), targets


def _found_targets(saved: bytes, modules: dict[str, ModuleShape]) -> tuple[dict[str, Target], str]:
    try:
        return find_targets(parse_peft_config(saved), modules, "lm_head"), ""
    except AdapterError as error:
        return {}, str(error)


@pytest.mark.parametrize("name", ["llama", "llava", "qwen2_vl"])
def test_as_peft_chooses_them(
    name: str, model_directory: Callable[[str], Path], vlm_directory: Callable[[str], Path]
) -> None:
    directory = model_directory(name) if name == "llama" else vlm_directory(name)
    model = bare_model(directory)
    modules = linear_layers(model)
    rng = random.Random(name)
    num_found = num_ambiguous = 0
    for _ in range(NUM_CONFIGS):
        settings = _random_settings(rng, list(modules))
        saved, expected = _peft_targets(model, settings)
        found, why = _found_targets(saved, modules)
        if "leaves its layer out" in why:
            # PEFT takes such a module or leaves it, depending on all the others.
            num_ambiguous += 1
            continue
        assert found == expected, (settings, why)
        num_found += 1
    assert num_found > NUM_CONFIGS / 2 and num_ambiguous < NUM_CONFIGS / 5


def _targets(directory: Path, **settings: Any) -> dict[str, Target]:
    config = parse_peft_config(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **settings}).encode())
    return find_targets(config, linear_layers(bare_model(directory)), "lm_head")


def test_the_first_number_in_a_path_is_its_layer(llama: Path) -> None:
    """Experts, for instance, have numbers of their own."""
    config = parse_peft_config(b'{"peft_type": "LORA", "target_modules": ["w1"], "layers_to_transform": [1]}')
    paths = [f"model.layers.{layer}.experts.{expert}.w1" for layer in (0, 1) for expert in (0, 1)]
    assert list(find_targets(config, paths, None)) == paths[2:]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"target_modules": "(q_proj"}, "target_modules"),
        ({"target_modules": ["q_proj"], "exclude_modules": "*"}, "exclude_modules"),
        ({"target_modules": ["q_proj"], "rank_pattern": {"[": 3}}, "rank_pattern"),
        ({"target_modules": ["q_proj"], "alpha_pattern": {"(?P<idx": 3}}, "alpha_pattern"),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "(?P<idx>a)"}, "layers_pattern"),
        ({"target_modules": "(" * 5000 + ")" * 5000}, "target_modules"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_regular_expression_is_refused(llama: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(AdapterError, match=rf"^{named} has no valid regular expression"):
        _targets(llama, **settings)


@pytest.mark.parametrize(
    "expression", [r"(([a-z_.0-9]+)+)+!", r"((((a?){999}){999}){999}).*", r"(.|.)*\.(q_proj|.)*[^a-z]"], ids=str
)
def test_a_regular_expression_that_takes_for_ever_is_refused(
    llama: Path, expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_core.model.lora.expressions._LIMIT_S", 1)
    with pytest.raises(AdapterError, match="target_modules take more than 1 s"):
        _targets(llama, target_modules=expression)


def test_targets_that_the_model_lacks_are_refused_with_the_model_they_are_of(llama: Path) -> None:
    with pytest.raises(AdapterError, match=r"matches no linear layer of this model; it was trained on 'org/other'"):
        _targets(llama, target_modules=["c_attn"], base_model_name_or_path="org/other")


@pytest.mark.parametrize("target", ["all-linear", r".*_proj"])
def test_layers_of_a_string_are_refused_as_peft_does(llama: Path, target: str) -> None:
    with pytest.raises(AdapterError, match="layers_to_transform has no meaning"):
        _targets(llama, target_modules=target, layers_to_transform=[0])
    with pytest.raises(AdapterError, match="layers_pattern has no meaning"):
        _targets(llama, target_modules=["q_proj"], layers_pattern="layers")
