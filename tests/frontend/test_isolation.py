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
from ipc.messages import EngineRequest
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
                assert (one.memory_tenant == other.memory_tenant) == (one.extra_key_spans == other.extra_key_spans)


def test_keys_are_needed_to_isolate_by_them() -> None:
    check_isolation("api-key", KEYS)
    check_isolation("salt", ())
    with pytest.raises(ValueError, match="FOREWORD_API_KEY"):
        check_isolation("api-key", ())
