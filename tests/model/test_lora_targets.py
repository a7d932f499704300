"""Which layers can have adapters, what is refused of those that cannot, and what a slot is computed with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from engine_core import EngineConfig, EngineRequest
from engine_core.errors import AdapterError
from engine_core.model.loader import load_config, load_model
from engine_core.model.lora.adapter_rows import RowKind
from engine_core.model.lora.target_layers import find_targets
from engine_core.model.runner import ModelRunner
from ipc.vocabulary import SamplingParams
from tests.adapters import make_adapter
from tests.tiny_models import make_tiny_model

from .adapted import with_adapters
from .equality import LOGPROB_TOLERANCE, load_reference_model, make_engine

CPU = torch.device("cpu")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "model", num_hidden_layers=2)


def load(directory: Path) -> tuple[Any, Any]:
    config = load_config(directory)
    return load_model(directory, config, torch.float32, CPU), config


def kinds(model: Any, config: Any, *, takes_pictures: bool = False) -> dict[str, RowKind]:
    targets = find_targets(model, config, takes_pictures=takes_pictures)
    return {name: target.rows for name, target in targets.items()}


def test_layers_are_found_by_the_rows_they_are_given(llama: Path) -> None:
    found = kinds(*load(llama))
    assert found.pop("lm_head") is RowKind.LOGITS
    assert len(found) == 14 and set(found.values()) == {RowKind.TOKENS}


def test_what_computes_no_text_is_for_pictures(vlm_directory: Callable[[str], Path]) -> None:
    found = kinds(*load(vlm_directory("llava")), takes_pictures=True)
    of_pictures = {name for name, kind in found.items() if kind is RowKind.PICTURES}
    assert of_pictures and all("vision_tower" in name or "multi_modal_projector" in name for name in of_pictures)
    assert {kind for name, kind in found.items() if "language_model" in name} == {RowKind.TOKENS}


class SomeRows(LlamaMLP):
    """As a mixture computes an expert: with those tokens that were sent to it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sent = x[..., 0] > 0
        return torch.zeros_like(x).masked_scatter(sent[..., None], super().forward(x[sent]))


class InAnOrderOfItsOwn(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x[0, :, 0].argsort()
        return super().forward(x[:, order])[:, order.argsort()]


class Twice(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + super().forward(2 * x)


class WithWeights(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = nn.functional.linear(x, self.gate_proj.weight)
        up, down = nn.functional.linear(x, self.up_proj.weight), self.down_proj.weight
        return nn.functional.linear(self.act_fn(gate) * up, down)


@pytest.mark.parametrize("kind", [SomeRows, InAnOrderOfItsOwn, Twice, WithWeights])
def test_layers_whose_rows_are_not_the_tokens_cannot_have_adapters(kind: type[LlamaMLP], llama: Path) -> None:
    model, config = load(llama)
    model.model.layers[1].mlp.__class__ = kind
    found = kinds(model, config)
    assert {name for name in found if "layers.1.mlp" in name} == set()
    assert len(found) == 12


def test_adapters_on_such_layers_are_refused(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = make_adapter(llama, tmp_path / "adapter")
    compute = LlamaMLP.forward

    def forward(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return compute(self, x) + compute(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    runner = make_engine(llama, enable_lora=True).runner
    with pytest.raises(AdapterError, match=r"model\.layers\.\d\.mlp.* cannot be served") as refused:
        runner.read_adapter(adapter)
    assert (refused.value.reason, refused.value.param) == ("invalid_adapter", "lora_path")


def test_a_runner_without_room_says_so(llama: Path) -> None:
    runner = ModelRunner(EngineConfig(model=str(llama), dtype="float32", device="cpu", num_blocks=8))
    assert runner.info.num_adapter_slots == 0
    with pytest.raises(AdapterError, match="without enable_lora") as refused:
        runner.read_adapter(llama)
    assert refused.value.reason == "lora_disabled"


def test_weights_beyond_float16_are_refused_where_it_computes(llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama, tmp_path / "adapter", strength=1e7)
    make_engine(llama, enable_lora=True).runner.read_adapter(adapter)
    with pytest.raises(AdapterError, match="beyond 65504"):
        make_engine(llama, enable_lora=True, dtype="float16").runner.read_adapter(adapter)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_slot_has_nothing_of_who_was_there_before(dtype: str, llama: Path, tmp_path: Path) -> None:
    """Of other layers, of a larger rank, or of nobody."""
    large = make_adapter(llama, tmp_path / "large", rank=16)
    small = make_adapter(llama, tmp_path / "small", rank=2, targets=["q_proj"], seed=1)
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "dtype": dtype}
    fresh, used = make_engine(llama, **settings), make_engine(llama, **settings)
    for engine in (fresh, used):
        engine.load_adapter("small", small)
    used.load_adapter("large", large)
    said(used, "large")
    assert said(used, "small") == said(fresh, "small")
    assert said(used, "") == said(make_engine(llama, dtype=dtype), "")
    used.unload_adapter("small")
    used.unload_adapter("large")
    assert said(used, "") == said(fresh, "")


def said(engine: Any, adapter: str) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.add_request(EngineRequest("r", list(range(40, 60)), params, adapter=adapter))
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            assert output.error is None
            tokens += output.new_token_ids
    return tokens


def test_log_probabilities_of_a_prompt_come_from_the_adapters_own_head(llama: Path, tmp_path: Path) -> None:
    """A few rows at a time, of requests in each other's company."""
    paths = {
        name: make_adapter(llama, tmp_path / name, targets=["lm_head", "up_proj"], seed=seed)
        for seed, name in enumerate(("a", "b"))
    }
    engine = make_engine(llama, enable_lora=True, max_num_batched_tokens=100)
    for name, path in paths.items():
        engine.load_adapter(name, path)
    generator = torch.Generator().manual_seed(0)
    prompts = {name: torch.randint(3, 500, (75,), generator=generator).tolist() for name in ("", "a", "b")}
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for name, prompt in prompts.items():
        engine.add_request(EngineRequest(name or "nobody", prompt, params, adapter=name))
    found: dict[str, list[float]] = {name or "nobody": [] for name in prompts}
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            found[output.request_id] += [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
    model = with_adapters(load_reference_model(llama), paths)
    with torch.inference_mode():
        for name, prompt in prompts.items():
            ids = torch.tensor([prompt])
            if name:
                model.set_adapter(name)
                logits = model(input_ids=ids).logits[0]
            else:
                with model.disable_adapter():
                    logits = model(input_ids=ids).logits[0]
            expected = logits.log_softmax(dim=-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
            assert found[name or "nobody"] == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
