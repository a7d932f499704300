"""What a newcomer does first: `foreword serve` without a model, the line it says to paste, the README's chat."""

from __future__ import annotations

import base64
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine_core import DEFAULT_MODEL
from tests.integration.served import Server, foreword_serve
from tests.wire_peers import ROOT


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with foreword_serve(None, "--num-threads", "1", "--num-blocks", "256") as server:
        yield server


def answer(server: Server, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()


def test_the_default_is_served(server: Server) -> None:
    models = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert [model["id"] for model in models] == [DEFAULT_MODEL]


def test_the_command_to_paste_is_answered(server: Server) -> None:
    [command] = [line for line in server.announced.splitlines() if "--image" in line]
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert re.fullmatch(r"A .+ on a white background\.\n", result.stdout), result.stdout


def test_the_readmes_chat_goes_as_it_says(server: Server) -> None:
    chat = re.search(r"foreword chat --image (\S+) --temperature 0\n((?:> .+\n.+\n\d+ prompt.+\n)+)", readme())
    assert chat is not None
    httpx.post(f"{server.url}/reset_prefix_cache").raise_for_status()
    picture = base64.b64encode((ROOT / chat[1]).read_bytes()).decode()
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}]
    messages: list[dict[str, Any]] = []
    for question, told, cost in re.findall(r"> (.+)\n(.+)\n(.+)\n", chat[2]):
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": question}]})
        parts = []
        reply = answer(server, messages)
        messages.append(reply["choices"][0]["message"])
        assert messages[-1]["content"] == told
        usage = reply["usage"]
        tokens = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
        said = re.match(r"(\d+) prompt tokens: (\d+) cached .* · (\d+) generated", cost)
        assert said is not None and tuple(map(int, said.groups())) == tokens
    assert len(messages) > 4


def test_the_readmes_pictures_are_there() -> None:
    shown = re.findall(r'src="(docs/pictures/[^"]+)"', readme())
    assert len(shown) == 3
    assert sorted(shown) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "pictures").iterdir())


def readme() -> str:
    return (ROOT / "README.md").read_text()
