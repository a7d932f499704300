"""`--cache-isolation`: who shares with whom, and that callers cannot choose it where the server does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from frontend.api_key import caller_id
from frontend.isolation import IsolationMode, check_isolation, isolate
from frontend.prompt.cache_salt import MAX_SALT_CHARACTERS
from frontend.prompt.errors import PromptError
from frontend.prompt.tokenizer import ModelTokenizer
from ipc.vocabulary import EngineRequest
from tests.frontend.live_app import live_app
from tests.frontend.scripted_engine import ScriptedEngine, says

KEYS = ("sk-first", "sk-second")


class Isolated:
    def __init__(self, engine: ScriptedEngine, http: httpx.Client) -> None:
        self._engine = engine
        self._http = http

    def told(self, key: str | None = None, path: str = "/v1/completions", **fields: Any) -> EngineRequest:
        """What the engine is told of a request of `key`."""
        assert self.answer(key, path, **fields).status_code == 200
        return self._engine.requests[-1]

    def answer(self, key: str | None = None, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        prompt = {"prompt": "fine"} if "chat" not in path else {"messages": [{"role": "user", "content": "fine"}]}
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return self._http.post(path, json=prompt | fields, headers=headers)


@contextmanager
def serving(tokenizer: ModelTokenizer, isolation: IsolationMode, keys: tuple[str, ...] = ()) -> Iterator[Isolated]:
    engine = ScriptedEngine(says([70, 71], finish_reason="length"))
    with (
        live_app(engine, tokenizer, isolation=isolation, api_keys=keys) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        yield Isolated(engine, http)


@pytest.fixture(scope="module")
def by_salt(chat_tokenizer: ModelTokenizer) -> Iterator[Isolated]:
    with serving(chat_tokenizer, "salt") as served:
        yield served


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_callers_of_different_keys_share_nothing(chat_tokenizer: ModelTokenizer, path: str) -> None:
    with serving(chat_tokenizer, "api-key", KEYS) as served:
        first, again, second = (served.told(key, path) for key in (KEYS[0], KEYS[0], KEYS[1]))
        (span,) = first.extra_key_spans
        assert (span.start, span.end, span.kind) == (0, 1, "cache_salt")
        assert first.extra_key_spans == again.extra_key_spans != second.extra_key_spans
        assert first.tenant == again.tenant != second.tenant
        assert not any(key in str(first) for key in KEYS)


def test_a_salt_divides_what_is_the_callers_and_reaches_nobody_elses(chat_tokenizer: ModelTokenizer) -> None:
    with serving(chat_tokenizer, "api-key", KEYS) as served:
        requests = [served.told(key, cache_salt=salt) for key in KEYS for salt in ("pepper", "other")]
        requests += [served.told(key) for key in KEYS]
        requests.append(served.told(KEYS[1], cache_salt=caller_id(KEYS[0])))
        assert len({request.extra_key_spans for request in requests}) == len(requests)
        # However it is divided, it is one tenant's share of the cache.
        assert {request.tenant for request in requests} == {caller_id(key) for key in KEYS}
        assert all(len(str(span.key)) <= MAX_SALT_CHARACTERS for r in requests for span in r.extra_key_spans)


def test_every_frontend_derives_the_same_from_a_key(chat_tokenizer: ModelTokenizer) -> None:
    with serving(chat_tokenizer, "api-key", KEYS) as here, serving(chat_tokenizer, "api-key", KEYS[::-1]) as there:
        assert here.told(KEYS[0]).extra_key_spans == there.told(KEYS[0]).extra_key_spans


def test_with_salts_a_key_changes_nothing(chat_tokenizer: ModelTokenizer) -> None:
    with serving(chat_tokenizer, "salt", KEYS) as served:
        requests = [served.told(key, cache_salt="pepper") for key in KEYS]
        assert requests[0].extra_key_spans == requests[1].extra_key_spans
        assert {request.tenant for request in requests} == {"pepper"}
        assert (served.told(KEYS[0]).extra_key_spans, served.told(KEYS[0]).tenant) == ((), "")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_where_all_share_a_salt_is_refused(chat_tokenizer: ModelTokenizer, path: str) -> None:
    with serving(chat_tokenizer, "none", KEYS) as served:
        refused = served.answer(KEYS[0], path, cache_salt="pepper")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "cache_salt"
        assert "--cache-isolation none" in refused.json()["error"]["message"]


def test_where_all_share_keys_still_tell_whose_share_it_is(chat_tokenizer: ModelTokenizer) -> None:
    with serving(chat_tokenizer, "none", KEYS) as served:
        first, second = (served.told(key) for key in KEYS)
        assert first.extra_key_spans == second.extra_key_spans == ()
        assert {first.tenant, second.tenant} == {caller_id(key) for key in KEYS}
    with serving(chat_tokenizer, "none") as served:
        assert served.told().tenant == ""


@pytest.mark.parametrize("salt", ["", "a/b", "s" * 129])
@pytest.mark.parametrize("mode", ["salt", "api-key"])
def test_a_salt_that_can_be_none_is_refused_in_every_mode(mode: IsolationMode, salt: str) -> None:
    with pytest.raises(PromptError) as refused:
        isolate(mode, "caller", salt)
    assert refused.value.field == "cache_salt"


def test_what_is_remembered_of_prompts_is_kept_apart_like_the_cache() -> None:
    for mode, salts in (("salt", (None, "a", "b")), ("api-key", (None, "a", "b"))):
        isolations = [isolate(mode, caller, salt) for caller in ("x", "y") for salt in salts]  # type: ignore[arg-type]
        for one in isolations:
            for other in isolations:
                assert (one.memory_tenant == other.memory_tenant) == (one.salts == other.salts)


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "fine"}]


def test_a_salt_from_a_place_on_leaves_what_is_before_to_all(by_salt: Isolated, chat_tokenizer: ModelTokenizer) -> None:
    salt = {"salt": "pepper", "from": "messages[1]"}
    request = by_salt.told(path="/v1/chat/completions", messages=MESSAGES, cache_salt=salt)
    (span,) = request.extra_key_spans
    before = chat_tokenizer.backend.decode(request.prompt_token_ids[: span.start], skip_special_tokens=False)
    assert (span.end, span.kind, span.key) == (span.start + 1, "cache_salt", "pepper")
    assert "Be brief." in before and "user" not in before
    assert request.tenant == "pepper"
    in_tokens = by_salt.told(prompt=[5] * 9, cache_salt={"salt": "pepper", "from": 4})
    assert [(span.start, span.key) for span in in_tokens.extra_key_spans] == [(4, "pepper")]


def test_a_caller_chooses_from_where_on_its_key_counts(chat_tokenizer: ModelTokenizer) -> None:
    """Without a salt of its own what comes before is everybody's; with one that counts within what is the caller's."""
    with serving(chat_tokenizer, "api-key", KEYS) as served:
        shared = served.told(KEYS[0], prompt=[5] * 9, cache_salt={"from": 4})
        assert [(span.start, span.key) for span in shared.extra_key_spans] == [(4, caller_id(KEYS[0]))]
        own = served.told(KEYS[0], prompt=[5] * 9, cache_salt={"salt": "pepper", "from": 4})
        assert [(span.start, span.key) for span in own.extra_key_spans] == [(0, caller_id(KEYS[0])), (4, "pepper")]
        whole = served.told(KEYS[0], prompt=[5] * 9, cache_salt={"salt": "pepper", "from": 0})
        assert whole.extra_key_spans == served.told(KEYS[0], prompt=[5] * 9, cache_salt="pepper").extra_key_spans
        assert {request.tenant for request in (shared, own, whole)} == {caller_id(KEYS[0])}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/tokenize of a chat"])
@pytest.mark.parametrize(
    ("cache_salt", "param"),
    [
        ({"salt": "pepper", "form": "messages[0]"}, "cache_salt.form"),
        ({"salt": "", "from": 0}, "cache_salt.salt"),
        ({"salt": "pepper", "from": "messages[7]"}, "cache_salt.from"),
        ({"salt": "pepper", "from": "the beginning"}, "cache_salt.from"),
        ({"salt": "pepper", "from": -1}, "cache_salt.from"),
        ({"salt": "pepper", "from": True}, "cache_salt.from"),
        ({"from": 0}, "cache_salt.salt"),
        ({}, "cache_salt.salt"),
        (7, "cache_salt"),
    ],
)
def test_a_salt_that_begins_nowhere_names_its_field(by_salt: Isolated, path: str, cache_salt: Any, param: str) -> None:
    path, _, chat = path.partition(" of a ")
    fields = {"messages": MESSAGES, "prompt": None} if chat else {}
    refused = by_salt.answer(path=path, cache_salt=cache_salt, **fields)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


def test_keys_are_needed_to_isolate_by_them() -> None:
    check_isolation("api-key", KEYS)
    check_isolation("salt", ())
    with pytest.raises(ValueError, match="FOREWORD_API_KEY"):
        check_isolation("api-key", ())
