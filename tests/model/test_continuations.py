"""`n` continuations of one prompt, and what the engine makes of rules: with a real model, over the paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engine_core import EngineCore, EngineRequest, SamplingParams
from engine_core.model.runner import ModelRunner
from engine_core.runner import SlotCopy
from tests.model.equality import Reference, generate_reference, load_reference_model, make_engine

# Lengths around the block size of 16; what is left of the last block has to be copied, except for 32.
PROMPTS = [
    [(i * 97 + j * j * 13 + j * 5) % 509 + 3 for j in range(length)] for i, length in enumerate([15, 32, 33, 50])
]
NUM_TOKENS = 24


def run(engine: EngineCore, requests: Sequence[EngineRequest]) -> dict[str, list[list[int]]]:
    """The tokens of every continuation of every request."""
    tokens = {request.request_id: [[] for _ in range(request.sampling_params.n)] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            assert output.error is None, output.error
            tokens[output.request_id][output.index] += output.new_token_ids
    return tokens


def make_request(request_id: str, prompt: list[int], **params: object) -> EngineRequest:
    defaults: dict[str, object] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return EngineRequest(request_id, prompt, SamplingParams(**(defaults | params)))


@pytest.fixture(scope="module")
def references(model_directory: Callable[[str], Path]) -> list[Reference]:
    model = load_reference_model(model_directory("llama"))
    return [generate_reference(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 14, "reserve_full_sequence": False}], ids=["roomy", "cramped"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_greedy_continuations_are_all_the_references(
    model_directory: Callable[[str], Path],
    references: list[Reference],
    settings: dict[str, object],
    enable_prefix_caching: bool,
) -> None:
    engine = make_engine(model_directory("llama"), enable_prefix_caching=enable_prefix_caching, **settings)
    requests = [make_request(str(i), prompt, n=3) for i, prompt in enumerate(PROMPTS)]
    outputs = run(engine, requests)
    for i, reference in enumerate(references):
        assert reference.num_comparable >= 8
        for tokens in outputs[str(i)]:
            assert len(tokens) == NUM_TOKENS
            assert tokens[: reference.num_comparable] == reference.output_token_ids[: reference.num_comparable]
    assert (engine.stats().preemptions > 0) == bool(settings)


def test_the_prompt_is_computed_once(model_directory: Callable[[str], Path]) -> None:
    engine = make_engine(model_directory("llama"), enable_prefix_caching=False)
    run(engine, [make_request("r", PROMPTS[3], n=4, max_tokens=5)])
    # Each other continuation computes the last prompt token again, for its logits; no last output is computed.
    assert engine.stats().computed_tokens == len(PROMPTS[3]) + 3 + 4 * 4


def test_seeded_continuations_are_the_same_alone_and_in_company(model_directory: Callable[[str], Path]) -> None:
    params = {"n": 4, "temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    requests = [make_request(str(i), prompt, seed=i, **params) for i, prompt in enumerate(PROMPTS)]
    engine = make_engine(model_directory("llama"))
    alone = {key: tokens for request in requests for key, tokens in run(engine, [request]).items()}
    together = run(make_engine(model_directory("llama"), num_blocks=20, reserve_full_sequence=False), requests)
    assert together == alone
    for continuations in alone.values():
        assert len({tuple(tokens) for tokens in continuations}) == 4


def test_copied_slots_hold_what_their_sources_held(model_directory: Callable[[str], Path]) -> None:
    runner = make_engine(model_directory("llama"), num_blocks=8).runner
    assert isinstance(runner, ModelRunner)
    caches = runner.pool.tensors
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(len(caches))))
    before = [cache.clone() for cache in caches]
    size = runner._block_size
    runner.copy_slots([SlotCopy(1, 6, size), SlotCopy(3, 2, 1), SlotCopy(1, 7, size)])
    for cache, old in zip(caches, before, strict=True):
        expected = old[[0, 1, 2, 3, 4, 5, 1, 1]]
        expected[2, 0] = old[3, 0]
        assert torch.equal(cache, expected)


def test_rules_reach_the_engine(model_directory: Callable[[str], Path]) -> None:
    """With the model's end of sequence, which only the runner knows, and one request that nothing is left for."""
    engine = make_engine(model_directory("llama"))
    [eos] = engine.runner.info.eos_token_ids
    prompt = PROMPTS[0]
    first, second = run(engine, [make_request("free", prompt, max_tokens=2)])["free"][0]
    to_end = {"logit_bias": {eos: 1000.0}, "ignore_eos": False}
    outputs = run(
        engine,
        [
            make_request("bias", prompt, logit_bias={9: 1000.0}, max_tokens=3),
            make_request("bad word", prompt, bad_words_token_ids=((first, second),), max_tokens=2),
            make_request("end", prompt, **to_end),
            make_request("no end", prompt, min_tokens=4, **to_end),
            make_request("nothing", prompt, allowed_token_ids=(eos,), ignore_eos=False, min_tokens=4),
            make_request("presence", prompt, presence_penalty=2.0, logit_bias={4: 1001.0, 6: 1000.0}),
        ],
    )
    assert outputs["bias"] == [[9, 9, 9]]
    assert outputs["bad word"][0][0] == first
    assert outputs["bad word"][0][1] != second
    assert outputs["end"] == [[eos]]
    assert len(outputs["no end"][0]) == 5
    assert eos not in outputs["no end"][0][:4]
    # What is allowed holds; an end sampled too early does not count as one.
    assert outputs["nothing"] == [[eos] * 4]
    assert set(outputs["presence"][0]) == {4, 6}
