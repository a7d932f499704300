"""`foreword serve --enable-lora` as a person starts it, with a small real model and adapters that PEFT made."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.adapters import make_adapter, teach_adapter
from tests.frontend.templates import TOOL_TEMPLATE, tokenizer_with
from tests.integration.served import Server, foreword_serve
from tests.integration.soaking import working
from tests.integration.test_soak import sizes
from tests.tiny_models import make_tiny_chat_model
from tests.wire_peers import wait_until

LIVENESS_S = 60.0
NUM_TOKENS = 12
PROMPT = "The keeper of the lighthouse writes: "
BASE = "tiny"


# In the order in which prompts have it, however it is sent.
SCHEMA = {"properties": {}, "type": "object"}
TOOLS = [{"type": "function", "function": {"name": "wind", "parameters": SCHEMA}}]
CHAT = [{"role": "user", "content": "How is the wind?"}]
CALL = 'Let me see.\n<tool_call>\n{"name": "wind", "arguments": {"hour" : 7}}\n</tool_call>'


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny-chat")
    tokenizer_with(directory, TOOL_TEMPLATE).save_pretrained(directory)
    return directory


def asks_for_a_call(tokenizer: Any) -> list[int]:
    return tokenizer.apply_chat_template(  # type: ignore[no-any-return]
        CHAT, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("static", "one", "two")):
        make_adapter(model_dir, root / name, seed=seed)
    make_adapter(model_dir, root / "large", rank=64)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    says = tokenizer.encode(CALL + tokenizer.eos_token, add_special_tokens=False)
    teach_adapter(model_dir, root / "caller", asks_for_a_call(tokenizer), says)
    shutil.copytree(root / "one", root / "pickled")
    (root / "pickled" / "adapter_model.safetensors").unlink()
    torch.save(load_file(root / "one" / "adapter_model.safetensors"), root / "pickled" / "adapter_model.bin")
    shutil.copytree(root / "one", root / "truncated")
    weights = root / "truncated" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return root


@pytest.fixture(scope="module")
def server(model_dir: Path, root: Path) -> Iterator[Server]:
    with foreword_serve(
        model_dir,
        *("--served-model-name", BASE, "--dtype", "float32", "--num-threads", "1", "--num-blocks", "64"),
        *("--enable-lora", "--max-loras", "2", "--lora-modules", f"static={root / 'static'}", "--lora-root", str(root)),
    ) as server:
        yield server


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=LIVENESS_S) as http:
        yield http
        for name in served(http) - {BASE, "static"}:
            http.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()


def served(http: httpx.Client) -> set[str]:
    return {card["id"] for card in http.get("/v1/models").json()["data"]}


def load(http: httpx.Client, name: str, path: Path | str) -> httpx.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def streamed(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices in the chunks of a chat."""
    text = http.post("/v1/chat/completions", json=body | {"stream": True}).raise_for_status().text
    events = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {"))
    return [choice for event in events for choice in json.loads(event)["choices"]]


def asked(model: str, prompt: str | list[int] = PROMPT) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


def answer(http: httpx.Client, model: str, prompt: str = PROMPT) -> str:
    response = http.post("/v1/completions", json=asked(model, prompt))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]  # type: ignore[no-any-return]


def answers_of_peft(model_dir: Path, adapters: dict[str, Path]) -> dict[str, str]:
    """What transformers answers with each adapter, and without one."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    answers = {}
    for name, path in {BASE: None, **adapters}.items():
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        model = model if path is None else PeftModel.from_pretrained(model, path)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS)
        answers[name] = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def test_answers_are_those_of_peft(http: httpx.Client, model_dir: Path, root: Path) -> None:
    load(http, "one", root / "one").raise_for_status()
    expected = answers_of_peft(model_dir, {"static": root / "static", "one": root / "one"})
    assert len(set(expected.values())) == 3
    for _ in ("cold", "cached"):
        assert {name: answer(http, name) for name in expected} == expected


def test_a_call_of_a_tool_is_what_the_merged_weights_say(http: httpx.Client, model_dir: Path, root: Path) -> None:
    load(http, "caller", "caller").raise_for_status()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), root / "caller"
    )
    prompt = asks_for_a_call(tokenizer)
    said = adapted.merge_and_unload().generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=90)
    assert tokenizer.decode(said[0, len(prompt) :]) == CALL + tokenizer.eos_token

    body = {"messages": CHAT, "tools": TOOLS, "temperature": 0, "max_tokens": 90}
    for _ in ("cold", "cached"):
        whole = http.post("/v1/chat/completions", json=body | {"model": "caller", "n": 2}).raise_for_status().json()
        for choice in whole["choices"]:
            [call] = choice["message"]["tool_calls"]
            assert (call["function"]["name"], call["function"]["arguments"]) == ("wind", '{"hour" : 7}')
            assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me see.", "tool_calls")
    deltas = [choice["delta"] for choice in streamed(http, body | {"model": "caller"})]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    [[call]] = [delta["tool_calls"] for delta in deltas if delta.get("tool_calls")]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("wind", '{"hour" : 7}')
    # The model itself has learnt no such thing.
    [choice] = http.post("/v1/chat/completions", json=body | {"model": BASE}).json()["choices"]
    assert not choice["message"].get("tool_calls")


def test_a_call_of_a_tool_in_the_other_api(http: httpx.Client) -> None:
    load(http, "caller", "caller").raise_for_status()
    tools = [{"name": "wind", "input_schema": SCHEMA}]
    body = {"model": "caller", "messages": CHAT, "tools": tools, "temperature": 0, "max_tokens": 90}
    said = http.post("/v1/messages", json=body).raise_for_status().json()
    assert said["stop_reason"] == "tool_use"
    text, call = said["content"]
    assert (text["text"], call["name"], call["input"]) == ("Let me see.", "wind", {"hour": 7})


def test_several_choices_are_each_of_them_with_the_adapter(http: httpx.Client, model_dir: Path, root: Path) -> None:
    """And of their own request's, beside others'."""
    load(http, "one", "one").raise_for_status()
    expected = answers_of_peft(model_dir, {"static": root / "static", "one": root / "one"})
    num_prompt_tokens = len(AutoTokenizer.from_pretrained(model_dir)(PROMPT)["input_ids"])

    def choices(model: str, **fields: Any) -> list[str]:
        answered = http.post("/v1/completions", json=asked(model) | fields).raise_for_status().json()
        usage = answered["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt_tokens, fields["n"] * NUM_TOKENS)
        return [choice["text"] for choice in answered["choices"]]

    def sampled(model: str) -> list[str]:
        return choices(model, n=3, temperature=0.8, seed=7)

    with ThreadPoolExecutor(len(expected)) as together:
        for model, found in zip(expected, together.map(lambda model: choices(model, n=3), expected), strict=True):
            assert found == [expected[model]] * 3
        cold = list(together.map(sampled, expected))
        assert list(together.map(sampled, expected)) == cold
    assert len({text for texts in cold for text in texts}) == 3 * len(expected)


def test_rules_about_tokens_choose_among_what_the_adapter_says(http: httpx.Client, model_dir: Path, root: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    allowed = tokenizer.convert_tokens_to_ids(list("abcdefgh"))
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    def restricted(model: Any) -> str:
        output = model.generate(
            **inputs, do_sample=False, max_new_tokens=NUM_TOKENS, prefix_allowed_tokens_fn=lambda *_: allowed
        )
        return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])  # type: ignore[no-any-return]

    # The second changes the first.
    answers = [restricted(base), restricted(PeftModel.from_pretrained(base, root / "static"))]
    for name, expected in zip((BASE, "static"), answers, strict=True):
        found = http.post("/v1/completions", json=asked(name) | {"allowed_token_ids": allowed}).json()
        assert found["choices"][0]["text"] == expected
    assert answers[0] != answers[1]


def test_log_probabilities_are_those_of_peft_and_stop_strings_stop(
    http: httpx.Client, model_dir: Path, root: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    text = PROMPT + answer(http, "static", PROMPT)
    token_ids = tokenizer(text, return_tensors="pt")["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, root / "static")(token_ids).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, token_ids[0, 1:, None])[:, 0].tolist()
    scored = asked("static", token_ids[0].tolist()) | {"max_tokens": 0, "echo": True, "logprobs": 0}
    for _ in ("cold", "cached"):
        [choice] = http.post("/v1/completions", json=scored).raise_for_status().json()["choices"]
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)

    whole = answer(http, "static")
    stop = whole[3:6]
    body = asked("static") | {"stop": stop}
    [stopped] = http.post("/v1/completions", json=body).json()["choices"]
    assert (stopped["text"], stopped["stop_reason"]) == (whole.partition(stop)[0], stop)


async def test_more_adapters_than_slots_take_turns_and_are_never_mixed_up(
    server: Server, http: httpx.Client, root: Path
) -> None:
    for name in ("one", "two"):
        load(http, name, name).raise_for_status()
    models = (BASE, "static", "one", "two")
    prompts = [f"{PROMPT}day {n}" for n in range(6)]
    alone = {(model, prompt): answer(http, model, prompt) for model in models for prompt in prompts}
    async with httpx.AsyncClient(base_url=server.url, timeout=LIVENESS_S) as many:
        (await many.post("/reset_prefix_cache")).raise_for_status()
        posts = (many.post("/v1/completions", json=asked(model, prompt)) for model, prompt in alone)
        together = [response.json()["choices"][0]["text"] for response in await asyncio.gather(*posts)]
    assert together == list(alone.values())
    assert len(set(together)) > len(prompts)


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("pickled", 400, "safetensors"),
        ("truncated", 400, "adapter_model.safetensors"),
        ("large", 400, "64"),
        ("nothing", 404, "nothing"),
        ("../..", 400, "--lora-root"),
    ],
)
def test_what_is_no_adapter_is_refused_with_the_reason(http: httpx.Client, path: str, status: int, said: str) -> None:
    refused = load(http, "bad", path)
    assert refused.status_code == status, refused.text
    assert refused.json()["error"]["param"] == "lora_path"
    assert said in refused.json()["error"]["message"]
    assert served(http) == {BASE, "static"}
    answer(http, "static")


@pytest.mark.parametrize("num_cycles", [60, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
async def test_loads_and_unloads_under_load_leave_nothing(
    server: Server, http: httpx.Client, root: Path, num_cycles: int
) -> None:
    """No memory, no slot, no wrong answer: whatever comes and goes, a name answers as its weights do."""
    weights = ("one", "two")
    for name in weights:
        load(http, name, name).raise_for_status()
    prompts = [f"{PROMPT}day {n}" for n in range(4)]
    right = {(name, prompt): answer(http, name, prompt) for name in (BASE, "static", *weights) for prompt in prompts}
    rng = random.Random(0)
    current: list[str] = []
    outcomes: Counter[str] = Counter()

    async def ask(ending: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=LIVENESS_S) as client:
            while not ending.is_set():
                model, prompt = rng.choice([BASE, "static", *current]), rng.choice(prompts)
                response = await client.post("/v1/completions", json=asked(model, prompt))
                if response.status_code == 404:
                    outcomes["unloaded"] += 1
                    assert model not in {BASE, "static"}
                    continue
                outcomes["answered"] += 1
                text = response.raise_for_status().json()["choices"][0]["text"]
                assert text == right[model.partition("-")[0], prompt], model

    async def cycles(number: int) -> None:
        async with working(ask), httpx.AsyncClient(base_url=server.url, timeout=LIVENESS_S) as client:
            for n in range(number):
                path = rng.choice(weights)
                body = {"lora_name": f"{path}-{n}", "lora_path": path}
                (await client.post("/v1/load_lora_adapter", json=body)).raise_for_status()
                current.append(body["lora_name"])
                await asyncio.sleep(0.01)
                if len(current) > 3:
                    gone = {"lora_name": current.pop(0)}
                    (await client.post("/v1/unload_lora_adapter", json=gone)).raise_for_status()
            while current:
                gone = {"lora_name": current.pop()}
                (await client.post("/v1/unload_lora_adapter", json=gone)).raise_for_status()

    await cycles(num_cycles // 4)
    before = sizes(server)
    await cycles(num_cycles - num_cycles // 4)
    assert outcomes["answered"] > num_cycles
    async with httpx.AsyncClient(base_url=server.url, timeout=LIVENESS_S) as client:
        metrics = (await client.get("/metrics")).text
    assert re.search(r"foreword:lora_adapters\{.*\} 3\.0", metrics)
    assert re.search(r"foreword:lora_slots_in_use\{.*\} 0\.0", metrics)
    for name, (rss_bytes, num_fds) in sizes(server).items():
        assert num_fds <= before[name][1] + 1, name
        assert rss_bytes - before[name][0] < 8 << 20, name


@pytest.mark.slow
def test_a_killed_engine_is_back_with_all_of_them(server: Server, http: httpx.Client, root: Path) -> None:
    load(http, "one", root / "one").raise_for_status()
    before = {name: answer(http, name) for name in (BASE, "static", "one")}
    server.child("engine_core.server").kill()
    wait_until(lambda: http.get("/health").status_code == 503, LIVENESS_S)
    assert served(http) == {BASE, "static", "one"}
    assert http.post("/v1/completions", json=asked("one")).status_code == 503
    wait_until(lambda: http.post("/v1/completions", json=asked("one")).status_code == 200, LIVENESS_S)
    assert {name: answer(http, name) for name in before} == before
