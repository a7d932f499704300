"""`/v1/cache/probe` and `/v1/cache/explain`: what would be found, where a request parts from what is there, and why."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.isolation import IsolationMode
from frontend.prompt.chat_template import chat_template_of
from frontend.prompt.tokenizer import ModelTokenizer, load_tokenizer
from tests.frontend.embedded_engine import EmbeddedEngine
from tests.frontend.live_app import live_app
from tests.frontend.picture_app import encoded, image, model_directory, picture_app, user
from tests.frontend.templates import DATED_TEMPLATE, TOOL_TEMPLATE, tokenizer_with

CHAT, COMPLETION, PROBE, EXPLAIN = "/v1/chat/completions", "/v1/completions", "/v1/cache/probe", "/v1/cache/explain"
RULES = "You answer questions about a library. Be brief and kind. Never tell a reader what others borrow."


class Served:
    """Bodies without `max_tokens` ask for one token."""

    def __init__(self, engine: EmbeddedEngine, http: httpx.Client) -> None:
        self.engine = engine
        self._http = http

    def post(self, path: str, body: dict[str, Any], key: str | None = None) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return self._http.post(path, json={"max_tokens": 1, **body}, headers=headers)

    def run(self, body: dict[str, Any], key: str | None = None) -> dict[str, Any]:
        path = COMPLETION if "prompt" in body else CHAT
        return self._answer(self.post(path, {"ignore_eos": True, **body}, key))

    def probe(self, body: dict[str, Any], key: str | None = None) -> dict[str, Any]:
        return self._answer(self.post(PROBE, body, key))

    def explain(self, body: dict[str, Any], key: str | None = None) -> dict[str, Any]:
        return self._answer(self.post(EXPLAIN, body, key))

    @staticmethod
    def _answer(response: httpx.Response) -> dict[str, Any]:
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]


@contextmanager
def serving(
    tokenizer: ModelTokenizer, *, isolation: IsolationMode = "salt", keys: tuple[str, ...] = (), **config: Any
) -> Iterator[Served]:
    engine = EmbeddedEngine(**config)
    with (
        live_app(engine, tokenizer, isolation=isolation, api_keys=keys) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        yield Served(engine, http)


@pytest.fixture(scope="module")
def tokenizer(chat_model_dir: Path) -> ModelTokenizer:
    backend = load_tokenizer(chat_model_dir).backend
    return ModelTokenizer(backend, chat_template_of(tokenizer_with(chat_model_dir, TOOL_TEMPLATE)))


@pytest.fixture(scope="module")
def lasting(tokenizer: ModelTokenizer) -> Iterator[Served]:
    with serving(tokenizer) as served:
        yield served


@pytest.fixture
def served(lasting: Served) -> Served:
    """Nothing is cached."""
    lasting.engine.start_anew()
    return lasting


def chat(*texts: str, system: str = RULES, **fields: Any) -> dict[str, Any]:
    """`texts` are those of users and the assistant, in turns."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": [{"role": "system", "content": system}, *turns], **fields}


def tool(name: str, description: str = "Does something useful.") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description}}


def test_a_probe_foretells_the_usage_and_leaves_no_trace(served: Served):
    served.run(chat("Where are the maps?"))
    body = chat("Where are the atlases?")
    before = served.engine.core.stats()
    probe = served.probe(body | {"stream": True})
    assert served.engine.core.stats() == before
    assert probe["object"] == "cache.probe" and probe["model"] == "tiny"
    assert probe["engines"] == [
        {
            "engine": 0,
            **{name: probe[name] for name in ("hit_tokens", "copied_tokens", "kept_tokens", "tiers", "miss_reason")},
        }
    ]
    usage = served.run(body)["usage"]
    assert usage["prompt_tokens"] == probe["prompt_tokens"]
    details = usage["prompt_tokens_details"]
    assert details["cached_tokens"] == probe["hit_tokens"]
    assert details["cache_miss_reason"] == probe["miss_reason"] == "diverged"
    assert probe["tiers"] == {"device": probe["hit_tokens"]} and 0 < probe["hit_tokens"] < probe["prompt_tokens"]


def test_a_completion_is_probed_by_its_text_or_its_tokens(served: Served):
    served.run({"prompt": "It was a dark and stormy night"})
    assert served.probe({"prompt": "It was a dark and stormy night"})["miss_reason"] == "none"
    tokens = served.post("/tokenize", {"prompt": "It was a dark and stormy night", "max_tokens": None})
    assert tokens.status_code == 400  # tokenize knows no max_tokens
    assert served.probe({"prompt": [5, 6, 7, 8]})["hit_tokens"] == 0
    explained = served.explain({"prompt": "It was a dark and sunny day"})
    assert (explained["component"], explained["place"]) == ("text", None)


@pytest.mark.parametrize("path", [PROBE, EXPLAIN])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "colour": "red"}, "colour"),
        ({"prompt": [1 << 21]}, "prompt"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"prompt": "a", "model": "other"}, "model"),
        ({"prompt": "a", "cache": {"reed": True}}, "cache.reed"),
    ],
)
def test_what_would_be_refused_is_refused(served: Served, path: str, body: dict, param: str):
    response = served.post(path, body)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param


def test_a_text_that_differs_is_found_with_its_place_and_both_texts(served: Served):
    served.run(chat("Where are the maps?", "On the second floor.", "And the globes?"))
    answer = served.explain(chat("Where are the maps?", "On the third floor.", "And the globes?"))
    assert (answer["component"], answer["miss_reason"]) == ("text", "diverged")
    assert answer["place"] == {"field": "messages[2].content[0]", "message": 2, "part": 0}
    texts = answer["texts"]
    assert texts["before"].endswith("assistant\nOn the")
    assert texts["request"].startswith(" third floor.") and texts["cached"].startswith(" second floor.")
    assert "messages[2].content[0]" in answer["explanation"] and "messages[2].content[0]" in answer["advice"]
    assert answer["token_index"] >= answer["hit_tokens"] > 0


def test_the_next_turn_parts_where_nothing_was_stored_yet(served: Served):
    reply = served.run(chat("Where are the maps?", max_tokens=1))["choices"][0]["message"]["content"]
    answer = served.explain(chat("Where are the maps?", reply, "And the globes?"))
    assert answer["component"] in ("never_stored", "text")
    assert served.explain(chat("Hm?", system="Something else."))["texts"]["request"] != ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Today is 2026-11-30.", "Today is 2026-12-01."),
        ("It is Mon Nov 30 2026 now.", "It is Tue Dec 1 2026 now."),
        ("As of 30 November 2026 we know this.", "As of 29 November 2026 we know this."),
        ("Now: 10:15:22", "Now: 10:17:01"),
    ],
)
def test_a_date_is_called_a_date(served: Served, one: str, other: str):
    served.run(chat("Hello?", system=f"{one} {RULES}"))
    answer = served.explain(chat("Hello?", system=f"{other} {RULES}"))
    assert answer["component"] == "date"
    assert answer["place"]["message"] == 0 and "last message" in answer["advice"]


def test_a_date_that_the_template_writes_is_one_too(chat_model_dir: Path):
    backend = load_tokenizer(chat_model_dir).backend
    dated = ModelTokenizer(backend, chat_template_of(tokenizer_with(chat_model_dir, DATED_TEMPLATE)))
    with serving(dated) as served:
        one = {"messages": [{"role": "user", "content": "Hello?"}]}
        served.run(one | {"chat_template_kwargs": {"date_string": "30 Nov 2026"}})
        answer = served.explain(one | {"chat_template_kwargs": {"date_string": "31 Nov 2026"}})
        assert (answer["component"], answer["place"]) == ("date", None)
        answer = served.explain(one | {"chat_template_kwargs": {"date_string": "unknown"}})
        assert (answer["component"], answer["place"]) == ("template", None)


def test_tools_in_another_order_are_told_from_other_tools(served: Served):
    tools = [tool("search"), tool("borrow"), tool("renew"), tool("give_back")]
    served.run(chat("Hello?", tools=tools))
    answer = served.explain(chat("Hello?", tools=[tools[0], tools[3], tools[2], tools[1]]))
    assert answer["component"] == "tool_order"
    assert answer["place"] == {"field": "tools[1]", "tool": 1}
    changed = [tools[0], tool("borrow", "Borrows a book."), *tools[2:]]
    answer = served.explain(chat("Hello?", tools=changed))
    assert (answer["component"], answer["place"]["field"]) == ("tool", "tools[1]")
    for fewer in (tools[:3], [*tools, tool("pay")]):
        assert served.explain(chat("Hello?", tools=fewer))["component"] == "tool"


def test_what_no_message_says_the_template_does(served: Served):
    served.run(chat("Hello?", chat_template_kwargs={"enable_thinking": False}))
    long = chat("Hello?", "Hi.", "What?")
    served.run(long)
    changed = {"messages": [*long["messages"][:2], {"role": "user", "content": "Hi."}, *long["messages"][3:]]}
    answer = served.explain(changed)
    assert answer["component"] == "template"


def test_a_salt_keeps_apart_and_is_told_where_anybody_could_find_out(served: Served):
    served.run(chat("Where are the maps?"))
    answer = served.explain(chat("Where are the maps?", cache_salt="mine"))
    assert (answer["component"], answer["hit_tokens"], answer["miss_reason"]) == ("salt", 0, "not_found")
    assert answer["unsalted_hit_tokens"] == answer["prompt_tokens"] - 1
    assert answer["texts"]["cached"] is None
    assert served.explain(chat("Anything else", system="Other.", cache_salt="mine"))["component"] == "never_stored"
    served.run(chat("Where are the maps?", cache_salt="mine"))
    assert served.explain(chat("Where are the maps?", cache_salt="mine"))["component"] == "none"


def test_what_gave_way_is_told_with_its_time(tokenizer: ModelTokenizer):
    with serving(tokenizer, num_blocks=24) as served:
        served.run(chat("Where are the maps?"))
        for number in range(12):
            served.run({"prompt": [number + 1] * 40})
        answer = served.explain(chat("Where are the maps?"))
        assert answer["component"] == "evicted" and answer["lost_at"] is not None
        assert "cache.ttl_s" in answer["advice"]
        served.engine.core.reset_prefix_cache()
        served.run({"prompt": [1] * 40})
        assert served.explain({"prompt": [2] * 40})["component"] in ("reset", "evicted")


def test_who_does_not_read_is_told_what_is_there(served: Served):
    served.run(chat("Where are the maps?"))
    answer = served.explain(chat("Where are the maps?", cache={"read": False}))
    assert (answer["component"], answer["hit_tokens"]) == ("read_disabled", 0)
    assert answer["readable_hit_tokens"] == answer["prompt_tokens"] - 1
    assert served.explain({"prompt": [1, 2, 3], "prompt_logprobs": 1})["component"] == "read_disabled"


def test_only_whole_blocks_are_found_where_that_is_set(tokenizer: ModelTokenizer):
    with serving(tokenizer, prefix_match_unit="block") as served:
        served.run({"prompt": list(range(1, 49))})
        answer = served.explain({"prompt": list(range(1, 43))})
        assert (answer["component"], answer["hit_tokens"], answer["token_index"]) == ("block_boundary", 32, 42)
    with serving(tokenizer, enable_prefix_caching=False) as served:
        assert served.explain({"prompt": [1, 2, 3]})["component"] == "cache_disabled"


def test_what_everybody_may_find_is_not_shown_where_callers_are_several(tokenizer: ModelTokenizer):
    first, second = "sk-first", "sk-second"
    with serving(tokenizer, keys=(first, second)) as served:
        served.run(chat("My number is 4711."), first)
        answer = served.explain(chat("My number is 1234."), second)
        assert answer["texts"]["cached"] is None and answer["texts"]["cached_is_withheld"]
        assert "4711" not in str(answer) and answer["component"] == "text"
        served.run(chat("My number is 4711.", cache_salt="s"), first)
        assert "4711" in served.explain(chat("My number is 1234.", cache_salt="s"), first)["texts"]["cached"]
    with serving(tokenizer, isolation="api-key", keys=(first, second)) as served:
        served.run(chat("My number is 4711."), first)
        answer = served.explain(chat("My number is 1234."), second)
        assert answer["component"] == "never_stored" and answer["unsalted_hit_tokens"] is None
        assert answer["hit_tokens"] == 0 and "4711" not in str(answer)
        assert "4711" in served.explain(chat("My number is 1234."), first)["texts"]["cached"]


def test_what_is_not_shown_answers_no_guesses_either(tokenizer: ModelTokenizer):
    """Whether it is a date, or the same tools in another order, tells something of a text."""
    first, second = "sk-first", "sk-second"
    tools = [tool(name) for name in ("search_catalogue", "reserve_item", "opening_hours")]
    dated = chat("Hello?", system="Today is 2026-11-30. Be brief.")
    with serving(tokenizer, keys=(first, second)) as served:
        served.run(chat("Hello?", tools=tools), first)
        assert served.explain(chat("Hello?", tools=tools[::-1]), second)["component"] == "tool"
        served.run(dated, first)
        for system in ("Today is 2026-12-01. Be brief.", "Today is no day like any other."):
            assert served.explain(chat("Hello?", system=system), second)["component"] == "text"
    with serving(tokenizer) as served:
        served.run(chat("Hello?", tools=tools))
        assert served.explain(chat("Hello?", tools=tools[::-1]))["component"] == "tool_order"
        served.run(dated)
        assert served.explain(chat("Hello?", system="Today is 2026-12-01. Be brief."))["component"] == "date"


def test_an_engine_that_is_lost_is_a_503_and_one_of_several_is_said_to_be(served: Served):
    served.engine.lost = True
    assert served.post(PROBE, chat("Hello?")).status_code == 503
    served.engine.lost = False
    other = EmbeddedEngine()
    other.index, other.lost = 1, True
    served.engine.engines = [served.engine, other]
    served.run(chat("Hello?"))
    answer = served.probe(chat("Hello?"))
    assert answer["engine"] == 0 and answer["engines"][1] == {"engine": 1, "error": "the engine was lost"}
    other.lost, served.engine.engines = False, [other, served.engine]
    answer = served.explain(chat("Hello?"))
    assert (answer["engine"], answer["component"]) == (0, "none")
    assert [each["hit_tokens"] for each in answer["engines"]] == [0, answer["prompt_tokens"] - 1]


def test_another_picture_is_told_by_its_number(tmp_path: Path):
    red, blue = image(encoded("red")), image(encoded("blue"))
    directory = model_directory("qwen2_vl", tmp_path / "qwen2_vl")
    engine = EmbeddedEngine(takes_pictures=True)
    with picture_app(engine, directory) as (url, _), httpx.Client(base_url=url, timeout=60) as http:
        served = Served(engine, http)
        served.run({"messages": [user("First ", red, " and then ", red, ".")]})
        answer = served.explain({"messages": [user("First ", red, " and then ", blue, ".")]})
        assert (answer["component"], answer["image"]) == ("image", 1)
        assert answer["place"] == {"field": "messages[0].content[3]", "message": 0, "part": 3}
        answer = served.explain({"messages": [user("First ", red, " and later ", red, ".")]})
        assert (answer["component"], answer["image"]) == ("text", None)
        assert answer["place"]["part"] == 2
        served.run({"messages": [user("First ", blue, ".")]})
        assert served.explain({"messages": [user("First ", image(encoded("green")), ".")]})["image"] == 0


def test_in_a_long_chat_a_place_is_found_without_looking_for_all(tokenizer: ModelTokenizer):
    texts = [f"This is turn {i}." for i in range(61)]
    with serving(tokenizer) as served:
        served.run(chat(*texts))
        for changed in (0, 17, 59):
            other = [*texts[:changed], "This is another turn.", *texts[changed + 1 :]]
            answer = served.explain(chat(*other))
            assert answer["place"] == {
                "field": f"messages[{changed + 1}].content[0]",
                "message": changed + 1,
                "part": 0,
            }
            assert answer["component"] == "text"


def test_of_a_salt_from_a_later_place_what_comes_before_is_shared_and_no_more(tokenizer: ModelTokenizer):
    with serving(tokenizer, keys=("sk-a", "sk-b")) as served:
        mine, theirs = ({"salt": salt, "from": "messages[1]"} for salt in ("mine", "theirs"))
        served.run(chat("My number is 4711.", cache_salt=theirs), "sk-a")
        answer = served.explain(chat("My number is 1234.", cache_salt=mine), "sk-b")
        assert answer["component"] == "never_stored" and answer["texts"]["cached"] is None
        assert answer["hit_tokens"] == answer["token_index"] > 16
        other_rules = chat("My number is 1234.", system=RULES[:50] + "and then.", cache_salt=mine)
        answer = served.explain(other_rules, "sk-b")
        assert answer["component"] == "text" and answer["texts"]["cached_is_withheld"], "that part anybody may find"
        served.run(chat("My number is 1234.", cache_salt=mine), "sk-b")
        texts = served.explain(chat("My number is 1294.", cache_salt=mine), "sk-b")["texts"]
        assert texts["cached"] is not None and texts["cached"].startswith("34.")


WORDS = ("maps", "globes", "books", "journals", "films", "floor", "shelf", "reader", "quiet", "please")


@pytest.mark.parametrize("isolation", ["salt", "api-key"])
def test_no_word_from_under_another_salt_is_ever_shown(tokenizer: ModelTokenizer, isolation: IsolationMode):
    """Random chats of several tenants who say alike things, each with a word of its own."""
    numbers = random.Random(7)
    keys = ("sk-a", "sk-b", "sk-c") if isolation == "api-key" else ()
    tenants: Sequence[str] = keys or ("a", "b", "c")
    secrets = dict(zip(tenants, ("zebra", "quokka", "ibex"), strict=True))

    def say(tenant: str) -> str:
        words = [numbers.choice((*WORDS[:3], secrets[tenant])) for _ in range(numbers.randint(1, 6))]
        return " ".join(words)

    def make(tenant: str) -> dict[str, Any]:
        start = numbers.choice((None, "messages[1]", "messages[1].content[0]"))
        system = numbers.choice((RULES, RULES[:40])) if start or numbers.random() < 0.5 else say(tenant)
        body = chat(*[say(tenant) for _ in range(numbers.choice((1, 3)))], system=system)
        salt = {} if keys else {"salt": tenant}
        return body | ({"cache_salt": salt | ({"from": start} if start else {})} if salt or start else {})

    with serving(tokenizer, isolation=isolation, keys=keys, num_blocks=120) as served:
        num_shown = 0
        for _ in range(80):
            tenant = numbers.choice(tenants)
            body, key = make(tenant), tenant if keys else None
            answer = served.explain(body, key)
            others = [secret for other, secret in secrets.items() if other != tenant]
            assert not any(secret in str(answer) for secret in others), answer
            usage = served.run(body, key)["usage"]["prompt_tokens_details"]
            assert usage["cached_tokens"] == answer["hit_tokens"]
            assert (usage["cache_miss_reason"] or "none") == answer["miss_reason"]
            num_shown += answer["texts"]["cached"] is not None
        assert num_shown > 15
