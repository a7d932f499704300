"""Log-probabilities are the model's own, of raw logits: the same however the tokens were scheduled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engine_core import EngineCore, EngineRequest, SamplingParams
from engine_core.model.logprobs import entries
from ipc.vocabulary import RequestOutput, TokenLogprob
from kernels import token_logprobs as kernel
from tests.model.equality import LOGPROB_TOLERANCE, load_reference_model, make_engine

PROMPTS = [
    [(i * 131 + j * j * 17 + j * 7) % 509 + 3 for j in range(length)] for i, length in enumerate([1, 16, 70, 75])
]


def make_request(request_id: str, prompt: list[int], **params: object) -> EngineRequest:
    defaults: dict[str, object] = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}
    return EngineRequest(request_id, prompt, SamplingParams(**(defaults | params)))


def run(engine: EngineCore, requests: Sequence[EngineRequest]) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            assert output.error is None, output.error
            outputs[output.request_id].append(output)
    return outputs


@torch.inference_mode()
def reference_logprobs(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """`[len(token_ids), vocab_size]`: row i is the choice of what follows token i."""
    return load_reference_model(directory)(torch.tensor([token_ids])).logits[0].log_softmax(dim=-1)


def check_entry(entry: TokenLogprob | None, expected: torch.Tensor, token_id: int, num_top: int) -> None:
    """`expected` `[vocab_size]`. Tokens nearly as likely may have changed places."""
    assert entry is not None
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(expected[token_id].item(), abs=LOGPROB_TOLERANCE)
    likelier = expected - expected[token_id]
    assert (likelier > LOGPROB_TOLERANCE).sum() < entry.rank <= (likelier > -LOGPROB_TOLERANCE).sum()
    assert [value for _, value in entry.top] == pytest.approx(
        expected.topk(num_top).values.tolist(), abs=LOGPROB_TOLERANCE
    )
    for top_id, value in entry.top:
        assert value == pytest.approx(expected[top_id].item(), abs=LOGPROB_TOLERANCE)
    assert len({top_id for top_id, _ in entry.top}) == num_top


def check_prompt(entries: list[TokenLogprob | None] | None, expected: torch.Tensor, prompt: list[int], k: int) -> None:
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for position in range(1, len(prompt)):
        check_entry(entries[position], expected[position - 1], prompt[position], k)


def token_logprobs(logits: torch.Tensor, token_ids: list[int], num_top_tokens: list[int]) -> list[TokenLogprob]:
    return entries(kernel.token_logprobs(logits, torch.tensor(token_ids), max(num_top_tokens)), num_top_tokens)


def test_entries_are_the_log_softmax() -> None:
    logits = 4 * torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    token_ids, num_top = [3, 299, 0, int(logits[3].argmax()), 17], [0, 20, 1, 5, 300]
    entries = token_logprobs(logits, token_ids, num_top)
    for row, entry in enumerate(entries):
        expected = logits[row].double().log_softmax(dim=-1)
        order = sorted(range(300), key=lambda i: -expected[i].item())
        assert entry.token_id == token_ids[row]
        assert entry.logprob == pytest.approx(expected[token_ids[row]].item(), abs=1e-5)
        assert entry.rank == order.index(token_ids[row]) + 1
        assert [top_id for top_id, _ in entry.top] == order[: num_top[row]]
        assert [value for _, value in entry.top] == pytest.approx(
            [expected[i].item() for i in order[: num_top[row]]], abs=1e-5
        )


def test_among_equals_the_lower_id_comes_first_and_they_share_a_rank() -> None:
    """The token a greedy request takes is the first of the list, in bfloat16 too, where equals are common."""
    logits = torch.tensor([[-1.0, 2.0, 2.0, -1.0, 2.0, -3.0, 0.0, -math.inf]] * 2, dtype=torch.bfloat16)
    last, first = token_logprobs(logits, [4, 1], [8, 2])
    assert [top_id for top_id, _ in last.top] == [1, 2, 4, 6, 0, 3, 5, 7]
    assert [top_id for top_id, _ in first.top] == [1, 2]
    assert (last.rank, first.rank) == (1, 1)
    noise = torch.randn(50, 5_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    greedy = noise.argmax(dim=-1).tolist()
    assert [entry.top[0][0] for entry in token_logprobs(noise, greedy, [1] * 50)] == greedy


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])  # the latter caps its logits after the head
def test_sampled_and_prompt_tokens_have_transformers_logprobs(
    model_directory: Callable[[str], Path], architecture: str
) -> None:
    directory = model_directory(architecture)
    prompt = PROMPTS[2]
    engine = make_engine(directory)
    outputs = run(engine, [make_request("r", prompt, max_tokens=12, logprobs=4, prompt_logprobs=3)])["r"]
    tokens = [output.new_token_ids[0] for output in outputs]
    expected = reference_logprobs(directory, [*prompt, *tokens])
    check_prompt(outputs[0].prompt_logprobs, expected, prompt, 3)
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    for place, output in enumerate(outputs):
        assert output.logprobs is not None
        [entry] = output.logprobs
        check_entry(entry, expected[len(prompt) + place - 1], tokens[place], 4)


@pytest.mark.parametrize("chunk_tokens", [1, 15, 16, 17, 64, 2048])
def test_prompt_logprobs_do_not_depend_on_chunks(model_directory: Callable[[str], Path], chunk_tokens: int) -> None:
    """All prompts at once, with different `k`, beside one that asks for nothing."""
    directory = model_directory("llama")
    engine = make_engine(directory, max_num_batched_tokens=chunk_tokens, max_num_seqs=min(5, chunk_tokens))
    requests = [make_request(str(k), prompt, prompt_logprobs=k) for k, prompt in enumerate(PROMPTS)]
    outputs = run(engine, [*requests, make_request("silent", PROMPTS[3])])
    for k, prompt in enumerate(PROMPTS):
        check_prompt(outputs[str(k)][0].prompt_logprobs, reference_logprobs(directory, prompt), prompt, k)
    assert outputs["silent"][0].prompt_logprobs is None


def test_prompt_logprobs_survive_preemption(model_directory: Callable[[str], Path]) -> None:
    """A request preempted in the middle of its prompt starts over, and reports each prompt token once."""
    directory = model_directory("llama")
    engine = make_engine(directory, max_num_batched_tokens=16, max_num_seqs=2, long_prefill_token_threshold=8)
    for k, prompt in enumerate(PROMPTS[2:]):
        engine.add_request(make_request(str(k), prompt, prompt_logprobs=1))
    for _ in range(3):
        assert engine.step().outputs == []
    assert engine.reset_prefix_cache(reset_running_requests=True).num_blocks_in_use == 0
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step().outputs}
    assert engine.stats().preemptions == 2
    for k, prompt in enumerate(PROMPTS[2:]):
        check_prompt(outputs[str(k)].prompt_logprobs, reference_logprobs(directory, prompt), prompt, 1)


def test_a_prompt_with_logprobs_is_computed_afresh_and_cached(model_directory: Callable[[str], Path]) -> None:
    engine = make_engine(model_directory("llama"))
    prompt = PROMPTS[2]
    cached = [
        run(engine, [make_request("r", prompt, **params)])["r"][0].num_cached_tokens
        for params in ({"prompt_logprobs": 0}, {}, {"prompt_logprobs": 0}, {"logprobs": 5})
    ]
    assert cached == [0, len(prompt) - 1, 0, len(prompt) - 1]


def test_logprobs_have_nothing_to_do_with_batch_mates(model_directory: Callable[[str], Path]) -> None:
    """Alone, and beside others with rules, samples and prompts of their own."""
    engine = make_engine(model_directory("llama"), enable_prefix_caching=False)
    request = make_request("r", PROMPTS[1], max_tokens=10, logprobs=5, prompt_logprobs=2, seed=3, temperature=1.0)
    others = [
        make_request("greedy", PROMPTS[3], max_tokens=20),
        make_request("bent", PROMPTS[2], max_tokens=20, logit_bias={5: 50.0}, logprobs=1, repetition_penalty=1.5),
        make_request("prompt", PROMPTS[2], max_tokens=5, prompt_logprobs=5, temperature=0.7),
    ]
    alone = run(engine, [request])["r"]
    together = run(engine, [*others, request])["r"]

    def flat(outputs: list[RequestOutput]) -> list[TokenLogprob]:
        return [*(outputs[0].prompt_logprobs or [])[1:], *(entry for out in outputs for entry in out.logprobs or ())]

    assert len(flat(alone)) == len(flat(together)) == len(PROMPTS[1]) - 1 + 10
    for one, other in zip(flat(alone), flat(together), strict=True):
        assert (one.token_id, one.rank, [i for i, _ in one.top]) == (
            other.token_id,
            other.rank,
            [i for i, _ in other.top],
        )
        assert one.logprob == pytest.approx(other.logprob, abs=LOGPROB_TOLERANCE)
        assert [v for _, v in one.top] == pytest.approx([v for _, v in other.top], abs=LOGPROB_TOLERANCE)


def test_logprobs_are_those_before_any_rule(model_directory: Callable[[str], Path]) -> None:
    directory = model_directory("llama")
    prompt = PROMPTS[1]
    engine = make_engine(directory)
    params = {"logit_bias": {7: 1000.0}, "allowed_token_ids": (7, 8), "temperature": 3.0, "top_k": 1, "logprobs": 2}
    [output] = run(engine, [make_request("r", prompt, **params)])["r"]
    assert output.new_token_ids == [7]
    assert output.logprobs is not None
    check_entry(output.logprobs[0], reference_logprobs(directory, prompt)[-1], 7, 2)
