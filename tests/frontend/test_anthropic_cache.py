"""`cache_control` as the official Anthropic SDK sends it: what is kept, and what `usage` says of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import pytest

from frontend.prompt.chat_template import chat_template_of
from frontend.prompt.tokenizer import ModelTokenizer
from tests.frontend.anthropic_app import HELLO, Served, anthropic_app
from tests.frontend.templates import TOOL_TEMPLATE, tokenizer_with

FIVE_MINUTES, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
BOTH = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def served(chat_model_dir: Path) -> Iterator[Served]:
    tokenizer = tokenizer_with(chat_model_dir, TOOL_TEMPLATE)
    with anthropic_app(ModelTokenizer(tokenizer.backend_tokenizer, chat_template_of(tokenizer))) as served:
        yield served


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def kept(served: Served) -> list[tuple[str, float]]:
    """What the engine was to keep of the last prompt, the longest first: its text, and how long."""
    request = served.engine.requests[-1]
    decode = served.tokenizer.backend.decode
    return [
        (decode(request.prompt_token_ids[: keep.num_tokens], skip_special_tokens=False), keep.ttl_s)
        for keep in sorted(request.keep, key=lambda keep: -keep.num_tokens)
    ]


def test_what_comes_before_a_breakpoint_is_kept(served: Served) -> None:
    """In blocks of every kind that may have one; the prompt is the same as without."""
    served.say("ok")
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("Two.")]}

    def chat(**at: Any) -> dict[str, Any]:
        return {
            "tools": [
                {"name": "f", "input_schema": {}, **at.get("tool", {})},
                {"name": "g", "input_schema": {}},
            ],
            "system": [text("You keep the log.", **at.get("system", {})), text("Be brief.")],
            "messages": [
                {"role": "user", "content": [text("Which ship?", **at.get("user", {}))]},
                {"role": "assistant", "content": [text("Let me see."), call | at.get("call", {})]},
                {"role": "user", "content": [result | at.get("result", {}), text("And now?")]},
            ],
        }

    served.create(**chat())
    plain = served.engine.requests[-1]
    assert plain.keep == ()
    control = {"cache_control": HOUR}
    ends = {
        "tool": '"name": "f", "parameters": {}}}',
        "system": "You keep the log.",
        "user": "Which ship?",
        "call": "</tool_call>",
        "result": "Two.",
    }
    for name, end in ends.items():
        served.create(**chat(**{name: control}))
        assert served.engine.requests[-1].prompt_token_ids == plain.prompt_token_ids
        ((shown, ttl_s),) = kept(served)
        assert ttl_s == 3600
        assert end in shown
        # No more than the tokens that show the end of it, and what the template says there.
        assert len(shown) <= served.prompt().index(end) + len(end) + 32
    served.create(**chat(tool=control, user={"cache_control": FIVE_MINUTES}, result={"cache_control": FIVE_MINUTES}))
    assert [ttl_s for _, ttl_s in kept(served)] == [300, 300, 3600]


def test_a_breakpoint_for_the_whole_request(served: Served) -> None:
    served.say("ok")
    served.create(
        messages=[*HELLO, {"role": "assistant", "content": "Aye."}, {"role": "user", "content": "And then?"}],
        extra_body={"cache_control": HOUR},
    )
    ((shown, ttl_s),) = kept(served)
    assert ttl_s == 3600
    assert "And then?" in shown
    assert not shown.endswith("assistant\n")


def test_the_whole_prompt_is_kept_by_the_field_of_ours(served: Served) -> None:
    served.say("ok")
    served.create(extra_body={"cache": {"ttl_s": 7.5, "priority": 3}})
    request = served.engine.requests[-1]
    assert [(keep.num_tokens, keep.ttl_s, keep.priority) for keep in request.keep] == [
        (len(request.prompt_token_ids), 7.5, 3)
    ]


def usage(served: Served, stream: bool, controls: Sequence[Any], read: int, num_kept: Sequence[int]) -> Any:
    """Of a request with breakpoints `controls`, of whose prompt `read` tokens were read, and so many kept."""
    served.cache(read, num_kept)
    blocks = [text("one two three", **({"cache_control": control} if control else {})) for control in controls]
    answer = served.answered(stream, messages=[{"role": "user", "content": blocks}])
    assert sum(
        (answer.usage.input_tokens, answer.usage.cache_creation_input_tokens, answer.usage.cache_read_input_tokens)  # type: ignore[arg-type]
    ) == len(served.engine.requests[-1].prompt_token_ids)
    assert answer.usage.cache_read_input_tokens == read
    created = answer.usage.cache_creation
    assert created is not None
    assert answer.usage.cache_creation_input_tokens == sum(
        (created.ephemeral_5m_input_tokens, created.ephemeral_1h_input_tokens)
    )
    return created.ephemeral_5m_input_tokens, created.ephemeral_1h_input_tokens


@BOTH
def test_usage_divides_the_prompt_into_what_was_read_what_is_kept_and_the_rest(served: Served, stream: bool) -> None:
    def of(controls: Sequence[Any], read: int = 0, num_kept: Sequence[int] = ()) -> Any:
        return usage(served, stream, controls, read, num_kept)

    assert of([None]) == (0, 0)
    assert of([None], read=7) == (0, 0)
    assert of([FIVE_MINUTES], num_kept=[10]) == (10, 0)
    assert of([HOUR], num_kept=[10]) == (0, 10)
    # Each token counts once, for the first breakpoint behind it.
    assert of([HOUR, FIVE_MINUTES], num_kept=[8, 14]) == (6, 8)
    assert of([FIVE_MINUTES, HOUR], num_kept=[8, 14]) == (8, 6)
    assert of([HOUR, FIVE_MINUTES], read=5, num_kept=[8, 14]) == (6, 3)
    assert of([HOUR, FIVE_MINUTES], read=9, num_kept=[8, 14]) == (5, 0)
    assert of([HOUR, FIVE_MINUTES], read=14, num_kept=[8, 14]) == (0, 0)
    # A share is used up: less is kept than was asked for.
    assert of([HOUR, FIVE_MINUTES], num_kept=[8, 8]) == (0, 8)
    assert of([HOUR, FIVE_MINUTES], num_kept=[0, 0]) == (0, 0)


def test_the_header_says_when_less_is_kept_than_was_asked_for(served: Served) -> None:
    served.cache(5, [8])
    raw = served.client.messages.with_raw_response.create(
        model="tiny",
        max_tokens=8,
        messages=[{"role": "user", "content": [text("one two three", cache_control=HOUR)]}],  # type: ignore[typeddict-item]
    )
    wanted = served.engine.requests[-1].keep[0].num_tokens
    header = raw.headers["x-foreword-cache"]
    assert header.startswith("hit; tokens=5;")
    assert f"kept=8; kept-wanted={wanted}" in header


def test_a_stream_has_the_header_too(served: Served) -> None:
    served.cache(0)
    with served.stream() as stream:
        stream.until_done()
        assert stream.response.headers["x-foreword-cache"].startswith("miss; tokens=0;")
        assert stream.response.headers["request-id"].startswith("req_")


def test_at_most_four_prefixes_are_kept(served: Served) -> None:
    served.say("ok")
    four = [text(str(i), cache_control=FIVE_MINUTES) for i in range(4)]
    served.create(messages=[{"role": "user", "content": four}])
    assert len(served.engine.requests[-1].keep) == 4
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[4\]\.cache_control"):
        served.create(messages=[{"role": "user", "content": [*four, text("4", cache_control=HOUR)]}])
    with pytest.raises(anthropic.BadRequestError, match=r"cache\.ttl_s"):
        served.create(messages=[{"role": "user", "content": four}], extra_body={"cache": {"ttl_s": 9}})


PARTS = {
    "system": "Rules are to be kept.",
    "system[1]": "More of them tomorrow.",
    "messages[0]": "Which ships did pass?",
    "messages[1]": "And how was it",
    "messages[1].content[1]": "under the stars?",
}


@pytest.mark.parametrize("where", PARTS)
def test_a_salt_counts_from_where_the_request_says(served: Served, where: str) -> None:
    """What comes before is shared as if there was none: as far as tokens do not depend on what follows."""
    served.say("ok")

    def told(salt: Any) -> Any:
        system, more, *said = PARTS.values()
        served.create(
            system=[text(system), text(more)],
            messages=[
                {"role": "user", "content": said[0]},
                {"role": "user", "content": [text(said[1]), text(said[2])]},
            ],
            extra_body={"cache_salt": salt},
        )
        return served.engine.requests[-1]

    request = told({"salt": "pepper", "from": where})
    (span,) = request.extra_key_spans
    assert (span.end, span.kind, span.key) == (span.start + 1, "cache_salt", "pepper")
    shared = served.tokenizer.backend.decode(request.prompt_token_ids[: span.start], skip_special_tokens=False)
    first_words = [said.split()[0] for said in PARTS.values()]
    place = list(PARTS).index(where)
    assert [word in shared for word in first_words] == [i < place for i in range(len(PARTS))]
    whole = told("pepper")
    assert (whole.extra_key_spans[0].start, whole.prompt_token_ids) == (0, request.prompt_token_ids)
