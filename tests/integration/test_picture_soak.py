"""Chats with pictures, too little room for them, and kills: in the end nothing is left, and no answer was wrong."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.frontend.picture_app import encoded, image, user
from tests.integration.served import Server, foreword_serve
from tests.integration.soaking import CHILDREN, LIVENESS_S, idle, replaced, working
from tests.tiny_vlms import make_tiny_vlm

CHAT = "/v1/chat/completions"
BLOCK_SIZE, NUM_BLOCKS = 16, 32
POOL_TOKENS = BLOCK_SIZE * NUM_BLOCKS
MAX_TOKENS = 12
BYTES_OF_A_ROW = 64 * 4
# Rounding may decide between two tokens nearer than this.
CLOSE_CALL = 1e-3

WORDS = "Which of the pictures shows a cat beside the red chair".split()
LARGEST = (64, 64)
PICTURES = [
    encoded(color, size, other_pixel=pixel)
    for color, size in (("red", LARGEST), ("navy", LARGEST), ("teal", (40, 24)), ("gray", (30, 50)))
    for pixel in (None, (7, 9))
]
BAD_PICTURES = [PICTURES[0][:-20], b"", b"<html>no picture</html>", "http://127.0.0.1/x.png", "file:///etc/passwd"]


class Room(NamedTuple):
    """What the largest picture takes of an engine: rows of its encoder, and a bit less than its inputs weigh."""

    num_rows: int
    input_bytes: int


ROOMS = {"qwen2_vl": Room(64, 64 << 10), "idefics3": Room(68, 32 << 10), "gemma3": Room(4, 2 << 10)}


def flags_for(room: Room) -> tuple[str, ...]:
    """The largest picture fills the encoder cache, and its inputs are held only while no others are."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    flags = {
        # The HTTP process must come back where it was.
        "--port": port,
        "--num-blocks": NUM_BLOCKS,
        "--max-num-seqs": 4,
        "--max-num-batched-tokens": 16,
        "--encoder-cache-bytes": room.num_rows * BYTES_OF_A_ROW,
        "--max-feature-input-bytes": room.input_bytes,
        "--mm-processor-cache-gb": 0.0001,
        "--scheduling-policy": "priority",
    }
    return tuple(str(part) for flag in flags.items() for part in flag)


def serve(model_dir: Path, *flags: str) -> Any:
    same = ("--served-model-name", "tiny", "--dtype", "float32", "--num-threads", "1", "--block-size", str(BLOCK_SIZE))
    return foreword_serve(model_dir, *same, *flags)


class Token(NamedTuple):
    """One token of a greedy answer; `lead`: how far its log-probability is before the next one's."""

    text: list[int]
    lead: float


@dataclass
class Load:
    """Workers that chat about pictures. `outcomes` counts how it went, `answers` has greedy ones by what was asked."""

    url: str
    rng: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    answers: dict[str, list[Token]] = field(default_factory=dict)

    def running(self) -> AbstractAsyncContextManager[None]:
        return working(self._work)

    async def _work(self, ending: asyncio.Event) -> None:
        kinds = [self._whole, self._whole, self._streamed, self._left_while_it_streams, self._left_early, self._bad]
        while not ending.is_set():
            async with httpx.AsyncClient(base_url=self.url, timeout=LIVENESS_S) as http:
                try:
                    outcome = await self.rng.choice(kinds)(http)
                except httpx.TransportError as error:
                    outcome = f"failed: {type(error).__name__}"
                self.outcomes[outcome] += 1
                if outcome.startswith("failed"):
                    await asyncio.sleep(0.1)

    async def _whole(self, http: httpx.AsyncClient) -> str:
        body = self._some_chat() | {"temperature": 0}
        response = await http.post(CHAT, json=body)
        if response.status_code != 200:
            return f"failed: {response.status_code}"
        tokens = tokens_of(response.json())
        # Whoever asked it before, and whatever became of the engine since.
        before = self.answers.setdefault(json.dumps(body | {"cache_salt": None, "priority": 0}), tokens)
        assert_same(tokens, before)
        return "whole"

    async def _streamed(self, http: httpx.AsyncClient) -> str:
        async with http.stream("POST", CHAT, json=self._some_chat() | {"stream": True}) as response:
            if response.status_code != 200:
                return f"failed: {response.status_code}"
            *_, last = [line async for line in response.aiter_lines() if line]
            return "streamed" if last == "data: [DONE]" else f"failed: {last}"

    async def _left_while_it_streams(self, http: httpx.AsyncClient) -> str:
        async with http.stream("POST", CHAT, json=self._some_chat() | {"stream": True}) as response:
            if response.status_code != 200:
                return f"failed: {response.status_code}"
            async for _ in response.aiter_lines():
                if self.rng.random() < 0.2:
                    break
        return "left"

    async def _left_early(self, http: httpx.AsyncClient) -> str:
        """Before anything has come: while pictures are decoded, awaited, encoded or computed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.rng.random() * 0.2):
                await http.post(CHAT, json=self._some_chat())
        return "left"

    async def _bad(self, http: httpx.AsyncClient) -> str:
        """A good picture and a bad one."""
        pictures = [image(self.rng.choice(PICTURES)), image(self.rng.choice(BAD_PICTURES))]
        response = await http.post(CHAT, json=self._some_chat() | {"messages": [user("a ", *pictures)]})
        if response.status_code != 400:
            return f"failed: {response.status_code}"
        assert "messages[0].content[2]" in response.json()["error"]["message"]
        return "refused"

    def _some_chat(self) -> dict[str, Any]:
        """One of not so many that none comes twice."""
        rng = self.rng
        subjects = rng.sample(PICTURES, rng.choice((0, 1, 1, 2)))
        num_turns = rng.randint(1, 3)
        messages: list[dict[str, Any]] = []
        for turn in range(num_turns):
            words = " ".join(WORDS[: rng.choice((3, 6))])
            shown = subjects if turn == 0 else rng.sample(subjects, min(len(subjects), rng.choice((0, 0, 1))))
            parts = [part for picture in shown[: 1 + (turn == 0)] for part in (image(picture), " and ")]
            messages += [user(*parts, words), {"role": "assistant", "content": " ".join(WORDS[:2])}]
        body: dict[str, Any] = {
            "messages": messages[:-1],
            "max_tokens": MAX_TOKENS,
            "temperature": 1,
            "logprobs": True,
            "top_logprobs": 2,
            "priority": rng.randint(-1, 1),
            "n": rng.choice((1, 1, 1, 2)),
        }
        if rng.random() < 0.5:
            body["cache_salt"] = rng.choice(("a", "b"))
        return body


def tokens_of(answer: dict[str, Any]) -> list[Token]:
    tokens = []
    for token in answer["choices"][0]["logprobs"]["content"]:
        first, second = (top["logprob"] for top in token["top_logprobs"])
        tokens.append(Token(token["bytes"], first - second))
    return tokens


def assert_same(tokens: list[Token], reference: list[Token]) -> None:
    """As far as rounding did not decide."""
    for token, expected in zip(tokens, reference, strict=False):
        if expected.lead < CLOSE_CALL:
            return
        assert token.text == expected.text
    assert len(tokens) == len(reference)


async def nothing_is_held(server: Server) -> None:
    """A picture that needs all of the encoder cache, and all the room for inputs there is, is answered."""
    await idle(server, POOL_TOKENS)
    async with httpx.AsyncClient(base_url=server.url, timeout=LIVENESS_S) as http:
        messages = [user(image(encoded("olive", LARGEST)), "what is it?")]
        answer = await http.post(CHAT, json={"messages": messages, "max_tokens": 2, "cache_salt": "at last"})
        assert answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ROOMS)
async def test_nothing_is_left_and_nothing_is_wrong_after_chats_with_kills(family: str, tmp_path: Path) -> None:
    model_dir = make_tiny_vlm(family, tmp_path / family)
    with serve(model_dir, *flags_for(ROOMS[family])) as server:
        load = Load(server.url, random.Random(0))
        async with load.running():
            for n in range(6):
                await asyncio.sleep(4)
                await replaced(server, CHILDREN[n % 2])
        await nothing_is_held(server)
        load.outcomes.clear()
        async with load.running():
            await asyncio.sleep(20)
        await nothing_is_held(server)
        # Nobody killed anything: nothing failed.
        assert set(load.outcomes) == {"whole", "streamed", "left", "refused"}
        assert min(load.outcomes.values()) > 10
    assert len(load.answers) > 50
    with serve(model_dir, "--num-blocks", str(NUM_BLOCKS)) as fresh:
        async with httpx.AsyncClient(base_url=fresh.url, timeout=LIVENESS_S) as http:
            for asked, tokens in load.answers.items():
                response = await http.post(CHAT, content=asked)
                assert_same(tokens, tokens_of(response.raise_for_status().json()))
