"""Whatever happens to messages between a frontend and its engine: right tokens, an error or a counted drop. No hang."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from engine_core.frontend_link import LinkSettings
from engine_core.server import EngineCoreServer
from frontend.engine_client import EngineClient
from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from ipc.codec import Decoder, encode
from ipc.messages import (
    AddRequest,
    EngineMessage,
    EngineOutputs,
    FrontendMessage,
    Goodbye,
    Heartbeat,
    Hello,
    SupplyFeature,
    WantFeatures,
    Welcome,
)
from ipc.vocabulary import EngineRequest
from tests.fake_runner import continuation
from tests.meddling_proxy import Direction, Frames, MeddlingProxy, meddling_proxy
from tests.pictures_in_prompts import Pictures, picture_engine, pictured
from tests.wire_peers import is_idle, private_endpoint, request, running_server, wait_until

LIVENESS_S = 30.0
HEARTBEAT_S = 0.1

Change = Callable[[Frames], list[Frames]]


def lose(frames: Frames) -> list[Frames]:
    return []


def duplicate(frames: Frames) -> list[Frames]:
    return [frames, frames]


def cut_body(frames: Frames) -> list[Frames]:
    return [[frames[0], frames[1][:-1], *frames[2:]]]


def cut_header(frames: Frames) -> list[Frames]:
    return [[frames[0][:-1], *frames[1:]]]


def lose_frame(frames: Frames) -> list[Frames]:
    return [frames[:-1]]


def as_of_an_older_version(frames: Frames) -> list[Frames]:
    return [[frames[0][:4] + b"\1\0" + frames[0][6:], *frames[1:]]]


def as_of_another_epoch(frames: Frames) -> list[Frames]:
    return [[frames[0][:8] + bytes([frames[0][8] ^ 1]) + frames[0][9:], *frames[1:]]]


CHANGES: list[Change] = [
    lose,
    duplicate,
    cut_body,
    cut_header,
    lose_frame,
    as_of_an_older_version,
    as_of_another_epoch,
]
# Which drop counter shows it; the loss of what comes first or last shows otherwise.
REASONS = {duplicate: "duplicate", cut_body: "body", cut_header: "header", lose_frame: "frames"}


class Replace:
    """Changes the first message of one kind, or holds it back until the next message has passed it."""

    def __init__(self, kind: type[FrontendMessage | EngineMessage], change: Change | None, skip: int = 0) -> None:
        self._kind = kind
        self._change = change
        self._skip = skip
        self._held: Frames | None = None
        self.is_done = False

    def __call__(self, direction: Direction, frames: Frames) -> list[Frames]:
        if self._held is not None:
            held, self._held = self._held, None
            return [frames, held]
        if self.is_done or not self._is_it(direction, frames):
            return [frames]
        self.is_done = True
        if self._change is not None:
            return self._change(frames)
        self._held = frames
        return []

    def _is_it(self, direction: Direction, frames: Frames) -> bool:
        decoder = Decoder[object](FrontendMessage if direction == "to_engine" else EngineMessage)
        if not isinstance(decoder.decode(frames).message, self._kind):
            return False
        self._skip -= 1
        return self._skip < 0


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineCoreServer]:
    settings = LinkSettings(heartbeat_interval_s=HEARTBEAT_S, frontend_timeout_s=2.0)
    with running_server(private_endpoint(tmp_path), engine=picture_engine(step_s=0.002), settings=settings) as server:
        yield server


@pytest.fixture
def proxy(tmp_path: Path, engine: EngineCoreServer) -> Iterator[MeddlingProxy]:
    with meddling_proxy(f"ipc://{tmp_path}/p", f"ipc://{tmp_path}/e") as proxy:
        yield proxy


@pytest.fixture
async def client(tmp_path: Path, proxy: MeddlingProxy) -> AsyncIterator[EngineClient]:
    client = EngineClient(f"ipc://{tmp_path}/p", heartbeat_interval_s=HEARTBEAT_S, heartbeat_timeout_s=1.0)
    yield client
    await client.close()


async def outcome(client: EngineClient, asked: EngineRequest) -> str:
    """How a request went: `finished`, `failed` or `refused`. Its tokens were right in any case."""
    tokens: list[int] = []
    expected = continuation(asked.prompt_token_ids, asked.sampling_params.max_tokens)
    try:
        async with asyncio.timeout(LIVENESS_S):
            await client.wait_ready()
            async with client.submit(asked, Pictures()) as stream:
                async for output in stream:
                    tokens += output.new_token_ids
    except EngineUnavailableError:
        assert tokens == expected[: len(tokens)]
        return "failed"
    except RequestRefusedError:
        assert tokens == expected[: len(tokens)]
        return "refused"
    assert tokens == expected
    return "finished"


async def serves_as_before(client: EngineClient, engine: EngineCoreServer) -> None:
    async with asyncio.timeout(LIVENESS_S):
        # The session that suffered may end yet.
        while await outcome(client, pictured("afterwards", ["pig"], 20)) != "finished":  # noqa: ASYNC110 - it may be another's end
            await asyncio.sleep(HEARTBEAT_S)
    assert client.num_in_flight == 0
    await asyncio.to_thread(wait_until, lambda: is_idle(engine.engine))


@pytest.mark.parametrize("change", [*CHANGES, None], ids=lambda change: change.__name__ if change else "overtaken")
@pytest.mark.parametrize(
    ("kind", "skip"),
    [
        (AddRequest, 1),
        (WantFeatures, 0),
        (SupplyFeature, 1),
        (EngineOutputs, 0),
        (EngineOutputs, 29),
        (Heartbeat, 1),
        (Hello, 0),
        (Welcome, 0),
    ],
)
async def test_one_message_that_does_not_arrive_as_it_was_sent(
    engine: EngineCoreServer,
    proxy: MeddlingProxy,
    client: EngineClient,
    kind: type[FrontendMessage | EngineMessage],
    skip: int,
    change: Change | None,
) -> None:
    proxy.meddle = replace = Replace(kind, change, skip)
    await client.start()
    outcomes = await asyncio.gather(*(outcome(client, pictured(f"r{n}", [f"picture {n}"], 200)) for n in range(3)))
    await asyncio.to_thread(wait_until, lambda: replace.is_done)
    await serves_as_before(client, engine)
    drops = client.drops.counts + engine.link.drops.counts
    if change is duplicate:
        assert outcomes == ["finished"] * 3
    elif kind not in {Hello, Welcome, Heartbeat}:
        assert "failed" in outcomes
    if change in REASONS:
        assert drops[REASONS[change]] >= 1
    elif kind is EngineOutputs:
        assert drops["lost"] + drops["version"] >= 1


@pytest.mark.parametrize("direction", ["to_engine", "to_frontend"])
async def test_nothing_of_an_earlier_session_passes_for_a_part_of_this_one(
    engine: EngineCoreServer,
    proxy: MeddlingProxy,
    client: EngineClient,
    direction: Direction,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that was said in one session is said again before each message of the next between the same two.

    Each count begins above those before it. Where a socket's first word is the `Hello` of another one, its own is taken
    for a duplicate if it is lower: then a client tries again until it draws a higher one.
    """
    counts = itertools.count()
    monkeypatch.setattr("ipc.sequence.secrets.randbits", lambda num_bits: next(counts) << 40)
    earlier: list[Frames] = []

    def remember(way: Direction, frames: Frames) -> list[Frames]:
        if way == direction:
            earlier.append(frames)
        return [frames]

    def repeat(way: Direction, frames: Frames) -> list[Frames]:
        return [*earlier, frames] if way == direction else [frames]

    proxy.meddle = remember
    await client.start()
    assert await outcome(client, pictured("r", ["pig"], 50)) == "finished"
    # Their engine says goodbye: the client begins anew, and numbers as it did before would fit.
    proxy.meddle = Replace(Heartbeat, lose_frame)
    await asyncio.to_thread(wait_until, lambda: client.drops.counts + engine.link.drops.counts)
    proxy.meddle = repeat
    for n in range(10):
        assert await outcome(client, pictured(f"s{n}", [f"picture {n}"], 50)) in {"finished", "failed"}
    proxy.meddle = None
    await serves_as_before(client, engine)


@pytest.mark.parametrize("seed", range(2))
async def test_random_faults_under_load(
    engine: EngineCoreServer, proxy: MeddlingProxy, client: EngineClient, seed: int
) -> None:
    rng = random.Random(seed)
    passed: list[tuple[Direction, Frames]] = []

    def meddle(direction: Direction, frames: Frames) -> list[Frames]:
        passed.append((direction, frames))
        # There are many more outputs than requests.
        if rng.random() > (0.05 if direction == "to_engine" else 0.02):
            return [frames]
        if rng.random() < 0.3:
            # Anything from the past, of this session or of an earlier one.
            return [frames, rng.choice([old for way, old in passed if way == direction])]
        if rng.random() < 0.1:
            return [frames, encode(Goodbye(), engine.link.epoch ^ 1, rng.randrange(9))]
        return rng.choice(CHANGES)(frames)

    await client.start()
    proxy.meddle = meddle
    outcomes: Counter[str] = Counter()

    async def ask(worker: int) -> None:
        for n in range(20):
            request_id, num_tokens = f"{worker}-{n}", rng.randint(1, 40)
            with_picture = pictured(request_id, [f"picture {rng.randrange(20)}"], num_tokens)
            without = request(request_id, [worker + 1, n + 1], num_tokens)
            outcomes[await outcome(client, rng.choice((with_picture, without)))] += 1

    await asyncio.gather(*(ask(worker) for worker in range(8)))
    proxy.meddle = None
    assert outcomes["finished"] > 0 and outcomes["failed"] > 0
    assert proxy.num_changed["to_engine"] > 0 and proxy.num_changed["to_frontend"] > 0
    assert (client.drops.counts + engine.link.drops.counts).total() > 0
    await serves_as_before(client, engine)
