"""LoRA adapters over HTTP: loaded, listed, asked for by name in every API, unloaded, and refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from frontend.engine_errors import RequestRefusedError
from frontend.prompt.tokenizer import ModelTokenizer
from ipc.vocabulary import CacheProbe, EngineRequest, RequestError
from tests.frontend.adapter_engine import LOADED_S, AdapterEngine, adapter
from tests.frontend.live_app import MODEL_NAMES, live_app
from tests.frontend.scripted_engine import fails_after, says
from tests.frontend.test_api_key import ADMIN, KEYS
from tests.wire_peers import wait_until

FILES = {"/adapters/a": "d1", "/adapters/b": "d2"}
CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
COMPLETION = {"prompt": "Hello!", "max_tokens": 4}


class Served:
    def __init__(self, engine: AdapterEngine, http: httpx.Client) -> None:
        self.engine = engine
        self.http = http

    def load(self, name: str, path: str = "/adapters/a", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})

    def unload(self, name: str, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/unload_lora_adapter", json={"lora_name": name, **fields})

    def models(self) -> list[dict[str, Any]]:
        return self.http.get("/v1/models").json()["data"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def running(chat_tokenizer: ModelTokenizer) -> Iterator[Served]:
    engine = AdapterEngine(dict(FILES))
    with live_app(engine, chat_tokenizer) as url, httpx.Client(base_url=url, timeout=30) as http:
        yield Served(engine, http)


@pytest.fixture
def served(running: Served) -> Served:
    """With an adapter "a"."""
    engine = running.engine
    engine.script = says([70], finish_reason="length")
    engine.requests.clear()
    engine.asked.clear()
    engine.broken.clear()
    engine.tell("changed", adapter("a", "d1"))
    return running


class TestLoading:
    def test_says_what_vllm_says(self, served: Served) -> None:
        answer = served.load("b", "/adapters/b")
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'b' added successfully.")
        assert answer.headers["content-type"].startswith("text/plain")
        answer = served.unload("b", lora_int_id=7)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'b' removed successfully.")

    def test_in_place_takes_another_ones_place(self, served: Served) -> None:
        assert served.load("a", "/adapters/b", load_inplace=True).status_code == 200
        assert served.engine.loaded_adapters["a"].digest == "d2"

    @pytest.mark.parametrize(
        ("name", "path", "status", "param", "code"),
        [
            ("a", "/adapters/b", 400, "lora_name", "name_taken"),
            (MODEL_NAMES[0], "/adapters/a", 400, "lora_name", "name_taken"),
            (MODEL_NAMES[1], "/adapters/a", 400, "lora_name", "name_taken"),
            ("", "/adapters/a", 400, "lora_name", None),
            ("b", "", 400, "lora_path", None),
            ("b", "/adapters/none", 404, "lora_path", "path_not_found"),
            ("b", "/elsewhere/b", 400, "lora_path", "outside_lora_root"),
            ("broken", "/adapters/b", 400, "lora_path", "invalid_adapter"),
        ],
    )
    def test_is_refused_with_the_reason(
        self, served: Served, name: str, path: str, status: int, param: str, code: str | None
    ) -> None:
        served.engine.broken = {"broken"}
        answer = served.load(name, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
        assert error["message"].startswith(param)
        assert list(served.engine.loaded_adapters) == ["a"]

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("load", {}, "lora_name"),
            ("load", {"lora_name": "b"}, "lora_path"),
            ("load", {"lora_name": "b", "lora_path": 7}, "lora_path"),
            ("load", {"lora_name": "b", "lora_path": "/adapters/b", "load_inplace": "yes"}, "load_inplace"),
            ("load", {"lora_name": "b", "lora_path": "/adapters/b", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
            ("load", {"lora_name": "b", "lora_path": "/adapters/b", "other": 1}, "other"),
            ("unload", {}, "lora_name"),
            ("unload", {"lora_name": ""}, "lora_name"),
            ("unload", {"lora_name": "a", "lora_int_id": "x"}, "lora_int_id"),
        ],
    )
    def test_bad_bodies_name_the_field(self, served: Served, path: str, body: dict[str, Any], param: str) -> None:
        answer = served.http.post(f"/v1/{path}_lora_adapter", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert served.engine.asked == []

    def test_goes_on_when_its_client_leaves(self, served: Served) -> None:
        served.engine.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            served.http.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": "/adapters/b"}, timeout=0.3)
        served.engine.open_gate()
        wait_until(lambda: "b" in served.engine.loaded_adapters)
        wait_until(lambda: served.models()[-1]["id"] == "b")

    def test_what_is_unknown_cannot_be_unloaded(self, served: Served) -> None:
        for name in ("b", MODEL_NAMES[0]):
            error = served.unload(name).json()["error"]
            assert (error["param"], error["code"]) == ("lora_name", "unknown_adapter")
            assert served.unload(name).status_code == 404

    def test_needs_an_engine_that_can(self, chat_tokenizer: ModelTokenizer) -> None:
        engine = AdapterEngine(FILES, max_loras=0)
        with live_app(engine, chat_tokenizer) as url:
            body = {"lora_name": "a", "lora_path": "/adapters/a"}
            answer = httpx.post(f"{url}/v1/load_lora_adapter", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "lora_disabled"
            assert "--enable-lora" in answer.json()["error"]["message"]
            engine.state = "down"
            answer = httpx.post(f"{url}/v1/load_lora_adapter", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
            assert "retry-after" in answer.headers

    @pytest.mark.parametrize("path", ["load_lora_adapter", "unload_lora_adapter"])
    def test_needs_an_admin_key_where_there_are_any(self, chat_tokenizer: ModelTokenizer, path: str) -> None:
        engine = AdapterEngine(FILES)
        engine.tell("first", adapter("a", "d1"))
        body = {"lora_name": "a", "lora_path": "/adapters/a", "load_inplace": True}
        if path.startswith("unload"):
            body = {"lora_name": "a"}
        with live_app(engine, chat_tokenizer, api_keys=KEYS, admin_api_keys=(ADMIN,)) as url:
            statuses = [
                httpx.post(
                    f"{url}/v1/{path}", json=body, headers={} if key is None else {"authorization": f"Bearer {key}"}
                ).status_code
                for key in (None, KEYS[0], ADMIN)
            ]
        assert statuses == [401, 403, 200]
        assert len(engine.asked) == 1


class TestAskingForOne:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", COMPLETION),
            ("/v1/completions", COMPLETION | {"prompt": ["a", "b"]}),
            ("/v1/messages", CHAT),
        ],
    )
    def test_by_its_name_as_model(self, served: Served, path: str, body: dict[str, Any]) -> None:
        for model, name in (("a", "a"), (MODEL_NAMES[1], ""), (None, "")):
            served.engine.requests.clear()
            answer = served.http.post(path, json=body | ({} if model is None else {"model": model}))
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == (model or MODEL_NAMES[0])
            assert {request.adapter for request in served.engine.requests} == {name}

    def test_in_a_stream(self, served: Served) -> None:
        answer = served.http.post("/v1/chat/completions", json=CHAT | {"model": "a", "stream": True})
        assert '"model":"a"' in answer.text
        assert served.engine.requests[-1].adapter == "a"

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/tokenize", {"prompt": "Hello!"}),
            ("/detokenize", {"tokens": [70]}),
            ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
        ],
    )
    def test_what_needs_no_engine_is_as_for_the_model(self, served: Served, path: str, body: dict[str, Any]) -> None:
        answers = [served.http.post(path, json=body | {"model": name}) for name in ("a", MODEL_NAMES[0])]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[0].json() == answers[1].json()

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", COMPLETION),
            ("/v1/messages", CHAT),
            ("/tokenize", {"prompt": "Hello!"}),
            ("/v1/cache/probe", CHAT),
        ],
    )
    def test_one_that_is_not_loaded_is_no_model(self, served: Served, path: str, body: dict[str, Any]) -> None:
        served.unload("a")
        answer = served.http.post(path, json=body | {"model": "a"})
        assert answer.status_code == 404
        assert "'a' does not exist" in answer.json()["error"]["message"]

    def test_one_that_is_unloaded_on_the_way_is_no_model(self, served: Served) -> None:
        error = RequestRefusedError(RequestError("invalid", "adapter: there is no 'a'", "adapter"))
        served.engine.script = fails_after([], error)
        answer = served.http.post("/v1/completions", json=COMPLETION | {"model": "a"})
        assert answer.status_code == 404
        assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("model", "model_not_found")
        assert answer.json()["error"]["message"] == "model: there is no 'a'"

    def test_probes_ask_for_it(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[EngineRequest] = []

        async def probe_cache(request: EngineRequest, **_: Any) -> CacheProbe:
            asked.append(request)
            return CacheProbe(0, 0, 0, {}, "not_found")

        monkeypatch.setattr(served.engine, "probe_cache", probe_cache, raising=False)
        answer = served.http.post("/v1/cache/probe", json=CHAT | {"model": "a"})
        assert (answer.json()["model"], [request.adapter for request in asked]) == ("a", ["a"])

    def test_probes_of_an_engine_that_is_about_to_get_it(self, served: Served) -> None:
        served.engine.loaded_adapters = {}
        answer = served.http.post("/v1/cache/probe", json=CHAT | {"model": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "adapter 'a'" in answer.json()["error"]["message"]


class TestModels:
    def test_have_adapters_with_what_they_change(self, served: Served) -> None:
        served.engine.tell("changed", adapter("team/a", "d1", "/adapters/a"), adapter("b", "d2", "/adapters/b"))
        *base, first, second = served.models()
        assert [card["id"] for card in base] == list(MODEL_NAMES)
        assert all("parent" not in card for card in base)
        assert first == {
            "id": "team/a",
            "created": int(LOADED_S),
            "max_model_len": 256,
            "object": "model",
            "owned_by": "foreword",
            "root": "/adapters/a",
            "parent": MODEL_NAMES[0],
        }
        assert second["id"] == "b"
        assert served.http.get("/v1/models/team/a").json() == first
        assert served.http.get("/v1/models/c").status_code == 404

    def test_are_themselves_whatever_adapters_are_called(self, served: Served) -> None:
        """An engine may have been started with any."""
        served.engine.tell("changed", adapter(MODEL_NAMES[1], "d1"))
        assert [card["id"] for card in served.models()] == list(MODEL_NAMES)
        served.http.post("/v1/completions", json=COMPLETION | {"model": MODEL_NAMES[1]})
        assert served.engine.requests[-1].adapter == ""

    def test_that_are_many_are_not_all_told_in_an_error(self, served: Served) -> None:
        served.engine.tell("changed", *(adapter(f"a{n}", "d1") for n in range(50)))
        message = served.http.post("/v1/completions", json=COMPLETION | {"model": "x"}).json()["error"]["message"]
        assert "'a17'" in message and "'a18'" not in message and "32 more" in message


def test_the_documentation_knows_them(served: Served) -> None:
    document = served.http.get("/openapi.json").json()
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        operation = document["paths"][path]["post"]
        assert set(operation["responses"]) >= {"200", "400", "401", "403", "404", "503"}
        assert "text/plain" in operation["responses"]["200"]["content"]


def test_metrics_do_not_grow_with_names_that_come_and_go(served: Served) -> None:
    def num_samples() -> int:
        lines = served.http.get("/metrics").text.splitlines()
        assert not any("passing" in line for line in lines)
        return sum(not line.startswith("#") for line in lines)

    served.http.post("/v1/completions", json=COMPLETION | {"model": "a"}).raise_for_status()
    before = num_samples()
    for n in range(20):
        name = f"passing-{n}"
        served.load(name).raise_for_status()
        served.http.post("/v1/completions", json=COMPLETION | {"model": name}).raise_for_status()
        served.unload(name).raise_for_status()
    assert num_samples() == before
