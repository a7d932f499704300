"""Mixed load for a while, with kills: afterwards nothing is left behind, and memory and open files have not grown."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.served import Server, foreword_serve
from tests.integration.soaking import CHILDREN, LIVENESS_S, idle, replaced, working
from tests.tiny_models import make_tiny_chat_model

BLOCK_SIZE, NUM_BLOCKS = 16, 32
POOL_TOKENS = BLOCK_SIZE * NUM_BLOCKS
MAX_TOKENS = 40
# Of requests that nobody's death has ended.
OUTCOMES = {"whole", "streamed", "left"}

WORDS = "The lighthouse keeper wrote down every ship that passed and read the older pages aloud".split()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    flags = {
        # The HTTP process must come back where it was.
        "--port": str(port),
        "--served-model-name": "tiny",
        "--dtype": "float32",
        "--num-threads": "1",
        "--block-size": str(BLOCK_SIZE),
        "--num-blocks": str(NUM_BLOCKS),
        "--max-num-seqs": "4",
        # Libraries keep code and buffers for each size of batch they have met: let there be few.
        "--max-num-batched-tokens": "16",
        "--scheduling-policy": "priority",
    }
    model_dir = make_tiny_chat_model(tmp_path / "tiny-chat")
    with foreword_serve(model_dir, *(part for flag in flags.items() for part in flag)) as server:
        yield server


@dataclass
class Load:
    """Workers that ask for this and that. `outcomes` counts how it went; only failures name a reason."""

    url: str
    rng: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)

    def running(self) -> AbstractAsyncContextManager[None]:
        return working(self._work)

    async def at_least(self, number: int, *outcomes: str) -> None:
        """Return when there are so many of each of these, while it is running."""
        async with asyncio.timeout(LIVENESS_S):
            while any(self.outcomes[outcome] < number for outcome in outcomes):  # noqa: ASYNC110 - workers count
                await asyncio.sleep(0.05)

    async def _work(self, ending: asyncio.Event) -> None:
        kinds = [self._whole, self._streamed, self._left_while_it_streams, self._left_before_it_is_answered]
        while not ending.is_set():
            # A client of its own for each: connections must not be left behind either.
            async with httpx.AsyncClient(base_url=self.url, timeout=LIVENESS_S) as http:
                try:
                    self.outcomes[await self.rng.choice(kinds)(http)] += 1
                except httpx.TransportError as error:
                    self.outcomes[f"failed: {type(error).__name__}"] += 1
                    await asyncio.sleep(0.1)

    async def _whole(self, http: httpx.AsyncClient) -> str:
        path, body = self._some_request()
        response = await http.post(path, json=body)
        if response.status_code != 200:
            await asyncio.sleep(0.1)
            return f"failed: {response.status_code}"
        answer = response.json()
        assert len(answer["choices"]) == len(body.get("prompt", "1")) * body["n"]
        assert all(choice["finish_reason"] in {"stop", "length"} for choice in answer["choices"])
        assert answer["usage"]["completion_tokens"] <= MAX_TOKENS * len(answer["choices"])
        return "whole"

    async def _streamed(self, http: httpx.AsyncClient) -> str:
        path, body = self._some_request()
        async with http.stream("POST", path, json=body | {"stream": True}) as response:
            if response.status_code != 200:
                return f"failed: {response.status_code}"
            *_, last = [line async for line in response.aiter_lines() if line]
            return "streamed" if last == "data: [DONE]" else f"failed: {last}"

    async def _left_while_it_streams(self, http: httpx.AsyncClient) -> str:
        path, body = self._some_request()
        async with http.stream("POST", path, json=body | {"stream": True}) as response:
            if response.status_code != 200:
                return f"failed: {response.status_code}"
            async for _ in response.aiter_lines():
                if self.rng.random() < 0.2:
                    break
        return "left"

    async def _left_before_it_is_answered(self, http: httpx.AsyncClient) -> str:
        path, body = self._some_request()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.rng.random() * 0.2):
                await http.post(path, json=body)
        return "left"

    def _some_request(self) -> tuple[str, dict[str, Any]]:
        rng = self.rng
        body: dict[str, Any] = {
            "max_tokens": rng.randint(1, MAX_TOKENS),
            "temperature": rng.choice((0, 1)),
            "priority": rng.randint(-2, 2),
            "ignore_eos": rng.random() < 0.5,
            "n": rng.choice((1, 1, 1, 3)),
        }
        if rng.random() < 0.4:
            body["stop"] = rng.sample(["e", " the", "zz", "1"], 2)
        if rng.random() < 0.3:
            body["cache_salt"] = rng.choice(("a", "b"))
        if rng.random() < 0.5:
            return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": self._some_text()}]}
        return "/v1/completions", body | {"prompt": [self._some_text() for _ in range(rng.randint(1, 3))]}

    def _some_text(self) -> str:
        beginning = WORDS[: self.rng.randint(1, len(WORDS))]
        return " ".join([*beginning, *self.rng.choices(WORDS, k=self.rng.randint(0, 20))])


def sizes(server: Server) -> dict[str, tuple[int, int]]:
    """Memory in bytes and open files, by process."""
    processes = {module: server.child(module) for module in CHILDREN}
    processes["supervisor"] = psutil.Process(server.process.pid)
    return {name: (process.memory_info().rss, process.num_fds()) for name, process in processes.items()}


@pytest.mark.parametrize(
    ("kill_every_s", "num_kills", "calm_s"),
    [(0.5, 2, 2.0), pytest.param(35.0, 8, 240.0, marks=pytest.mark.slow)],
)
@pytest.mark.timeout(1200)
async def test_nothing_is_left_of_mixed_load_with_kills(
    server: Server, kill_every_s: float, num_kills: int, calm_s: float
) -> None:
    load = Load(server.url, random.Random(0))
    await idle(server, POOL_TOKENS)
    at_first = sizes(server)
    async with load.running():
        for n in range(num_kills):
            await asyncio.sleep(kill_every_s)
            await replaced(server, CHILDREN[n % 2])
        await load.at_least(1, "whole")
    await idle(server, POOL_TOKENS)
    # What has been started anew gets warm first.
    async with load.running():
        await asyncio.sleep(calm_s / 2)
    await idle(server, POOL_TOKENS)
    before = sizes(server)
    load.outcomes.clear()
    async with load.running():
        await asyncio.sleep(calm_s)
        # However slow the machine is.
        await load.at_least(int(calm_s // 2) + 1, *OUTCOMES)
    await idle(server, POOL_TOKENS)
    after = sizes(server)
    # Nobody kills anything: nothing fails.
    assert set(load.outcomes) == OUTCOMES
    for name, (rss_bytes, num_fds) in after.items():
        assert num_fds <= before[name][1] + 1, name
        assert rss_bytes - before[name][0] < 8 << 20, name
    assert after["supervisor"][1] <= at_first["supervisor"][1] + 1
    assert after["supervisor"][0] - at_first["supervisor"][0] < 16 << 20
