"""The whole stack, started as a person starts it, with a small real model; the OpenAI SDK is the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.served import Server, foreword_serve
from tests.tiny_models import make_tiny_chat_model

BLOCK_SIZE = 16
NUM_BLOCKS = 64
# The pool is smaller than the model's context of 4096: it decides.
MAX_MODEL_LEN = BLOCK_SIZE * NUM_BLOCKS
MAX_NUM_SEQS = 2
LIVENESS_S = 30.0
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny-chat")


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    flags = {
        "--served-model-name": "tiny",
        "--dtype": "float32",
        "--num-threads": "1",
        "--block-size": str(BLOCK_SIZE),
        "--num-blocks": str(NUM_BLOCKS),
        "--max-num-seqs": str(MAX_NUM_SEQS),
    }
    with foreword_serve(model_dir, *(part for flag in flags.items() for part in flag)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=LIVENESS_S) as client:
        yield client


def asynchronous(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=LIVENESS_S)


def test_every_turn_of_a_chat_finds_the_turns_before_it_in_the_cache(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "You keep the lighthouse's log. " * 3}]
    previous_prompt_tokens, cached = 0, []
    for question in ("Which ship passed first?", "And the second?", "What was the wind?", "Good night."):
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=24, temperature=0)
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
        # The last tokens of the old prompt may be joined with what follows.
        assert cached[-1] >= previous_prompt_tokens - 2
        previous_prompt_tokens = usage.prompt_tokens
        messages.append(answer.choices[0].message)
    assert cached[0] == 0
    assert cached == sorted(set(cached))


@pytest.mark.parametrize("num_tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_asked_twice_is_answered_the_same_from_the_cache(
    model_dir: Path, client: openai.OpenAI, num_tokens: int, stream: bool
) -> None:
    # No two cases begin with the same token.
    prompt = [(37 * num_tokens + 100 * stream + 11 * i) % 400 + 20 for i in range(num_tokens)]
    expected = reference(model_dir, prompt)
    for expected_cached_tokens in (0, num_tokens - 1):
        answer: Any = client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            stream=stream,
            stream_options={"include_usage": True} if stream else openai.omit,
        )
        if stream:
            chunks = list(answer)
            text, usage = "".join(chunk.choices[0].text for chunk in chunks[:-1]), chunks[-1].usage
        else:
            text, usage = answer.choices[0].text, answer.usage
        assert text == expected
        assert usage.prompt_tokens == num_tokens
        assert usage.prompt_tokens_details.cached_tokens == expected_cached_tokens


def reference(model_dir: Path, prompt: list[int]) -> str:
    import torch

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    output = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)  # type: ignore[no-any-return]


def test_salts_keep_caches_apart(client: openai.OpenAI) -> None:
    def cached_tokens(salt: str | None) -> int:
        body = {} if salt is None else {"cache_salt": salt}
        answer = client.completions.create(model="tiny", prompt=[77] * 40, max_tokens=1, extra_body=body)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached_tokens(salt) for salt in (None, "a", "b", "a", None)] == [0, 0, 0, 39, 39]


def test_a_salt_from_a_message_on_shares_what_is_before_and_nothing_else(client: openai.OpenAI) -> None:
    """The rules fill some blocks and a part of one; all of that is found by all, and not a token more."""
    rules = {"role": "system", "content": "Keep to the rules of the salted lighthouse, all of them. " * 2}
    question = {"role": "user", "content": "Which of the ships passed first?"}

    def ask(salt: str | None, *messages: Any) -> tuple[str, int]:
        body = {} if salt is None else {"cache_salt": {"salt": salt, "from": "messages[1]"}}
        answer = client.chat.completions.create(
            model="tiny", messages=list(messages), max_tokens=8, temperature=0, extra_body=body
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.choices[0].message.content or "", answer.usage.prompt_tokens_details.cached_tokens or 0

    text, before = ask("a", rules, question)
    text_again, own = ask("a", rules, question)
    _, shared = ask("b", rules, {"role": "user", "content": "Good night."})
    assert before < shared < own
    assert shared % BLOCK_SIZE != 0
    others = [ask(salt, rules, question) for salt in ("c", "d", None)]
    assert others == [(text, shared)] * 3
    assert text_again == text
    # What the model said belongs to the salt, too.
    turns = rules, question, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}
    assert ask("a", *turns)[1] > own
    assert ask("e", *turns)[1] == shared


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
def test_a_seed_decides_the_outcome(client: openai.OpenAI, seed: int) -> None:
    texts = {
        client.completions.create(model="tiny", prompt="Count:", max_tokens=12, seed=seed).choices[0].text
        for _ in range(2)
    }
    assert len(texts) == 1


HUGE = "It was a dark and stormy night. " * 32_000
BAD_REQUESTS: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (CHAT, {"messages": [{"role": "user", "content": HUGE}]}, 400, "messages", str(MAX_MODEL_LEN)),
    (COMPLETION, {"prompt": HUGE}, 400, "prompt", str(MAX_MODEL_LEN)),
    (COMPLETION, {"prompt": [9] * (MAX_MODEL_LEN + 1)}, 400, "prompt", str(MAX_MODEL_LEN + 1)),
    (COMPLETION, {"prompt": [9] * MAX_MODEL_LEN}, 400, "prompt", f"{MAX_MODEL_LEN} tokens"),
    # Fits the model's own context, not the pool.
    (COMPLETION, {"prompt": [9] * 3000}, 400, "prompt", f"the prompt has 3000 tokens; at most {MAX_MODEL_LEN - 1} fit"),
    (COMPLETION, {"prompt": [9] * 3000}, 400, "prompt", f"({NUM_BLOCKS} blocks of {BLOCK_SIZE})"),
    (COMPLETION, {"prompt": HUGE * 9}, 400, "prompt", f"{len(HUGE) * 9} bytes of text, at least"),
    (COMPLETION, {"prompt": []}, 400, "prompt", "empty"),
    (COMPLETION, {"prompt": ""}, 400, "prompt", "0 tokens"),
    (COMPLETION, {"prompt": [512]}, 400, "prompt", "512"),
    (COMPLETION, {"prompt": [-1]}, 400, "prompt[0]", ">= 0"),
    (COMPLETION, {"prompt": [2**62]}, 400, "prompt", str(2**62)),
    (COMPLETION, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "got 0"),
    (COMPLETION, {"prompt": "x", "max_tokens": -1}, 400, "max_tokens", "got -1"),
    (COMPLETION, {"prompt": "x", "max_tokens": 10**9}, 400, "max_tokens", str(MAX_MODEL_LEN)),
    (COMPLETION, {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens", "got `str`"),
    (COMPLETION, {"prompt": {"x": 1}}, 400, "prompt", "got `object`"),
    (COMPLETION, {"prompt": "x", "seed": 2**63}, 400, "seed", ""),
    (COMPLETION, {"prompt": "x", "stop_token_ids": [512]}, 400, "stop_token_ids", "512"),
    (COMPLETION, {"prompt": "x", "model": "none"}, 404, "model", "'tiny'"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "null"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "temperature": 9}, 400, "temperature", "2"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "numbers"), BAD_REQUESTS, ids=[str(case[1])[:50] for case in BAD_REQUESTS]
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_answered_and_the_server_lives(
    server: Server, path: str, body: dict[str, Any], status: int, param: str | None, numbers: str, stream: bool
) -> None:
    with httpx.Client(base_url=server.url, timeout=LIVENESS_S) as http:
        response = http.post(path, json=body | {"stream": stream})
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert numbers in error["message"]
        assert http.post(COMPLETION, json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_the_longest_possible_prompt_gets_one_token(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[9] * (MAX_MODEL_LEN - 1), max_tokens=MAX_MODEL_LEN)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


def test_sampling_settings_reach_the_model(client: openai.OpenAI, model_dir: Path) -> None:
    def text(**settings: Any) -> str:
        answer = client.completions.create(
            model="tiny", prompt="Once", max_tokens=6, temperature=0, extra_body={"ignore_eos": True, **settings}
        )
        return answer.choices[0].text

    six_times = AutoTokenizer.from_pretrained(model_dir).decode([300] * 6)
    assert text() != six_times
    assert text(allowed_token_ids=[300]) == text(logit_bias={"300": 1e4}) == six_times
    with pytest.raises(openai.BadRequestError) as refusal:
        text(presence_penalty=3)
    assert refusal.value.param == "presence_penalty"


PROMPT = [(13 * i * i + 7 * i) % 480 + 20 for i in range(37)]


def test_log_probabilities_are_the_models(client: openai.OpenAI, model_dir: Path) -> None:
    """Of prompt and output, from the cache or not, in every shape the API has."""
    import torch

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    greedy = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)[0]
    with torch.inference_mode():
        expected = model(greedy[None]).logits[0].log_softmax(-1)
    of_tokens = expected[:-1].gather(-1, greedy[1:, None])[:, 0]
    highest = expected.topk(3, dim=-1).values
    settings: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 6}

    for _ in range(2):
        # The second one finds the prompt's blocks.
        (choice,) = client.completions.create(**settings, logprobs=3).choices
        assert choice.logprobs is not None
        of_output = slice(len(PROMPT) - 1, -1)
        torch.testing.assert_close(
            torch.tensor(choice.logprobs.token_logprobs), of_tokens[len(PROMPT) - 1 :], atol=1e-3, rtol=0
        )
        for top, values in zip(choice.logprobs.top_logprobs or [], highest[of_output].tolist(), strict=True):
            # Parts of characters look the same in this shape: the likeliest of them stands for all.
            shown = sorted(top.values(), reverse=True)
            assert shown[0] == pytest.approx(values[0], abs=1e-3)
            assert all(min(abs(value - one) for one in values) < 1e-3 for value in shown)

    echoed = client.completions.create(**settings, logprobs=0, echo=True)
    assert echoed.choices[0].logprobs is not None
    first, *others = echoed.choices[0].logprobs.token_logprobs or []
    assert first is None
    torch.testing.assert_close(torch.tensor(others), of_tokens, atol=1e-3, rtol=0)

    scored = client.completions.create(**settings, extra_body={"prompt_logprobs": 3})
    assert scored.usage is not None
    assert scored.usage.prompt_tokens_details is not None
    assert scored.usage.prompt_tokens_details.cached_tokens == 0
    first, *places = scored.choices[0].model_extra["prompt_logprobs"]  # type: ignore[index]
    for i, place in enumerate(places):
        assert place[str(PROMPT[i + 1])]["logprob"] == pytest.approx(of_tokens[i].item(), abs=1e-3)
        likeliest = sorted(place.values(), key=lambda entry: entry["rank"])[:3]
        assert [entry["logprob"] for entry in likeliest] == pytest.approx(highest[i].tolist(), abs=1e-3)


def test_choices_of_one_prompt_share_it(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "tiny", "prompt": PROMPT[::-1], "max_tokens": 12, "seed": 3}
    cold, warm = (client.completions.create(**settings, n=5) for _ in range(2))
    texts = [choice.text for choice in sorted(cold.choices, key=lambda choice: choice.index)]
    assert len(set(texts)) == 5
    assert [choice.text for choice in sorted(warm.choices, key=lambda choice: choice.index)] == texts
    for usage, cached_tokens in ((cold.usage, 0), (warm.usage, len(PROMPT) - 1)):
        assert usage is not None
        assert usage.prompt_tokens == len(PROMPT)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == cached_tokens


def test_bad_words_do_not_come(client: openai.OpenAI, model_dir: Path) -> None:
    settings: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 6, "temperature": 0}
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    (the,), (o,) = tokenizer.encode(" the"), tokenizer.encode("o")
    bias = {str(the): 1000, str(o): 500}
    assert client.completions.create(**settings, logit_bias=bias).choices[0].text == " the" * 6
    (choice,) = client.completions.create(**settings, logit_bias=bias, extra_body={"bad_words": ["the"]}).choices
    assert choice.text == "o" * 6


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_that_end_one_by_one_or_are_left_leave_no_block_behind(server: Server, stream: bool) -> None:
    async with asynchronous(server) as client, httpx.AsyncClient(base_url=server.url, timeout=LIVENESS_S) as http:

        async def ask(seed: int, *, leave: bool) -> None:
            answer: Any = await client.completions.create(
                model="tiny", prompt=PROMPT, n=4, max_tokens=60, seed=seed, stream=stream, stop=["e", "a", "t", " "],
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            if stream:
                ends = [chunk.choices[0].finish_reason async for chunk in answer if not leave]
                await answer.close()
                assert leave or len([end for end in ends if end]) == 4
            else:
                assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}

        asked = [asyncio.create_task(ask(seed, leave=seed % 3 == 0)) for seed in range(12)]
        if not stream:
            await health_shows(http, lambda health: health.json()["num_requests"] > 0)
            for task in asked[::3]:
                task.cancel()
        await asyncio.gather(*asked, return_exceptions=not stream)
        await health_shows(http, lambda health: health.json()["num_requests"] == 0)
        # It needs every block of the pool.
        answer = await http.post(COMPLETION, json={"prompt": [9] * (MAX_MODEL_LEN - 1), "max_tokens": 1})
        assert answer.status_code == 200


async def test_a_prompt_of_megabytes_stalls_neither_streams_nor_health(server: Server) -> None:
    async with asynchronous(server) as client, httpx.AsyncClient(base_url=server.url, timeout=LIVENESS_S) as http:
        stream = await client.completions.create(
            model="tiny", prompt="x", max_tokens=MAX_MODEL_LEN - 8, stream=True, extra_body={"ignore_eos": True}
        )

        async def read() -> list[float]:
            return [time.perf_counter() async for _ in stream]

        reader = asyncio.create_task(read())
        health_times_s = [time.perf_counter()]
        long_prompt = asyncio.create_task(http.post(COMPLETION, json={"prompt": HUGE * 2}))
        while not long_prompt.done():
            assert (await http.get("/health")).status_code == 200
            health_times_s.append(time.perf_counter())
        assert (await long_prompt).status_code == 400
        chunk_times_s = await reader
    start_s, end_s = health_times_s[0], health_times_s[-1]
    meanwhile_s = [start_s, *(time_s for time_s in chunk_times_s if start_s < time_s < end_s), end_s]
    # A stall is one gap of nearly the whole time.
    for times_s in (health_times_s, meanwhile_s):
        assert max(b - a for a, b in pairwise(times_s)) < (end_s - start_s) / 2


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_go_away_make_room_for_others(server: Server, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": MAX_MODEL_LEN - 8, "ignore_eos": True, "stream": stream}
    async with httpx.AsyncClient(base_url=server.url, timeout=LIVENESS_S) as http:
        for _ in range(5):
            asked = [asyncio.create_task(http.post(COMPLETION, json=body)) for _ in range(MAX_NUM_SEQS)]
            await health_shows(http, lambda health: health.json()["num_requests"] == MAX_NUM_SEQS)
            assert not any(task.done() for task in asked)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            # Both seats were taken; this is answered at once only if they are free again.
            answer = await http.post(COMPLETION, json={"prompt": "x", "max_tokens": 1})
            assert answer.status_code == 200
            await health_shows(http, lambda health: health.json()["num_requests"] == 0)


async def test_a_killed_engine_ends_every_stream_and_comes_back(server: Server) -> None:
    async with asynchronous(server) as client, httpx.AsyncClient(base_url=server.url, timeout=LIVENESS_S) as http:
        streams = [asyncio.create_task(read_to_the_end(client)) for _ in range(10)]
        await health_shows(http, lambda health: health.json()["num_requests"] == len(streams))
        server.child("engine_core.server").kill()
        ended = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), timeout=LIVENESS_S)
        assert all(isinstance(error, openai.APIError) for error in ended)
        assert (await http.get("/health")).status_code == 503
        refused = await http.post(COMPLETION, json={"prompt": "x"})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        await health_shows(http, lambda health: health.status_code == 200)
        assert (await http.post(COMPLETION, json={"prompt": "x"})).status_code == 200


async def health_shows(http: httpx.AsyncClient, what: Callable[[httpx.Response], bool]) -> None:
    async with asyncio.timeout(2 * LIVENESS_S):
        while True:
            if what(await http.get("/health")):
                return
            await asyncio.sleep(0.01)


async def read_to_the_end(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="tiny", prompt="x", max_tokens=MAX_MODEL_LEN - 8, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        pass
