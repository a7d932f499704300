"""Adapters in real engines, over real sockets and HTTP: shared by frontends, routed, and there again after a death."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_adapters import write_fake_adapter
from tests.frontend.http_stack import MODEL_NAME, Stack, http_stack
from tests.wire_peers import wait_until

PROMPT = [5] * 40


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for name in ("one", "two", "static"):
        write_fake_adapter(root / name, f"weights of {name}")
    return root


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, chat_model_dir: Path, root: Path) -> Iterator[Stack]:
    config = {
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 3,
        "lora_root": str(root),
        "lora_modules": [{"name": "static", "path": str(root / "static")}],
    }
    options = ("--adapter-slots", "2", "--config", json.dumps(config))
    with http_stack(tmp_path_factory.mktemp("s"), chat_model_dir, *options) as stack:
        yield stack


@pytest.fixture
def stack(running: Stack) -> Iterator[Stack]:
    """With nothing cached, and the adapter `static` only."""
    running.http.post("/reset_prefix_cache").raise_for_status()
    yield running
    for name in adapters(running) - {"static"}:
        unload(running, name)


def adapters(stack: Stack) -> set[str]:
    return {card["id"] for card in stack.http.get("/v1/models").json()["data"]} - {MODEL_NAME}


def load(stack: Stack, name: str, path: str | Path, **fields: Any) -> httpx.Response:
    return stack.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})


def unload(stack: Stack, name: str) -> None:
    stack.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()


def cached_tokens(stack: Stack, model: str, prompt: list[int] = PROMPT) -> int:
    answer = stack.complete(prompt, 1, model=model)
    assert answer["model"] == model
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[no-any-return]


def output(stack: Stack, model: str) -> str:
    return stack.complete(PROMPT, 6, model=model)["choices"][0]["text"]  # type: ignore[no-any-return]


def test_each_has_its_answers_and_its_cache(stack: Stack) -> None:
    load(stack, "one", "one").raise_for_status()
    models = (MODEL_NAME, "static", "one")
    assert [cached_tokens(stack, model) for model in models] == [0, 0, 0]
    assert [cached_tokens(stack, model) for model in models] == [len(PROMPT) - 1] * 3
    assert len({output(stack, model) for model in models}) == 3


def test_a_name_is_nothing_and_weights_are_everything(stack: Stack, root: Path) -> None:
    load(stack, "a", root / "one").raise_for_status()
    first = output(stack, "a")
    unload(stack, "a")
    load(stack, "a", root / "two").raise_for_status()
    assert cached_tokens(stack, "a") == 0
    assert output(stack, "a") != first
    load(stack, "b", root / "one").raise_for_status()
    assert cached_tokens(stack, "b") == len(PROMPT) - 1
    assert output(stack, "b") == first


def test_no_salt_is_an_adapter(stack: Stack, root: Path) -> None:
    load(stack, "one", root / "one").raise_for_status()
    cached_tokens(stack, "one")
    for salt in ("one", "lora"):
        answer = stack.complete(PROMPT, 1, cache_salt=salt)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    load(stack, "lora", root / "two").raise_for_status()
    assert cached_tokens(stack, "lora") == 0


def test_an_explanation_says_that_only_the_adapter_is_another(stack: Stack) -> None:
    prompt = [6] * 40  # never cached before
    cached_tokens(stack, "static", prompt)
    body = {"prompt": prompt, "model": MODEL_NAME}
    answer = stack.http.post("/v1/cache/explain", json=body).json()
    assert (answer["component"], answer["hit_tokens"]) == ("lora", 0)
    assert answer["explanation"] == (
        "0 of 40 tokens are cached for 'tiny'; for 'static' 39 are, which were computed with other weights."
    )
    assert (answer["other_model"], answer["other_model_hit_tokens"]) == ("static", len(PROMPT) - 1)
    assert "send the same model" in answer["advice"]
    nowhere = stack.http.post("/v1/cache/explain", json=body | {"prompt": [7] * 40}).json()
    assert (nowhere["component"], nowhere["other_model"]) == ("never_stored", None)
    probe = stack.http.post("/v1/cache/probe", json=body | {"model": "static"}).json()
    assert (probe["model"], probe["hit_tokens"]) == ("static", len(PROMPT) - 1)


@pytest.mark.parametrize(
    ("name", "path", "status", "code", "said"),
    [
        ("x", "none", 404, "path_not_found", "none is no directory"),
        ("x", "../elsewhere", 400, "outside_lora_root", "--lora-root"),
        ("x", "/etc", 400, "outside_lora_root", "--lora-root"),
        ("x", "a\0b", 404, "path_not_found", "NUL"),
        ("x" * 257, "one", 400, "invalid_name", "1 to 256 printable characters"),
        ("x\n", "one", 400, "invalid_name", "printable"),
        ("static", "one", 400, "name_taken", "load_inplace"),
    ],
)
def test_refusals_name_the_reason(stack: Stack, name: str, path: str, status: int, code: str, said: str) -> None:
    answer = load(stack, name, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert said in error["message"]
    assert adapters(stack) == {"static"}


def test_more_than_there_may_be_are_refused(stack: Stack) -> None:
    for name in ("a", "b"):
        load(stack, name, "one").raise_for_status()
    error = load(stack, "c", "one").json()["error"]
    assert (error["code"], error["param"]) == ("too_many_adapters", "lora_name")
    assert "3 adapters are loaded, at most 3" in error["message"] and "--max-cpu-loras" in error["message"]


async def test_requests_run_on_when_their_adapter_is_unloaded(stack: Stack) -> None:
    load(stack, "one", "one").raise_for_status()
    undisturbed = stack.complete(PROMPT, 2000, model="one")["choices"]
    body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "temperature": 0, "model": "one"}
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        going_on = asyncio.create_task(http.post("/v1/completions", json=body))
        while not stack.scrape()("num_requests_running"):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        unload(stack, "one")
        assert (await http.post("/v1/completions", json=body)).status_code == 404
        assert (await going_on).json()["choices"] == undisturbed


def test_metrics_and_the_log_tell_of_them(stack: Stack) -> None:
    before = stack.scrape()
    load(stack, "one", "one").raise_for_status()
    stack.complete(PROMPT, 1, model="one")
    after = stack.scrape()
    assert [after(f"lora_{name}") for name in ("adapters", "slots", "slots_in_use")] == [2, 2, 0]
    assert after("lora_adapter_bytes") == len("weights of static") + len("weights of one")
    assert after("lora_placements_total") >= before("lora_placements_total")
    assert after("lora_slot_waits_total") == before("lora_slot_waits_total")
    assert stack.log_lines("request_finished")[-1]["adapter"] == "one"
    assert stack.log_lines("adapter_loaded")[-1]["name"] == "one"


def test_an_engine_that_was_killed_has_them_again(stack: Stack, root: Path) -> None:
    """Those of its own at once, the others from who knows them; and never other weights."""
    write_fake_adapter(root / "changing", "before")
    load(stack, "one", "one").raise_for_status()
    load(stack, "changing", "changing").raise_for_status()
    expected = {name: output(stack, name) for name in ("static", "one", "changing")}
    stack.kill_engine()
    wait_until(lambda: stack.http.get("/health").status_code == 503)
    assert adapters(stack) == {"static", "one", "changing"}
    answer = stack.http.post("/v1/completions", json={"prompt": PROMPT, "model": "one"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    write_fake_adapter(root / "changing", "after")
    stack.start_engine()
    stack.wait_ready()
    wait_until(lambda: adapters(stack) == {"static", "one"})
    assert {name: output(stack, name) for name in ("static", "one")} == {
        name: expected[name] for name in ("static", "one")
    }
    (line,) = stack.log_lines("adapter_not_restored")
    assert line["name"] == "changing" and "digest" in line["reason"]
    assert stack.http.post("/v1/completions", json={"prompt": PROMPT, "model": "changing"}).status_code == 404
