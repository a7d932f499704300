"""The whole stack, started as a person starts it, with a small real model; the Anthropic SDK is the client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.integration.served import Server, foreword_serve
from tests.tiny_models import make_tiny_chat_model

BLOCK_SIZE = 16
NUM_BLOCKS = 64
MAX_MODEL_LEN = BLOCK_SIZE * NUM_BLOCKS
LIVENESS_S = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model_dir = make_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny-chat")
    flags = {
        "--served-model-name": "tiny",
        "--dtype": "float32",
        "--num-threads": "1",
        "--block-size": str(BLOCK_SIZE),
        "--num-blocks": str(NUM_BLOCKS),
    }
    with foreword_serve(model_dir, *(part for flag in flags.items() for part in flag)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=LIVENESS_S) as client:
        yield client


def chat(system: str, question: str, **control: Any) -> dict[str, Any]:
    """`control` goes to the system prompt."""
    return {
        "model": "tiny",
        "system": [{"type": "text", "text": system, **control}],
        "messages": [{"role": "user", "content": question}],
    }


def usage_of(client: anthropic.Anthropic, stream: bool, **asked: Any) -> anthropic.types.Usage:
    """Of a short answer; the three kinds of tokens are the prompt's."""
    settings = {"max_tokens": 4, "extra_body": {"temperature": 0}}
    if stream:
        with client.messages.stream(**settings, **asked) as events:
            usage = events.get_final_message().usage
    else:
        usage = client.messages.create(**settings, **asked).usage
    kinds = (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens)
    assert all(number is not None and number >= 0 for number in kinds)
    assert sum(kinds) == client.messages.count_tokens(**asked).input_tokens  # type: ignore[arg-type]
    created = usage.cache_creation
    assert created is not None
    assert created.ephemeral_1h_input_tokens + created.ephemeral_5m_input_tokens == usage.cache_creation_input_tokens
    return usage


@pytest.mark.parametrize("stream", [False, True])
def test_a_kept_system_prompt_outlives_what_would_push_it_out(
    client: anthropic.Anthropic, server: Server, stream: bool
) -> None:
    kept, plain = f"{stream}: you keep the lighthouse's log. " * 8, f"Do not, {stream}! " * 12
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}

    cold = usage_of(client, stream, **chat(kept, "Which ship passed first?", **hour))
    # The template begins all prompts alike.
    assert (cold.cache_read_input_tokens or 0) < BLOCK_SIZE
    created = cold.cache_creation_input_tokens or 0
    assert created >= len(kept) // 8
    assert cold.cache_creation is not None
    assert cold.cache_creation.ephemeral_1h_input_tokens == created
    other = usage_of(client, stream, **chat(plain, "Which ship passed first?"))
    assert other.cache_creation_input_tokens == 0

    with httpx.Client(base_url=server.url, timeout=LIVENESS_S) as http:
        for first in range(30, 36):
            prompt = [first + 50 * stream] * (MAX_MODEL_LEN // 2)
            http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).raise_for_status()

    warm = usage_of(client, stream, **chat(kept, "And the second?", **hour))
    assert warm.cache_read_input_tokens is not None
    assert warm.cache_read_input_tokens >= created // BLOCK_SIZE * BLOCK_SIZE
    assert usage_of(client, stream, **chat(plain, "And the second?")).cache_read_input_tokens < BLOCK_SIZE  # type: ignore[operator]


def test_a_conversation_goes_on_in_the_cache(client: anthropic.Anthropic) -> None:
    messages: list[Any] = []
    previous = 0
    for question in ("Which ship passed first?", "And the second?", "What was the wind?"):
        messages.append({"role": "user", "content": question})
        answer = client.messages.create(
            model="tiny",
            max_tokens=24,
            system="You keep the log of the harbour. " * 3,
            messages=messages,
            extra_body={"temperature": 0, "cache_control": {"type": "ephemeral"}},
        )
        # The last tokens of the old prompt may be joined with what follows.
        assert (answer.usage.cache_read_input_tokens or 0) >= previous - 2
        previous = sum(
            (
                answer.usage.input_tokens,
                answer.usage.cache_creation_input_tokens or 0,
                answer.usage.cache_read_input_tokens or 0,
            )
        )
        messages.append(answer.to_param())


def test_a_prompt_computed_ahead_is_there_when_it_is_asked(client: anthropic.Anthropic) -> None:
    asked = chat("You forecast the tide. " * 8, "When is it high?")
    ahead = client.messages.create(max_tokens=0, **asked)
    assert (ahead.content, ahead.stop_reason, ahead.usage.output_tokens) == ([], "max_tokens", 0)
    num_tokens = client.messages.count_tokens(**asked).input_tokens
    assert client.messages.create(max_tokens=4, **asked).usage.cache_read_input_tokens == num_tokens - 1


def test_clients_that_go_away_leave_no_block_behind(client: anthropic.Anthropic, server: Server) -> None:
    streams = [
        client.messages.create(
            max_tokens=MAX_MODEL_LEN // 2, stream=True, **chat("Count.", str(i), cache_control={"type": "ephemeral"})
        )
        for i in range(6)
    ]
    for stream in streams:
        assert next(iter(stream)).type == "message_start"
        stream.close()
    with httpx.Client(base_url=server.url, timeout=LIVENESS_S) as http:
        deadline_s = time.monotonic() + LIVENESS_S
        while http.get("/health").json()["num_requests"]:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        # It needs every block of the pool, kept or not.
        longest = {"prompt": [9] * (MAX_MODEL_LEN - 1), "max_tokens": 1}
        assert http.post("/v1/completions", json=longest).status_code == 200
