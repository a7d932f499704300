"""`foreword serve` with a model that sees: pictures go all the way, and each is worked on once."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.frontend.picture_app import encoded, image, user
from tests.integration.served import Server, foreword_serve
from tests.tiny_vlms import make_tiny_vlm

RED, NOISE = encoded("red", (48, 48)), encoded("navy", (48, 48), other_pixel=(20, 20))
FIELDS: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
# The template's own, the same before every picture.
TOKENS_BEFORE_PICTURES = 4
NUM_TIMED = 11
FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--num-threads", "1", "--num-blocks", "256")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model_dir = make_tiny_vlm("qwen2_vl", tmp_path_factory.mktemp("models") / "qwen2_vl")
    with foreword_serve(model_dir, *FLAGS, "--limit-mm-per-prompt", "image=3") as server:
        yield server


def metrics(server: Server) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    values = [line.rpartition(" ") for line in lines if line.startswith("foreword:")]
    return {name.partition("{")[0].removeprefix("foreword:"): float(value) for name, _, value in values}


def test_each_picture_is_worked_on_once(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)

    def ask(*messages: Any) -> tuple[str, Any]:
        answer = client.chat.completions.create(messages=list(messages), **FIELDS)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return str(answer.choices[0].message.content), answer.usage

    red, first = ask(user(image(RED), "what is this?"))
    assert (first.prompt_tokens_details.cached_tokens, first.prompt_tokens_details.image_tokens) == (0, 36)
    navy, other = ask(user(image(NOISE), "what is this?"))
    assert other.prompt_tokens_details.cached_tokens == TOKENS_BEFORE_PICTURES
    assert navy != red
    once_more, again = ask(user(image(RED), "what is this?"))
    assert once_more == red
    assert again.prompt_tokens_details.cached_tokens == again.prompt_tokens - 1
    # In another place of another prompt: computed again, but not looked at again.
    ask(user("Both: ", image(NOISE), image(RED)))
    counted = metrics(server)
    assert counted["encoder_calls_total"] == 2
    assert counted["mm_processor_calls_total"] == counted["mm_inputs_sent_total"] == counted["mm_decodes_total"] == 2
    assert counted["mm_file_queries_total"] == 5
    assert counted["prompt_image_tokens_total"] == 5 * 36
    # float32, [patches of a picture, channels × time × patch]
    assert counted["mm_input_bytes_sent_total"] == 2 * (144 * 3 * 2 * 4 * 4 * 4 + 3 * 8)


def counts(server: Server) -> dict[str, float]:
    """Everything that was done to pictures, by whatever stage, and for how many."""
    return {
        name: value
        for name, value in metrics(server).items()
        if name.startswith(("mm_", "encoder_")) and name.endswith("_total")
    }


def ask_for_one_token(server: Server, content: bytes, salt: str | None, said: str = "what is this?") -> dict[str, Any]:
    """The usage."""
    body = {"messages": [user(image(content), said)], "max_tokens": 1, "cache_salt": salt}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    return answer.raise_for_status().json()["usage"]  # type: ignore[no-any-return]


def test_what_another_tenant_sent_is_worked_on_as_if_it_were_new(server: Server) -> None:
    def cost(content: bytes, salt: str | None, said: str = "what is this?") -> dict[str, float]:
        before = counts(server)
        usage = ask_for_one_token(server, content, salt, said)
        after = counts(server)
        return {name: after[name] - before[name] for name in after} | usage["prompt_tokens_details"]

    seen, unseen = (encoded(color, (64, 48)) for color in ("olive", "teal"))
    for salt, color in {"a": "red", "b": "green", None: "blue", "A": "white"}.items():
        ask_for_one_token(server, encoded(color, (56, 40)), salt)
    new = cost(seen, "a")
    assert new["cached_tokens"] == TOKENS_BEFORE_PICTURES
    stages = ("mm_decodes_total", "mm_processor_calls_total", "mm_inputs_sent_total", "encoder_calls_total")
    assert [new[stage] for stage in stages] == [1, 1, 1, 1]
    assert [new[f"{name}_hits_total"] for name in ("mm_file", "mm_cache", "encoder_cache")] == [0, 0, 0]
    assert cost(unseen, "a") == new
    for salt in ("b", None, "A"):
        assert cost(seen, salt) == new
    # To the tenant itself it is not new, also where the KV cache does not help.
    for said in ("what is this?", "And this: "):
        again = cost(seen, "a", said)
        assert [again[stage] for stage in stages] == [0, 0, 0, 0]
        assert again["mm_file_hits_total"] == 1


def test_what_another_tenant_sent_comes_no_faster_than_what_is_new(server: Server) -> None:
    """Pictures so large that it shows. Every question is asked by turns, so what slows one down slows down all."""
    rng = random.Random(0)
    colors = [rng.randbytes(3) for _ in range(2 * NUM_TIMED + 2)]
    pictures = [encoded(tuple(color), (1400, 1400)) for color in colors]
    took_s: dict[str, list[float]] = {"new": [], "a stranger's": [], "one's own": []}
    for n in range(NUM_TIMED + 1):
        seen, unseen = pictures[2 * n : 2 * n + 2]
        ask_for_one_token(server, seen, "first")
        # Tenants of whom the server knows nothing, not even a size.
        asking: list[tuple[str, Callable[[], object]]] = [
            ("new", partial(ask_for_one_token, server, unseen, f"new {n}")),
            ("a stranger's", partial(ask_for_one_token, server, seen, f"strange {n}")),
            ("one's own", partial(ask_for_one_token, server, seen, "first")),
        ]
        rng.shuffle(asking)
        for whose, ask in asking:
            started_s = time.perf_counter()
            ask()
            if n:  # the first round warms up
                took_s[whose].append(time.perf_counter() - started_s)
    median_s = {whose: statistics.median(times_s) for whose, times_s in took_s.items()}
    # That it would show: what is skipped for a tenant's own is most of the time.
    assert median_s["one's own"] < 0.6 * median_s["new"], median_s
    assert median_s["a stranger's"] > 0.8 * median_s["new"], median_s


def test_the_http_process_has_no_torch(server: Server) -> None:
    libraries = {Path(mapping.path).name for mapping in server.child("frontend.http_process").memory_maps()}
    assert not any("torch" in name for name in libraries)


def test_a_chat_in_a_terminal(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "red.png"
    file.write_bytes(RED)
    command = [sys.executable, "-c", "from frontend.cli import main; main()", "chat", "--url", server.url]
    asked = subprocess.run(
        [*command, "--image", str(file), "--image", str(file), "--max-tokens", "4"],
        input="what are these?",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "(72 of pictures)" in asked.stderr
    gone = [*command, "--image", str(tmp_path / "gone.png")]
    refused = subprocess.run(gone, capture_output=True, text=True, check=False)
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    assert refused.stderr.startswith("foreword: --image: cannot read ")
