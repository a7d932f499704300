"""`cache` and `cache_control`: what the official OpenAI SDK sends of them, and what the engine is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.vocabulary import KeepPrefix
from tests.frontend.templates import TOOL_TEMPLATE, tokenizer_with
from tests.frontend.test_openai_sdk import Served
from tests.frontend.test_openai_tool_calls import serve, tool

RULES, QUESTION = "Be brief. Be kind.", "What ships came by night?"


@pytest.fixture(scope="module")
def served(chat_model_dir: Path) -> Iterator[Served]:
    yield from serve(tokenizer_with(chat_model_dir, TOOL_TEMPLATE))


@pytest.fixture(autouse=True)
def engine_is_fresh(served: Served) -> None:
    served.engine.requests.clear()


def text(served: Served, keep: KeepPrefix) -> str:
    """What is kept of the one request's prompt."""
    (request,) = served.engine.requests
    kept = request.prompt_token_ids[: keep.num_tokens]
    return served.tokenizer.backend.decode(kept, skip_special_tokens=False)  # type: ignore[no-any-return]


def part(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def test_breakpoints_keep_the_prompt_up_to_their_ends(served: Served) -> None:
    """As SDKs made for `cache_control` send it: on tools, and on parts of messages."""
    messages: list[Any] = [
        {"role": "system", "content": [part(RULES, cache_control={"type": "ephemeral", "ttl": "1h"})]},
        {"role": "user", "content": [part(QUESTION, cache_control={"type": "ephemeral"}), part(" And by day?")]},
    ]
    tools: list[Any] = [tool("ships"), tool("wind") | {"cache_control": {"type": "ephemeral", "ttl": "5m"}}]
    with served.saying("None."):
        served.sync.chat.completions.create(model="tiny", messages=messages, tools=tools)
    (request,) = served.engine.requests
    assert sorted((keep.ttl_s, keep.priority) for keep in request.keep) == [(300, 0), (300, 0), (3600, 0)]
    of_tools, of_rules, of_question = request.keep
    assert "wind" in text(served, of_tools)
    assert text(served, of_rules).count(RULES) == 1 and QUESTION not in text(served, of_rules)
    assert QUESTION in text(served, of_question) and "by day" not in text(served, of_question)
    assert of_rules.ttl_s == 3600
    assert (request.read_prefix_cache, request.write_prefix_cache) == (True, True)


def test_a_breakpoint_changes_no_token(served: Served) -> None:
    with served.saying("None."):
        for control in ({}, {"cache_control": {"type": "ephemeral"}}, {"cache_control": None}):
            messages: list[Any] = [{"role": "user", "content": [part(QUESTION, **control)]}]
            served.sync.chat.completions.create(model="tiny", messages=messages)
    first, second, third = served.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids == third.prompt_token_ids
    assert (len(first.keep), len(second.keep), len(third.keep)) == (0, 1, 0)


def test_a_time_to_live_keeps_the_whole_prompt(served: Served) -> None:
    with served.saying("None."):
        options = {"ttl_s": 90.5, "priority": 7}
        body = {"cache": options, "cache_salt": "pepper"}
        served.sync.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": QUESTION}], extra_body=body
        )
        served.sync.completions.create(model="tiny", prompt=[[5] * 9, [6] * 4], extra_body=body)
    for request in served.engine.requests:
        assert request.keep == (KeepPrefix(len(request.prompt_token_ids), 90.5, 7),)
        assert request.tenant == "pepper"


def test_all_four_can_be_kept_together(served: Served) -> None:
    with served.saying("None."):
        parts = [part(f"{word} ", cache_control={"type": "ephemeral"}) for word in ("one", "two", "three")]
        served.sync.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": parts}], extra_body={"cache": {"ttl_s": 60}}
        )
    (request,) = served.engine.requests
    lengths = [keep.num_tokens for keep in request.keep]
    assert lengths == sorted(lengths)
    assert lengths[-1] == len(request.prompt_token_ids)
    assert [keep.ttl_s for keep in request.keep] == [300, 300, 300, 60]


@pytest.mark.parametrize(
    ("options", "reads", "writes"),
    [
        ({}, True, True),
        (None, True, True),
        ({"read": None, "write": None, "ttl_s": None, "priority": None}, True, True),
        ({"read": False}, False, True),
        ({"write": False}, True, False),
        ({"read": False, "write": False}, False, False),
        ({"read": True, "write": True}, True, True),
    ],
)
def test_reading_and_writing_are_two_things(served: Served, options: Any, reads: bool, writes: bool) -> None:
    with served.saying("None."):
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        served.sync.chat.completions.create(model="tiny", messages=messages, extra_body={"cache": options})
        served.sync.completions.create(model="tiny", prompt="x", extra_body={"cache": options})
    for request in served.engine.requests:
        assert (request.read_prefix_cache, request.write_prefix_cache, request.keep) == (reads, writes, ())


def test_what_the_other_apis_fields_say_is_taken_and_ignored(served: Served) -> None:
    with served.saying("None."):
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        served.sync.chat.completions.create(
            model="tiny", messages=messages, prompt_cache_key="k", prompt_cache_retention="24h"
        )
    (request,) = served.engine.requests
    assert (request.keep, request.tenant, request.extra_key_spans) == ((), "", ())
