"""`foreword serve` with a model that sees: pictures go all the way, and each is worked on once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
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
        return str(answer.choices[0].message.content), answer.usage.prompt_tokens_details

    red, first = ask(user(image(RED), "what is this?"))
    assert (first.cached_tokens, first.image_tokens) == (0, 36)
    navy, other = ask(user(image(NOISE), "what is this?"))
    assert other.cached_tokens == 0
    assert navy != red
    once_more, again = ask(user(image(RED), "what is this?"))
    assert once_more == red
    assert again.cached_tokens >= 32
    # In another place of another prompt: computed again, but not looked at again.
    ask(user("Both: ", image(NOISE), image(RED)))
    counted = metrics(server)
    assert counted["encoder_calls_total"] == 2
    assert counted["mm_processor_calls_total"] == counted["mm_inputs_sent_total"] == counted["mm_decodes_total"] == 2
    assert counted["mm_file_queries_total"] == 5
    assert counted["prompt_image_tokens_total"] == 5 * 36
    # float32, [patches of a picture, channels × time × patch]
    assert counted["mm_input_bytes_sent_total"] == 2 * (144 * 3 * 2 * 4 * 4 * 4 + 3 * 8)


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
