"""Tools, as the official Anthropic SDK uses them: definitions, calls in answers, results, its own tool loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from frontend.prompt.chat_template import chat_template_of
from frontend.prompt.tokenizer import ModelTokenizer
from ipc.vocabulary import EngineRequest, RequestOutput
from tests.frontend.anthropic_app import HELLO, Served, anthropic_app
from tests.frontend.scripted_engine import says
from tests.frontend.templates import TOOL_TEMPLATE, tokenizer_with

SCHEMA = {"type": "object", "properties": {"night": {"type": "string"}}, "required": ["night"]}
TOOLS: list[Any] = [
    {"name": "ships", "description": "What passed.", "input_schema": SCHEMA},
    {"type": "custom", "name": "wind", "input_schema": {"type": "object"}},
]
SHIPS = '<tool_call>\n{"name": "ships", "arguments": {"night": "quiet \\u4f60", "limit" : 2}}\n</tool_call>'
WIND = '<tool_call>\n{"name": "wind", "arguments": {}}\n</tool_call>'
ASKED_SHIPS, ASKED_WIND = ("ships", {"night": "quiet 你", "limit": 2}), ("wind", {})
BOTH = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def served(chat_model_dir: Path) -> Iterator[Served]:
    tokenizer = tokenizer_with(chat_model_dir, TOOL_TEMPLATE)
    with anthropic_app(ModelTokenizer(tokenizer.backend_tokenizer, chat_template_of(tokenizer))) as served:
        yield served


def shown(answer: anthropic.types.Message) -> list[Any]:
    return [
        block.text if block.type == "text" else (block.name, block.input)  # type: ignore[union-attr]
        for block in answer.content
    ]


@BOTH
@pytest.mark.parametrize("group", [1, 4, 1000])
@pytest.mark.parametrize(
    ("said", "blocks", "stop_reason"),
    [
        (SHIPS, [ASKED_SHIPS], "tool_use"),
        (f"Let me see.\n{SHIPS}\n{WIND}", ["Let me see.", ASKED_SHIPS, ASKED_WIND], "tool_use"),
        (f"{WIND}\nSo it is.", [ASKED_WIND, "So it is."], "tool_use"),
        (f"A\n{WIND}\nB\n{SHIPS}", ["A", ASKED_WIND, "B", ASKED_SHIPS], "tool_use"),
        (SHIPS.replace("ships", "cars"), [SHIPS.replace("ships", "cars")], "end_turn"),
    ],
)
def test_calls(served: Served, said: str, blocks: list[Any], stop_reason: str, group: int, stream: bool) -> None:
    served.say(said, group=group)
    answer = served.answered(stream, tools=TOOLS)
    assert shown(answer) == blocks
    assert (answer.stop_reason, answer.stop_sequence) == (stop_reason, None)
    ids = [block.id for block in answer.content if block.type == "tool_use"]
    assert len(set(ids)) == len(ids)
    assert all(call_id.startswith("toolu_") for call_id in ids)


@BOTH
def test_one_call_at_a_time(served: Served, stream: bool) -> None:
    served.say(f"{SHIPS}{WIND}")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert shown(served.answered(stream, tools=TOOLS, tool_choice=choice)) == [ASKED_SHIPS]


@BOTH
def test_no_call_where_none_is_wanted(served: Served, stream: bool) -> None:
    """The prompt is the same: the cache finds it."""
    served.engine.requests.clear()
    served.say(WIND)
    served.answered(stream, tools=TOOLS, tool_choice={"type": "auto"})
    answer = served.answered(stream, tools=TOOLS, tool_choice={"type": "none"})
    assert (shown(answer), answer.stop_reason) == ([WIND], "end_turn")
    first, second = served.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids


def test_a_call_cut_off_is_text(served: Served) -> None:
    served.say(WIND[:-3], finish_reason="length")
    answer = served.create(tools=TOOLS, max_tokens=len(served.ids(WIND[:-3])))
    assert (shown(answer), answer.stop_reason) == ([WIND[:-3]], "max_tokens")


def test_a_conversation_with_tools(served: Served) -> None:
    """What the model sees of an answer and its results, sent back as they came."""
    served.say(f"Let me see.\n{SHIPS}\n{WIND}")
    answer = served.create(tools=TOOLS, system="You keep the log.")
    _, ships, wind = answer.content
    results = [
        {"type": "tool_result", "tool_use_id": ships.id, "content": [{"type": "text", "text": "Two."}]},  # type: ignore[union-attr]
        {"type": "tool_result", "tool_use_id": wind.id, "content": "no sensor", "is_error": True},  # type: ignore[union-attr]
        {"type": "text", "text": "And now?"},
    ]
    first = served.engine.requests[-1].prompt_token_ids
    served.create(
        tools=TOOLS,
        system=[{"type": "text", "text": "You keep the log."}],
        messages=[*HELLO, answer.to_param(), {"role": "user", "content": results}],
    )
    assert served.engine.requests[-1].prompt_token_ids[: len(first)] == first
    assert served.prompt().endswith(
        "<|im_start|>assistant\nLet me see."
        '\n<tool_call>\n{"name": "ships", "arguments": {"limit": 2, "night": "quiet 你"}}\n</tool_call>'
        '\n<tool_call>\n{"name": "wind", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>Two.</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>Error: no sensor</tool_response><|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_sdks_own_tool_loop(served: Served) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def ships(night: str) -> str:
        """What passed.

        Args:
            night: Which one.
        """
        asked.append(night)
        return "Two ships."

    called = [*served.ids(SHIPS.replace(', "limit" : 2', "")), served.eos]
    told = [*served.ids("Two it was."), served.eos]

    async def script(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        async for output in says(told if asked else called)(request):
            yield output

    served.engine.script = script
    runner = served.client.beta.messages.tool_runner(model="tiny", max_tokens=64, messages=HELLO, tools=[ships])
    answer = runner.until_done()
    assert asked == ["quiet 你"]
    assert (shown(answer), answer.stop_reason) == (["Two it was."], "end_turn")  # type: ignore[arg-type]
    assert "<tool_response>Two ships.</tool_response>" in served.prompt()
