"""`kv_cache_dtype`: keys and values in 8 bits give the same whichever way they came into the cache, and nearly what
they give unquantized.

What codes stand for, and that kernels read and write them, is `tests/kernels/test_quantize_kv.py`. Here the reference
is the engine itself with a cache of the same type: each prompt alone, cold and in one step. Whether that is right shows
in what quantization costs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import torch
import transformers
from peft import PeftModel

from benchmarks.perplexity import TEXT, contexts_of, token_logprobs
from engine_core import EngineConfig, EngineCore, EngineRequest, InvalidConfigError
from engine_core.config import KVCacheDtype
from engine_core.model.runner import ModelRunner
from kernels.dispatch import computed_by
from kernels.quantize_kv import QUANTIZED_TYPES
from tests.adapters import make_adapter
from tests.tiny_models import make_tiny_model

from .any_architecture import save_random_model, tiny_configs
from .equality import (
    EngineRun,
    corrupt_last_cached_block,
    greedy,
    load_reference_model,
    make_engine,
    poison_unowned_slots,
    run_prompts,
    run_requests,
)

DATA = Path(__file__).parent.parent / "data" / "model"
GetDirectory = Callable[[str], Path]

every_type = pytest.mark.parametrize("kv_cache_dtype", list(QUANTIZED_TYPES))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_the_types_are_those_there_are() -> None:
    assert get_args(KVCacheDtype) == ("auto", *sorted(QUANTIZED_TYPES))


# The same, however it came there


@dataclass(frozen=True)
class Cold:
    """What the engine makes of a prompt by itself, in one step, with nothing cached."""

    prompt: list[int]
    run: EngineRun

    def differs(self, other: EngineRun) -> float:
        """By how much the log-probabilities do at most, up to the first token that is another one."""
        pairs = zip(self.run.token_ids, other.token_ids, strict=True)
        same = next((place for place, (a, b) in enumerate(pairs) if a != b), len(other.token_ids) - 1)
        differences = [(other.logprobs[place] - self.run.logprobs[place]).abs().max() for place in range(same + 1)]
        # NaN is a difference.
        return torch.stack(differences).nan_to_num(torch.inf).max().item()


def cold_runs(directory: Path, prompts: Sequence[list[int]], **settings: object) -> list[Cold]:
    engine = make_engine(directory, enable_prefix_caching=False, num_threads=1, **settings)
    poison_unowned_slots(engine)
    return [Cold(prompt, run_prompts(engine, [prompt])[0]) for prompt in prompts]


def check_same_when_cached(
    directory: Path, prompts: Sequence[list[int]], *, tolerance: float, chunk_size: int = 17, **settings: object
) -> None:
    cold = cold_runs(directory, prompts, **settings)
    engine = make_engine(directory, max_num_batched_tokens=chunk_size, max_num_seqs=8, num_threads=1, **settings)
    poison_unowned_slots(engine)
    for times_before in range(2):
        runs = run_prompts(engine, prompts)
        for each, run in zip(cold, runs, strict=True):
            assert each.differs(run) <= tolerance
            assert run.num_cached_tokens >= times_before * (len(each.prompt) // 16 * 16 - 1)
    check_sees_a_spoiled_scale(engine, cold, tolerance)


def check_sees_a_spoiled_scale(engine: EngineCore, cold: Sequence[Cold], tolerance: float) -> None:
    longest = max(cold, key=lambda each: len(each.prompt))
    corrupt_last_cached_block(engine, EngineRequest("probe", longest.prompt))
    assert longest.differs(run_prompts(engine, [longest.prompt])[0]) > 10 * tolerance


def chosen_prompts(name: str) -> list[list[int]]:
    prompts: list[list[int]] = json.loads((DATA / f"{name}.json").read_text())["prompts"]
    return prompts[:6]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", *QUANTIZED_TYPES])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3_text"])
def test_exactly_where_that_is_exact_unquantized(name: str, kv_cache_dtype: str, model_directory: GetDirectory) -> None:
    """Sums of so few keys come out the same in any chunks."""
    prompts = chosen_prompts(name)[2:]
    check_same_when_cached(model_directory(name), prompts, tolerance=0, kv_cache_dtype=kv_cache_dtype)


@every_type
def test_preempted(kv_cache_dtype: str, model_directory: GetDirectory) -> None:
    directory, prompts = model_directory("llama"), chosen_prompts("llama")
    cold = cold_runs(directory, prompts, kv_cache_dtype=kv_cache_dtype)
    engine = make_engine(
        directory,
        kv_cache_dtype=kv_cache_dtype,
        num_blocks=14,
        max_num_batched_tokens=64,
        max_num_seqs=len(prompts),
        reserve_full_sequence=False,
        num_threads=1,
    )
    poison_unowned_slots(engine)
    runs = run_prompts(engine, prompts)
    assert engine.stats().preemptions
    assert [each.differs(run) for each, run in zip(cold, runs, strict=True)] == [0] * len(prompts)


# A sum that comes out differently in its last bit may make one code the next one.
ANOTHER_CODE = 0.02


@every_type
@pytest.mark.parametrize("architecture", ["GptOss", "DeepseekV3"])
def test_sinks_and_values_that_are_narrower_than_keys(architecture: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    [config, *_] = tiny_configs(getattr(transformers, f"{architecture}Config"), windowed=architecture == "GptOss")
    save_random_model(getattr(transformers, f"{architecture}ForCausalLM"), config, tmp_path)
    prompts = torch.randint(3, 250, (3, 77), generator=torch.Generator().manual_seed(1)).tolist()
    check_same_when_cached(tmp_path, prompts, tolerance=ANOTHER_CODE, kv_cache_dtype=kv_cache_dtype)


@every_type
def test_heads_that_are_read_where_they_lie(kv_cache_dtype: str, model_directory: GetDirectory) -> None:
    """As few rows are, and of a chunk not."""
    check_same_when_cached(
        model_directory("qwen3"), chosen_prompts("qwen3"), tolerance=ANOTHER_CODE, kv_cache_dtype=kv_cache_dtype
    )


@every_type
def test_in_torch(kv_cache_dtype: str, model_directory: GetDirectory) -> None:
    """As where no kernel was built."""
    with computed_by("torch"):
        check_same_when_cached(
            model_directory("llama"),
            chosen_prompts("llama"),
            tolerance=ANOTHER_CODE,
            kv_cache_dtype=kv_cache_dtype,
            fuse_layers=False,
            prepack_weights=False,
        )


@every_type
def test_with_an_adapter(kv_cache_dtype: str, model_directory: GetDirectory, tmp_path: Path) -> None:
    """As with weights that it was merged into, which are rounded in other places."""
    directory, prompts = model_directory("llama"), chosen_prompts("llama")[:3]
    path = make_adapter(directory, tmp_path / "adapter")
    merged = PeftModel.from_pretrained(load_reference_model(directory), path).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    cold = cold_runs(tmp_path / "merged", prompts, kv_cache_dtype=kv_cache_dtype)

    engine = make_engine(
        directory,
        kv_cache_dtype=kv_cache_dtype,
        enable_lora=True,
        max_num_batched_tokens=17,
        max_num_seqs=8,
        num_threads=1,
    )
    engine.load_adapter("adapter", path)
    for times_before in range(2):
        asked = [EngineRequest(str(i), prompt, greedy(), adapter="adapter") for i, prompt in enumerate(prompts)]
        runs = run_requests(engine, [(request, {}) for request in asked])
        for each, run in zip(cold, runs, strict=True):
            assert each.differs(run) <= 3 * ANOTHER_CODE
            assert run.num_cached_tokens >= times_before * (len(each.prompt) // 16 * 16 - 1)
    without = run_prompts(engine, prompts)
    assert min(each.differs(run) for each, run in zip(cold, without, strict=True)) > 30 * ANOTHER_CODE


# What it costs


@pytest.mark.slow
def test_smollm2_foretells_a_text_nearly_as_in_float32(smollm2: Path) -> None:
    """In chunks, too: what they change is less than what quantization does."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    [context, *_] = contexts_of(tokenizer(TEXT.read_text()).input_ids, 256)

    def logprobs(**settings: object) -> torch.Tensor:
        engine = make_engine(smollm2, enable_prefix_caching=False, **settings)
        return torch.tensor(token_logprobs(engine, [context]))

    exact = logprobs()
    for kv_cache_dtype, most in (("int8", 0.05), ("fp8_e4m3", 0.1)):
        whole = logprobs(kv_cache_dtype=kv_cache_dtype)
        in_chunks = logprobs(kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=100)
        cost = (whole - exact).abs().mean()
        assert 0 < cost < most
        assert abs((whole - exact).mean()) < 0.01
        assert (in_chunks - whole).abs().mean() < cost


# What is said of it


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path)


def test_memory_per_token(tiny: Path) -> None:
    """Of 4 layers, keys and values of 2 heads of 16 each."""
    expected = {"auto": 4 * 2 * 2 * 16 * 4, "int8": 4 * 2 * 2 * (16 + 4), "fp8_e4m3": 4 * 2 * 2 * (16 + 4)}
    for kv_cache_dtype, token_bytes in expected.items():
        engine = make_engine(tiny, kv_cache_dtype=kv_cache_dtype, num_blocks=None, kv_cache_memory_bytes=10**6)
        runner = engine.runner
        assert isinstance(runner, ModelRunner)
        assert runner.info.num_blocks == 10**6 // (16 * token_bytes)
        assert sum(tensor.nbytes for tensor in runner.pool.tensors) == runner.info.num_blocks * 16 * token_bytes


def test_it_is_part_of_the_namespace_and_shown(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engines = [make_engine(tiny, kv_cache_dtype=name) for name in ("auto", *QUANTIZED_TYPES)]
    assert len({engine.capabilities.cache_namespace for engine in engines}) == 3
    shown = [engine.capabilities.cache_config["cache_dtype"] for engine in engines]
    assert shown == ["float32", *QUANTIZED_TYPES]
    assert [f"kv_dtype={name} " in caplog.text for name in shown] == [True] * 3


def test_an_unknown_type_is_refused(tiny: Path) -> None:
    config = EngineConfig(model=str(tiny), dtype="float32", device="cpu", kv_cache_dtype="fp4")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfigError, match="kv_cache_dtype: 'fp4' is none of auto, fp8_e4m3, int8"):
        ModelRunner(config)
