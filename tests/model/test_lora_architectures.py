"""Every causal LM that is served can have adapters on its linear layers, and computes with them what it would if they
were part of its weights. Layers that cannot have any are those whose rows are not a step's tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_core import EngineRequest
from engine_core.model.loader import _model_class
from engine_core.model.lora import model_adapters
from engine_core.model.lora.adapter_tensors import AdapterTensors
from engine_core.model.lora.target_layers import TargetLayer
from engine_core.model.support import UnsupportedModelError, check_config, check_model_class
from kernels.lora import LoraPart

from .any_architecture import load_reference, tiny_configs
from .equality import greedy, make_engine, run_requests
from .test_every_architecture import CANNOT_BE_MADE, CONFIG_CLASSES, LOGPROB_TOLERANCE, make_prompts, reference_logprobs

RANK, SCALING = 3, 0.5
SETTINGS: dict[str, Any] = {"enable_lora": True, "num_blocks": 64, "max_num_batched_tokens": 50, "max_num_seqs": 8}
# Computed with in another way than by calling them.
ROUTERS = {"router", "wg", "classifier"}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(CONFIG_CLASSES.keys() - CANNOT_BE_MADE))
def test_what_adapters_add_is_what_they_would_add_to_the_weights(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = (tiny_configs(CONFIG_CLASSES[model_type], windowed=windowed) for windowed in (False, True))
    for config in itertools.chain.from_iterable(configs):
        try:
            check_config(config)
            model_class = _model_class(config)
            check_model_class(model_class)
            reference_logprobs(model_class, config, tmp_path)
            engine: Any = make_engine(
                tmp_path, num_blocks=64, enable_lora=True, max_num_batched_tokens=50, max_num_seqs=8
            )
        except UnsupportedModelError as reason:
            pytest.skip(str(reason))
        except Exception:  # every architecture has its own way of refusing sizes
            continue
        break
    else:
        pytest.skip("no configuration of it runs")
    check_targets(engine, tmp_path, model_class, monkeypatch)


def check_targets(engine: Any, directory: Path, model_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = engine.runner._adapters._targets
    left_out = targets.linears.keys() - targets.layers.keys()
    assert {name.rpartition(".")[2] for name in left_out} <= ROUTERS
    parts = random_parts(targets.layers)
    monkeypatch.setattr(model_adapters, "read_adapter_tensors", lambda *_, **__: AdapterTensors(bytes(32), "", parts))
    engine.load_adapter("those", directory)
    model = load_reference(model_class, directory)
    with torch.inference_mode():
        for name, part in parts.items():
            model.get_submodule(name).weight += part.scaling * part.b @ part.a
        expected = [model(input_ids=torch.tensor([p]), use_cache=False).logits[0, -1] for p in make_prompts()]
    requests = [
        (EngineRequest(str(i), prompt, greedy(1), adapter="those"), {}) for i, prompt in enumerate(make_prompts())
    ]
    for _ in range(2):
        for run, logits in zip(run_requests(engine, requests), expected, strict=True):
            assert (run.logprobs[0] - logits.float().log_softmax(dim=-1)).abs().max() <= LOGPROB_TOLERANCE


def random_parts(layers: Mapping[str, TargetLayer]) -> dict[str, LoraPart]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: LoraPart(
            torch.randn(RANK, layer.shape.in_features, generator=generator) * 0.1,
            torch.randn(layer.shape.out_features, RANK, generator=generator) * 0.1,
            SCALING,
        )
        for name, layer in layers.items()
    }
