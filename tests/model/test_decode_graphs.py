"""Captured decodes: which there are, which steps they compute, and that a model which cannot be captured is served
without.

That what they compute is right, `test_equality` says; the device is simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine_core import EngineConfig, EngineCore, EngineRequest, SamplingParams
from engine_core.model.decode_graphs import capture_sizes, is_plain_decode
from engine_core.model.runner import ModelRunner
from engine_core.request import Request
from engine_core.runner import ScheduledRequest
from kernels.dispatch import computed_by
from kernels.triton_language import IS_INTERPRETED
from tests.simulated_device import SimulatedQueue
from tests.simulated_kernels import simulated_kernels
from tests.tiny_models import make_tiny_model

PROMPTS = [[5, 6, 7], list(range(40, 57)), list(range(90, 106))]
Rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        "llama", tmp_path_factory.mktemp("tiny"), num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )


def make_engine(directory: Path, queue: SimulatedQueue | None, **settings: object) -> EngineCore:
    defaults = {"model": str(directory), "dtype": "float32", "device": "cpu", "num_blocks": 16, "max_num_seqs": 4}
    config = EngineConfig(**(defaults | settings))
    return EngineCore(config, ModelRunner(config, queue))


def run(engine: EngineCore, num_tokens: int = 8, prompts: list[list[int]] = PROMPTS, **params: Any) -> list[list[int]]:
    """Outputs of prompts that come one after another, so that there are decodes of one, two and more."""
    outputs: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True} | params))
        engine.add_request(EngineRequest(str(index), prompt, sampling))
        for _ in range(2):
            collect(engine, outputs)
    while engine.has_unfinished_requests():
        collect(engine, outputs)
    return [outputs[str(index)] for index in range(len(prompts))]


def collect(engine: EngineCore, outputs: dict[str, list[int]]) -> None:
    for output in engine.step().outputs:
        assert output.error is None, output.error
        outputs.setdefault(output.request_id, []).extend(output.new_token_ids)


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    return run(make_engine(directory, None))


@pytest.fixture
def queue() -> Iterator[SimulatedQueue]:
    with simulated_kernels():
        yield SimulatedQueue()


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"max_num_seqs": 1}, [1]),
        ({"max_num_seqs": 3}, [1, 2, 3]),
        ({"max_num_seqs": 20}, [1, 2, 4, 8, 16, 20]),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 16}, [1, 2, 4, 8, 16]),
        ({"max_num_seqs": 64, "cudagraph_capture_sizes": (32, 1, 128)}, [1, 32]),
        ({"max_num_seqs": 64, "cudagraph_capture_sizes": ()}, []),
    ],
)
def test_sizes_reach_to_the_largest_step(settings: dict[str, Any], sizes: list[int]) -> None:
    assert capture_sizes(EngineConfig(**settings)) == sizes


def test_sizes_are_close_to_each_other_however_large() -> None:
    sizes = capture_sizes(EngineConfig(max_num_seqs=1000, max_num_batched_tokens=4096))
    assert sizes[-1] == 1000
    assert all(larger - smaller <= max(smaller, 8) for smaller, larger in itertools.pairwise(sizes))


def test_every_step_that_only_decodes_is_replayed(
    directory: Path, queue: SimulatedQueue, expected: list[list[int]]
) -> None:
    engine = make_engine(directory, queue)
    before = queue.num_replays
    assert run(engine) == expected
    num_prefills = len(PROMPTS)
    assert queue.num_replays - before == engine.stats().steps - num_prefills


def test_sampled_outputs_are_those_of_the_cpu(directory: Path, queue: SimulatedQueue) -> None:
    params = {"temperature": 0.9, "seed": 7, "top_p": 0.9, "min_tokens": 3, "logprobs": 2, "logit_bias": {5: 3.0}}
    assert run(make_engine(directory, queue), **params) == run(make_engine(directory, None), **params)


def test_how_many_tokens_there_are_is_known_before_what_they_are(directory: Path, queue: SimulatedQueue) -> None:
    # Nearly every token ends a request, but for its first ones.
    stops = tuple(token for token in range(512) if token % 8)
    params = {"min_tokens": 5, "stop_token_ids": stops, "logit_bias": {8: 0.1}}
    outputs = run(make_engine(directory, queue), 40, **params)
    assert outputs == run(make_engine(directory, None), 40, **params)
    assert min(map(len, outputs)) == 6
    assert not any(token % 8 for tokens in outputs for token in tokens[:5])


def test_rules_that_look_at_the_last_token_see_it(directory: Path, queue: SimulatedQueue) -> None:
    params = {"frequency_penalty": 1.5, "bad_words_token_ids": ((1, 2),)}
    assert run(make_engine(directory, queue), **params) == run(make_engine(directory, None), **params)
    assert queue.num_replays > 8


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"cudagraph_capture_sizes": ()}])
def test_graphs_can_be_switched_off(
    settings: dict[str, Any], directory: Path, queue: SimulatedQueue, expected: list[list[int]]
) -> None:
    assert run(make_engine(directory, queue, **settings)) == expected
    assert queue.num_replays == 0


def test_steps_larger_than_every_graph_are_launched(
    directory: Path, queue: SimulatedQueue, expected: list[list[int]]
) -> None:
    engine = make_engine(directory, queue, cudagraph_capture_sizes=(1, 2))
    before = queue.num_replays
    assert run(engine) == expected
    assert 0 < queue.num_replays - before < engine.stats().steps - len(PROMPTS)


def reads_the_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return original(self, x, position_ids) if int(position_ids.max()) >= 0 else None

    return forward


def remembers_what_it_saw(original: Callable[..., Any]) -> Callable[..., Any]:
    seen: dict[torch.Size, Any] = {}

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        # As long as only one row's positions are those of another step, its first use is right.
        if torch.utils._python_dispatch._get_current_dispatch_mode() is None:
            seen[x.shape] = original(self, x, position_ids)
        return seen[x.shape]

    return forward


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(reads_the_device, "item cannot be captured"), (remembers_what_it_saw, "when they are replayed")],
)
def test_a_model_that_cannot_be_captured_is_served_without(
    spoil: Callable[..., Any],
    reason: str,
    directory: Path,
    queue: SimulatedQueue,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patches:
        patches.setattr(Rotary, "forward", spoil(Rotary.forward))
        engine = make_engine(directory, queue)
    assert "graphs_skipped" in caplog.text and reason in caplog.text
    before = queue.num_replays
    assert run(engine) == expected
    assert queue.num_replays == before


def test_only_single_tokens_that_stand_for_themselves_are_captured() -> None:
    def item(num_tokens: int, count: int, **params: Any) -> ScheduledRequest:
        source = EngineRequest("r", list(range(num_tokens)), SamplingParams(**params))
        request = Request(source, max_tokens=9, seed=0, arrival_time_s=0.0)
        return ScheduledRequest(request, num_tokens - count, count, [[0]], 0)

    decode = item(5, 1)
    assert is_plain_decode([decode, item(9, 1)])
    assert not is_plain_decode([decode, item(9, 2)])
    assert not is_plain_decode([decode, item(9, 1, prompt_logprobs=0)])
    middle = item(9, 1)
    middle.start = 3
    assert not is_plain_decode([decode, middle])
    picture = item(9, 1)
    picture.request.features_end = 9
    assert not is_plain_decode([decode, picture])


@pytest.mark.skipif(not IS_INTERPRETED, reason="Triton's interpreter stands for a GPU")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_kernels_themselves_are_captured_and_replayed(directory: Path, kv_cache_dtype: str) -> None:
    from tests.kernels import faster_interpreter

    faster_interpreter.install()
    queue = SimulatedQueue()
    settings: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "max_num_seqs": 2, "max_model_len": 64}
    expected = run(make_engine(directory, None, **settings), 3, PROMPTS[:2])
    with computed_by("triton"):
        engine = make_engine(directory, queue, cudagraph_capture_sizes=(2,), **settings)
        before = queue.num_replays
        assert run(engine, 3, PROMPTS[:2]) == expected
        assert queue.num_replays > before
