"""`docs/prompts.md` is true: every row of its tables is asked of a real engine core, and the numbers must be the doc's.

The engine core computes with `CheckingRunner`, which notices a block that should not have been shared. The tokenizer is
that of the tests' tiny model. Each row starts with an empty cache; its last request is the one that is counted.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine_core.config import EngineConfig
from engine_core.engine import EngineCore
from engine_core.request import Request as EngineSideRequest
from engine_core.runner import MultimodalInfo, ScheduledRequest, StepResult
from frontend.prompt.chat_template import chat_template_of
from frontend.prompt.tokenizer import ModelTokenizer, load_tokenizer
from ipc.vocabulary import EngineRequest, MultimodalFeature, RequestOutput
from tests.checking_runner import CheckingRunner
from tests.frontend.live_app import live_app
from tests.frontend.picture_app import encoded, image, model_directory, picture_app
from tests.frontend.picture_app import user as shown
from tests.frontend.scripted_engine import ScriptedEngine
from tests.frontend.templates import DATED_TEMPLATE, TOOL_TEMPLATE, tokenizer_with

DOC = Path(__file__).parents[2] / "docs" / "prompts.md"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BLOCK_SIZE = 16

ANSWER = (
    "The capital of France is Paris. The keeper found it on one of the older pages, where it had been written before on"
    " a quiet night, between two ships."
)
RULES = (
    "You are a helpful assistant of the lighthouse. Answer in the keeper's words. Say what the wind was, which ships"
    " passed, and what the weather did to the harbour. Where the fog allowed no name, write that the fog allowed none."
)
NOON, EVENING = "It is 12:00.", "It is 20:15."

Turn = dict[str, Any]
Request = tuple[str, dict[str, Any]]


def system(content: str) -> Turn:
    return {"role": "system", "content": content}


def user(content: str) -> Turn:
    return {"role": "user", "content": content}


def assistant(content: str) -> Turn:
    return {"role": "assistant", "content": content}


def chat(*messages: Turn, **fields: Any) -> Request:
    return CHAT, {"messages": list(messages), **fields}


def tokens(*token_ids: int, **fields: Any) -> Request:
    return COMPLETION, {"prompt": list(token_ids), **fields}


def tool(name: str, **schema: Any) -> dict[str, Any]:
    description = f"Read the {name} of one night from the keeper's pages."
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


SHIPS = tool("ships", type="object", properties={"night": {"type": "string"}, "limit": {"type": "integer"}})
SHIPS_RESHUFFLED = tool("ships", properties={"limit": {"type": "integer"}, "night": {"type": "string"}}, type="object")
WIND = tool("wind", type="object", properties={"night": {"type": "string"}})
FOG = tool("fog", type="object", properties={"night": {"type": "string"}})

QUESTION, ANOTHER = user("What is the capital of France?"), user("What is the capital of Italy?")
HISTORY = [
    system(RULES),
    user("Which ship passed first?"),
    assistant("The ship passed first was the same one."),
    user("And what was the wind, hour by hour, before the ship came to the harbour?"),
    assistant("In the first hour the wind was quiet. In the second hour it was not."),
    QUESTION,
]
NEXT_TURN = [assistant(ANSWER), ANOTHER]
PAGE = range(20, 84)


def with_tools(*tools: dict[str, Any], **fields: Any) -> Request:
    return chat(system(RULES), ANOTHER, tools=list(tools), **fields)


FIRST_WITH_TOOLS = chat(system(RULES), QUESTION, tools=[SHIPS, WIND])

RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Two ships, and one without a name."}


def called(arguments: str) -> Turn:
    call = {"id": "call_1", "type": "function", "function": {"name": "ships", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


FROM_QUESTION = {"from": "messages[1]"}

# row of the doc → requests, one after the other
ROWS: dict[str, list[Request]] = {
    "the time before the rules": [chat(system(f"{time} {RULES}"), *HISTORY[1:]) for time in (NOON, EVENING)],
    "the time after the rules": [chat(system(f"{RULES} {time}"), *HISTORY[1:]) for time in (NOON, EVENING)],
    "the time in the last turn": [
        chat(*HISTORY[:-1], user(f"{QUESTION['content']} {time}")) for time in (NOON, EVENING)
    ],
    "everything kept, the new turn appended": [chat(*HISTORY), chat(*HISTORY, *NEXT_TURN)],
    "the answer shortened before it is sent back": [
        chat(*HISTORY),
        chat(*HISTORY, assistant(ANSWER.partition(".")[0]), ANOTHER),
    ],
    "the oldest turns dropped": [chat(*HISTORY), chat(HISTORY[0], *HISTORY[3:], *NEXT_TURN)],
    "a note added to the rules": [
        chat(*HISTORY),
        chat(system(f"{RULES} Be brief."), *HISTORY[1:], *NEXT_TURN),
    ],
    "a note added to the last turn": [
        chat(*HISTORY),
        chat(*HISTORY, NEXT_TURN[0], user(f"{ANOTHER['content']} Be brief.")),
    ],
    "the same tools": [FIRST_WITH_TOOLS, with_tools(SHIPS, WIND)],
    "the same tools, keys of the schema in another order": [FIRST_WITH_TOOLS, with_tools(SHIPS_RESHUFFLED, WIND)],
    "the same tools, `tool_choice` `none`": [FIRST_WITH_TOOLS, with_tools(SHIPS, WIND, tool_choice="none")],
    "a call of a tool sent back, its arguments spelled another way": [
        chat(system(RULES), QUESTION, called(arguments), RESULT, tools=[SHIPS])
        for arguments in ('{"night":"quiet","limit":2}', '{ "limit": 2, "night": "quiet" }')
    ],
    "one more tool at the end": [FIRST_WITH_TOOLS, with_tools(SHIPS, WIND, FOG)],
    "the tools in another order": [FIRST_WITH_TOOLS, with_tools(WIND, SHIPS)],
    "no tools this time": [FIRST_WITH_TOOLS, with_tools()],
    "the rules character by character the same": [chat(system(RULES), QUESTION), chat(system(RULES), ANOTHER)],
    "a space before the rules": [chat(system(RULES), QUESTION), chat(system(f" {RULES}"), ANOTHER)],
    "line breaks instead of spaces after each sentence": [
        chat(system(RULES), QUESTION),
        chat(system(RULES.replace(". ", ".\n")), ANOTHER),
    ],
    "another temperature, seed, stop string and length": [
        chat(system(RULES), QUESTION),
        chat(system(RULES), QUESTION, temperature=0.5, seed=7, stop=["!"], max_tokens=3),
    ],
    "one request with `n` 4": [chat(system(RULES), QUESTION, n=4)],
    "a request each: the second": [chat(system(RULES), QUESTION)] * 2,
    "the same salt": [
        chat(system(RULES), QUESTION, cache_salt="tenant-17"),
        chat(system(RULES), ANOTHER, cache_salt="tenant-17"),
    ],
    "another salt": [
        chat(system(RULES), QUESTION, cache_salt="tenant-17"),
        chat(system(RULES), ANOTHER, cache_salt="tenant-18"),
    ],
    "the same salt, from the question on": [
        chat(system(RULES), QUESTION, cache_salt=FROM_QUESTION | {"salt": "tenant-17"}),
        chat(system(RULES), ANOTHER, cache_salt=FROM_QUESTION | {"salt": "tenant-17"}),
    ],
    "another salt, from the question on": [
        chat(system(RULES), QUESTION, cache_salt=FROM_QUESTION | {"salt": "tenant-17"}),
        chat(system(RULES), ANOTHER, cache_salt=FROM_QUESTION | {"salt": "tenant-18"}),
    ],
    "another salt, the very same question": [
        chat(system(RULES), QUESTION, cache_salt=FROM_QUESTION | {"salt": "tenant-17"}),
        chat(system(RULES), QUESTION, cache_salt=FROM_QUESTION | {"salt": "tenant-18"}),
    ],
    "without a salt, after one with a salt from the question on": [
        chat(system(RULES), QUESTION, cache_salt=FROM_QUESTION | {"salt": "tenant-17"}),
        chat(system(RULES), QUESTION),
    ],
    "15 tokens alike": [tokens(*PAGE), tokens(*PAGE[:15], 99, 98, 97)],
    "16 tokens alike": [tokens(*PAGE), tokens(*PAGE[:16], 99, 98, 97)],
    "31 tokens alike": [tokens(*PAGE), tokens(*PAGE[:31], 99, 98, 97)],
    "the same 63 tokens": [tokens(*PAGE[:63])] * 2,
    "the same 64 tokens": [tokens(*PAGE[:64])] * 2,
}
ROWS_OF_WHOLE_BLOCKS: dict[str, list[Request]] = {
    "15 tokens alike, in blocks": ROWS["15 tokens alike"],
    "31 tokens alike, in blocks": ROWS["31 tokens alike"],
    "32 tokens alike, in blocks": [tokens(*PAGE), tokens(*PAGE[:32], 99, 98, 97)],
    "the same 63 tokens, in blocks": ROWS["the same 63 tokens"],
    "the same 64 tokens, in blocks": ROWS["the same 64 tokens"],
}
ROW_OF_AN_ANSWER = "63 tokens, an answer of 8, and 5 more"
# row of the doc → how the model spells the call that is sent back
ROWS_OF_CALLS = {
    "the model spelled it as the template does": '{"name": "ships", "arguments": {"limit": 2, "night": "quiet"}}',
    "the model wrote the arguments in another order": '{"name": "ships", "arguments": {"night": "quiet", "limit": 2}}',
    "the model wrote it without spaces": '{"name":"ships","arguments":{"limit":2,"night":"quiet"}}',
}
ROWS_OF_ANOTHER_DAY = {
    "the template tells the date, the same day": [(9, 0), (23, 59)],
    "the template tells the date, the next day": [(9, 0), (24, 1)],
}


CAT, DOG = encoded("orange", (64, 64)), encoded("brown", (64, 64))
ALMOST_THE_CAT = encoded("orange", (64, 64), other_pixel=(63, 63))
CAT_AS_BMP = encoded("orange", (64, 64), "BMP")
WHAT, WHERE = "What does the keeper's cat look at?", "Where does the keeper's cat sit?"


def seen(*messages: Turn) -> Request:
    return chat(system(RULES), *messages)


ROWS_OF_PICTURES: dict[str, list[Request]] = {
    "the next turn of a conversation about a picture": [
        seen(shown(image(CAT), WHAT)),
        seen(shown(image(CAT), WHAT), assistant(ANSWER), user(WHERE)),
    ],
    "another question, behind the picture": [seen(shown(image(CAT), WHAT)), seen(shown(image(CAT), WHERE))],
    "another question, before the picture": [seen(shown(WHAT, image(CAT))), seen(shown(WHERE, image(CAT)))],
    "the picture as another file with the same pixels": [
        seen(shown(image(CAT), WHAT)),
        seen(shown(image(CAT_AS_BMP), WHAT)),
    ],
    "a picture in which the last pixel is another one": [
        seen(shown(image(CAT), WHAT)),
        seen(shown(image(ALMOST_THE_CAT), WHAT)),
    ],
    "a second picture behind the first": [
        seen(shown(image(CAT), WHAT)),
        seen(shown(image(CAT), image(DOG), WHAT)),
    ],
    "two pictures in the other order": [
        seen(shown(image(CAT), image(DOG), WHAT)),
        seen(shown(image(DOG), image(CAT), WHAT)),
    ],
}


class SpeakingRunner(CheckingRunner):
    """Says what it was told to say, then the token that ends a turn."""

    def __init__(self, end_of_turn: int, vocab_size: int, multimodal: MultimodalInfo | None = None) -> None:
        super().__init__(
            256,
            BLOCK_SIZE,
            vocab_size=vocab_size,
            max_model_len=1024,
            eos_token_ids=frozenset({end_of_turn}),
            multimodal=multimodal,
        )
        self._end_of_turn = end_of_turn
        self.say([])

    def say(self, answer: Sequence[int]) -> None:
        self._says = [*answer, self._end_of_turn]

    def execute(self, batch: Sequence[ScheduledRequest]) -> StepResult:
        result = super().execute(batch)
        for place, entry in enumerate(batch):
            if entry.samples:
                result.token_ids[place] = self._says[entry.end - entry.request.num_prompt_tokens]
        return result


class SeeingRunner(SpeakingRunner):
    """Real pictures have no number (`tests.feature_prompts`). Whose K/V is whose, their spans say."""

    def encode(
        self, feature: MultimodalFeature, inputs: Mapping[str, np.ndarray], adapter_slot: int | None = None
    ) -> list[int]:
        assert sum(array.nbytes for array in inputs.values()) == feature.num_input_bytes
        return []

    def _check_rows(self, entry: ScheduledRequest) -> None:
        assert all(item.output == [] for item in entry.features)

    def _what_pictures_decide(self, request: EngineSideRequest) -> dict[int, object]:
        return {}


class Clock:
    def __init__(self) -> None:
        self.time = datetime(2027, 3, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self.time


class Server:
    """`ask` answers from a cache that only `forget` empties."""

    def __init__(
        self, core: EngineCore, runner: SpeakingRunner, tokenizer: ModelTokenizer, http: httpx.Client, clock: Clock
    ) -> None:
        self.core, self.http, self.clock = core, http, clock
        self.runner, self._tokenizer = runner, tokenizer

    def say(self, answer: str) -> None:
        """From now on, whatever it is asked."""
        self.runner.say(self._tokenizer.backend.encode(answer, add_special_tokens=False).ids)

    def forget(self) -> None:
        self.core.reset_prefix_cache()

    def answer(self, request: Request) -> dict[str, Any]:
        path, body = request
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]

    def ask(self, request: Request) -> tuple[int, int]:
        """Returns (prompt tokens, cached tokens)."""
        usage = self.answer(request)["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def count(self, requests: Sequence[Request]) -> tuple[int, int]:
        self.forget()
        return [self.ask(request) for request in requests][-1]


@pytest.fixture(scope="module")
def server(chat_model_dir: Path) -> Iterator[Server]:
    yield from serve(chat_model_dir, TOOL_TEMPLATE)


@pytest.fixture(scope="module")
def server_of_whole_blocks(chat_model_dir: Path) -> Iterator[Server]:
    yield from serve(chat_model_dir, TOOL_TEMPLATE, prefix_match_unit="block")


@pytest.fixture(scope="module")
def dated_server(chat_model_dir: Path) -> Iterator[Server]:
    yield from serve(chat_model_dir, DATED_TEMPLATE)


@pytest.fixture(scope="module")
def seeing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = model_directory("qwen2_vl", tmp_path_factory.mktemp("models") / "qwen2_vl")
    tokenizer = load_tokenizer(directory)
    end_of_turn = tokenizer.backend.token_to_id("<|im_end|>")
    runner = SeeingRunner(end_of_turn, tokenizer.vocab_size, MultimodalInfo(embed_bytes=8))
    core, engine = engine_with(runner)
    with picture_app(engine, directory) as (url, _), httpx.Client(base_url=url, timeout=30) as http:
        served = Server(core, runner, tokenizer, http, Clock())
        served.say(ANSWER)
        yield served


def serve(chat_model_dir: Path, template: str, **settings: Any) -> Iterator[Server]:
    backend, clock = load_tokenizer(chat_model_dir).backend, Clock()
    tokenizer = ModelTokenizer(backend, chat_template_of(tokenizer_with(chat_model_dir, template), clock.now))
    runner = SpeakingRunner(backend.token_to_id("<|im_end|>"), tokenizer.vocab_size)
    core, engine = engine_with(runner, **settings)
    with live_app(engine, tokenizer) as url, httpx.Client(base_url=url, timeout=30) as http:
        served = Server(core, runner, tokenizer, http, clock)
        served.say(ANSWER)
        yield served


def engine_with(runner: SpeakingRunner, **settings: Any) -> tuple[EngineCore, ScriptedEngine]:
    """An engine core, and what looks like a client of it."""
    core = EngineCore(EngineConfig(block_size=BLOCK_SIZE, **settings), runner)

    async def compute(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        core.add_request(request)
        while core.has_unfinished_requests():
            for wanted in core.take_wanted():
                source = engine.sources[-1]
                assert source is not None
                core.supply_feature(wanted.request_id, wanted.key, await source.inputs(wanted.key))
            for output in core.step().outputs:
                yield output

    engine = ScriptedEngine(compute)
    engine.capabilities = core.capabilities
    return core, engine


def rows_of_the_doc() -> dict[str, tuple[int, int]]:
    """Row → (prompt tokens, cached tokens)."""
    found = re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d,]+) \|$", DOC.read_text(), re.MULTILINE)
    rows = {label: (int(prompt.replace(",", "")), int(cached.replace(",", ""))) for label, prompt, cached in found}
    assert len(rows) == len(found), "two rows of the doc have the same name"
    return rows


def test_every_row_of_the_doc_is_tested_here_and_the_other_way_round() -> None:
    tested = {*ROWS, *ROWS_OF_CALLS, *ROWS_OF_ANOTHER_DAY, *ROWS_OF_PICTURES, *ROWS_OF_WHOLE_BLOCKS, ROW_OF_AN_ANSWER}
    assert set(rows_of_the_doc()) == tested


@pytest.mark.parametrize("row", ROWS)
def test_the_numbers_are_the_docs(server: Server, row: str) -> None:
    assert server.count(ROWS[row]) == rows_of_the_doc()[row]


@pytest.mark.parametrize("row", ROWS_OF_WHOLE_BLOCKS)
def test_the_numbers_of_whole_blocks_are_the_docs(server_of_whole_blocks: Server, row: str) -> None:
    assert server_of_whole_blocks.count(ROWS_OF_WHOLE_BLOCKS[row]) == rows_of_the_doc()[row]


def test_the_numbers_after_an_answer_are_the_docs(server: Server) -> None:
    server.forget()
    server.runner.say(answer := range(100, 108))
    assert server.answer(tokens(*PAGE[:63], max_tokens=len(answer)))["usage"]["completion_tokens"] == len(answer)
    server.say(ANSWER)
    counted = server.ask(tokens(*PAGE[:63], *answer, *PAGE[:5]))
    assert counted == rows_of_the_doc()[ROW_OF_AN_ANSWER]


@pytest.mark.parametrize("row", ROWS_OF_CALLS)
def test_the_numbers_of_calls_are_the_docs(server: Server, row: str) -> None:
    server.forget()
    server.say(f"I will look.\n<tool_call>\n{ROWS_OF_CALLS[row]}\n</tool_call>")
    message = server.answer(FIRST_WITH_TOOLS)["choices"][0]["message"]
    server.say(ANSWER)
    result = RESULT | {"tool_call_id": message["tool_calls"][0]["id"]}
    counted = server.ask(chat(system(RULES), QUESTION, message, result, tools=[SHIPS, WIND]))
    assert counted == rows_of_the_doc()[row]


@pytest.mark.parametrize("row", ROWS_OF_ANOTHER_DAY)
def test_the_numbers_of_the_date_are_the_docs(dated_server: Server, row: str) -> None:
    dated_server.forget()
    for hour, minute in ROWS_OF_ANOTHER_DAY[row]:
        dated_server.clock.time = datetime(2027, 3, 1 + hour // 24, hour % 24, minute, tzinfo=UTC)
        counted = dated_server.ask(chat(user(f"{RULES} {QUESTION['content']}")))
    assert counted == rows_of_the_doc()[row]


@pytest.mark.parametrize("row", ROWS_OF_PICTURES)
def test_the_numbers_of_pictures_are_the_docs(seeing_server: Server, row: str) -> None:
    assert seeing_server.count(ROWS_OF_PICTURES[row]) == rows_of_the_doc()[row]


def test_the_doc_says_what_block_size_its_numbers_have() -> None:
    assert f"blocks of {BLOCK_SIZE} tokens" in DOC.read_text()
