"""Greedy outputs with adapters are PEFT's: alone and among others, cold, cached, chunked and preempted, however the
layers are computed. Every check is tried with adapters in each other's place, and then must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import engine_core.model.runner as runner_module
from engine_core import EngineRequest
from engine_core.model.lora.lora_linear import LoraLinear
from engine_core.model.passes import PassError
from engine_core.model.passes.fusing import FusedLayers
from kernels.dispatch import computed_by
from kernels.triton_language import IS_INTERPRETED
from tests.simulated_device import SimulatedQueue
from tests.simulated_kernels import simulated_kernels
from tests.tiny_models import make_tiny_model

from .adapted import (
    NO_ADAPTER,
    NUM_TOKENS,
    Adapted,
    in_each_others_slot,
    make_adapted,
    merged_model,
)
from .any_architecture import save_random_model, tiny_configs
from .equality import (
    NotEqualError,
    check_equal,
    corrupt_last_cached_block,
    generate_reference,
    greedy,
    make_engine,
    run_prompts,
    run_requests,
)

GetAdapted = Callable[[str], Adapted]

_EVERYTHING: dict[str, Any] = {"targets": "all-linear"}
_ATTENTION: dict[str, Any] = {
    "targets": ["q_proj", "v_proj", "o_proj"],
    "rank": 6,
    "use_rslora": True,
    "rank_pattern": {"q_proj": 3, "layers.1.self_attn.v_proj": 1},
    "alpha_pattern": {"o_proj": 3},
}
_MLP_AND_HEAD: dict[str, Any] = {"targets": ["gate_proj", "down_proj", "lm_head"], "rank": 16}
_SPLIT = {"everything": _EVERYTHING, "attention": _ATTENTION, "mlp and head": _MLP_AND_HEAD}
_FUSED = {
    "everything": _EVERYTHING,
    "attention": {"targets": ["qkv_proj"], "rank": 6, "use_rslora": True},
    "mlp and head": {"targets": ["gate_up_proj", "lm_head"], "rank": 16},
}
# Experts are no linear layers in transformers.
_EXPERTS = {
    "everything": {"targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "attention": _ATTENTION,
    "mlp and head": {"targets": ["k_proj", "lm_head"], "rank": 16},
}
ADAPTERS: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "llama": _SPLIT,
    "qwen2": _SPLIT,
    "qwen3": _SPLIT,
    "gemma3_text": _SPLIT,
    "olmo2": _SPLIT,
    "Phi3": _FUSED,
    "Qwen3Moe": _EXPERTS,
}
# To adapters they are as Llama.
SLOW_ARCHITECTURES = {"qwen3", "olmo2"}


@pytest.fixture(scope="session")
def adapted(model_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> GetAdapted:
    made: dict[str, Adapted] = {}

    def get(name: str) -> Adapted:
        if name not in made:
            root = tmp_path_factory.mktemp(f"adapted-{name}")
            made[name] = make_adapted(_directory(name, model_directory, root), ADAPTERS[name], root)
        return made[name]

    return get


def _directory(name: str, model_directory: Callable[[str], Path], root: Path) -> Path:
    if name[0].islower():
        return model_directory(name)
    [config, *_] = tiny_configs(getattr(transformers, f"{name}Config"), windowed=False)
    save_random_model(getattr(transformers, f"{name}ForCausalLM"), config, root / "model")
    return root / "model"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_ARCHITECTURES)) for name in ADAPTERS]
)
def test_everybody_at_once_chunked_and_cached(name: str, adapted: GetAdapted) -> None:
    those = adapted(name)
    engine = those.engine(max_num_batched_tokens=17, max_num_seqs=8)
    those.run(engine)
    for run, (_, reference) in zip(those.run(engine), those.in_turn(), strict=True):
        assert run.num_cached_tokens == len(reference.prompt_token_ids) - 1
    check_sees_mistakes(those, engine)


def test_alone(adapted: GetAdapted) -> None:
    those = adapted("llama")
    for name in those.references:
        engine = those.engine()
        for _, reference in those.in_turn(name):
            run_alone(engine, name, reference)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_preempted(name: str, adapted: GetAdapted) -> None:
    those = adapted(name)
    engine = those.engine(num_blocks=24 if name == "llama" else 48, reserve_full_sequence=False)
    for _ in range(2):
        those.run(engine)
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("name", ["everything", "attention", "mlp and head"])
def test_peft_merges_the_same_model(name: str, adapted: GetAdapted) -> None:
    those = adapted("llama")
    model = merged_model(those.directory, those.adapters[name])
    prompts = [reference.prompt_token_ids for reference in those.references[name]]
    merged = [generate_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    runs = those.run(those.engine(), name)
    check_equal(merged, runs)


# However it is computed


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({}, {FusedLayers, LoraLinear}),
        ({"fuse_layers": False}, {LoraLinear}),
        ({"linear_kernel": False}, {LoraLinear}),
        ({"prepack_weights": False}, {LoraLinear}),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_passes_change_nothing(settings: dict[str, Any], kinds: set[type], adapted: GetAdapted) -> None:
    those = adapted("llama")
    engine = those.engine(**settings)
    model: Any = engine.runner._model  # type: ignore[attr-defined]
    assert {type(module) for module in model.modules()} & {FusedLayers, LoraLinear} == kinds
    those.run(engine)


def test_a_model_that_is_loaded_again_without_passes_has_them_too(
    adapted: GetAdapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PassError("as if they had broken it")

    monkeypatch.setattr(runner_module, "apply_passes", fail)
    those = adapted("llama")
    those.run(those.engine())


def test_on_a_device_with_a_queue(adapted: GetAdapted) -> None:
    """Adapters are copied to it in its order, and decodes are replayed: those without adapters as ever."""
    those, queue = adapted("llama"), SimulatedQueue()
    with simulated_kernels():
        engine = those.engine(queue, max_num_seqs=8)
        for names in ((), (NO_ADAPTER,), ("everything", "attention")):
            before, steps = queue.num_replays, engine.stats().steps
            those.run(engine, *names)
            num_requests = len(those.in_turn(*names))
            assert engine.stats().steps - steps - num_requests <= queue.num_replays - before
        check_sees_mistakes(those, engine)


@pytest.mark.skipif(not IS_INTERPRETED, reason="Triton's interpreter stands for a GPU")
def test_kernels_are_captured_and_replayed(tmp_path: Path) -> None:
    from tests.kernels import faster_interpreter

    faster_interpreter.install()
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    directory = make_tiny_model("llama", tmp_path / "model", **sizes)
    adapters = {"some": {"targets": ["q_proj", "gate_proj", "lm_head"]}}
    those, queue = make_adapted(directory, adapters, tmp_path, prompts_of_each=1), SimulatedQueue()
    with computed_by("triton"):
        engine = those.engine(queue, max_num_seqs=2, max_model_len=96, cudagraph_capture_sizes=(2,))
        before = queue.num_replays
        those.run(engine, num_tokens=2)
        assert queue.num_replays > before


def test_without_enable_lora_nothing_is_different(adapted: GetAdapted) -> None:
    those = adapted("llama")
    plain = make_engine(those.directory, max_model_len=256)
    assert plain.runner.info.num_adapter_slots == 0
    model: Any = plain.runner._model  # type: ignore[attr-defined]
    assert not any(isinstance(module, LoraLinear) for module in model.modules())
    prompts = [reference.prompt_token_ids for reference in those.references[NO_ADAPTER]]
    without = run_prompts(plain, prompts, NUM_TOKENS)
    for run, other in zip(those.run(those.engine(), NO_ADAPTER), without, strict=True):
        for place in range(NUM_TOKENS):
            assert torch.equal(run.logprobs[place], other.logprobs[place])


def test_who_has_no_adapter_keeps_its_bits_in_any_company(adapted: GetAdapted) -> None:
    those = adapted("llama")
    alone = those.run(those.engine(), NO_ADAPTER)
    together = those.run(those.engine())
    of_nobody = [run for run, (name, _) in zip(together, those.in_turn(), strict=True) if name == NO_ADAPTER]
    for one, other in zip(alone, of_nobody, strict=True):
        assert one.token_ids == other.token_ids


# In other types, by log-probabilities


@pytest.fixture(scope="module")
def gently(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """Adapters over a model that rounding changes by little."""
    root = tmp_path_factory.mktemp("gently")
    directory = make_tiny_model("llama", root / "model", initializer_range=0.08)
    return make_adapted(directory, {"everything": _EVERYTHING}, root, prompts_of_each=3)


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantization": "int8"}, {"quantization": "int4"}],
    ids=lambda settings: "-".join(settings.values()),
)
def test_adapters_change_as_much_as_they_should(settings: dict[str, Any], gently: Adapted) -> None:
    """What an adapter adds to log-probabilities is what it adds in PEFT, up to what rounding the base does to them."""
    engine = gently.engine(**settings)
    errors = {name: mean_error(gently, engine, name) for name in gently.references}
    assert errors["everything"] < 1.5 * errors[NO_ADAPTER] + 0.01
    with in_each_others_slot(engine):
        assert mean_error(gently, engine, "everything") > 3 * errors["everything"]


def mean_error(those: Adapted, engine: Any, name: str) -> float:
    """Of the first token's log-probabilities, over the vocabulary and prompts."""
    engine.reset_prefix_cache()
    references = those.references[name]
    params = greedy(1)
    runs = run_requests(
        engine,
        [
            (EngineRequest(str(i), reference.prompt_token_ids, params, adapter=name), {})
            for i, reference in enumerate(references)
        ],
    )
    pairs = zip(runs, references, strict=True)
    return sum((run.logprobs[0] - reference.logprobs[0]).abs().mean().item() for run, reference in pairs)


@pytest.mark.slow
def test_smollm2(smollm2: Path, tmp_path: Path) -> None:
    """With an adapter that leaves it a trained model: with a much stronger one, PEFT's own two ways differ by 8e-4."""
    those = make_adapted(smollm2, {"everything": {"targets": "all-linear", "rank": 8, "strength": 0.1}}, tmp_path)
    engine = those.engine(max_num_batched_tokens=64)
    for _ in range(2):
        those.run(engine)
    check_sees_mistakes(those, engine)


def run_alone(engine: Any, name: str, reference: Any) -> None:
    request = EngineRequest("alone", reference.prompt_token_ids, greedy(NUM_TOKENS), adapter=name)
    check_equal([reference], run_requests(engine, [(request, {})]))


def check_sees_mistakes(those: Adapted, engine: Any) -> None:
    engine.reset_prefix_cache()
    with in_each_others_slot(engine), pytest.raises(NotEqualError):
        those.run(engine)
    engine.reset_prefix_cache()
    those.run(engine)
    name = next(reversed(those.references))
    reference = those.references[name][0]
    corrupt_last_cached_block(engine, EngineRequest("probe", reference.prompt_token_ids, adapter=name))
    with pytest.raises(NotEqualError):
        those.run(engine, name)
