"""What arrives at a socket is handed on, all of it and in order, whatever else the socket and the event loop do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import zmq

from frontend.socket_reader import SocketReader


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """The one that is read, and its peer."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    read, peer = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    read.bind("inproc://pair")
    peer.connect("inproc://pair")
    yield read, peer
    context.destroy(linger=0)


Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


class Ended(Exception):
    pass


class Taken(list[bytes]):
    """Of each message the frames, joined; `end` ends the reading."""

    def __call__(self, frames: list[memoryview]) -> None:
        self.append(b"|".join(frames))
        if self[-1] == b"end":
            raise Ended


async def test_messages_are_handed_on_until_taking_one_fails(pair: Pair) -> None:
    read, peer = pair
    taken = Taken()
    peer.send_multipart([b"before", b"", b"it ran"])
    running = asyncio.create_task(SocketReader(read).run(taken))
    await asyncio.sleep(0.01)
    for message in (b"a", b"end", b"b"):
        peer.send(message)
    with pytest.raises(Ended):
        await asyncio.wait_for(running, 20)
    assert taken == [b"before||it ran", b"a", b"end"]


async def test_cancelled_it_leaves_the_socket_alone(pair: Pair) -> None:
    read, peer = pair
    taken = Taken()
    reader = SocketReader(read)
    running = asyncio.create_task(reader.run(taken))
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    peer.send(b"a")
    reader.look()
    await asyncio.sleep(0.01)
    assert (taken, read.recv()) == ([], b"a")


async def test_what_a_sender_saw_first_is_not_missed(pair: Pair) -> None:
    read, peer = pair
    taken = Taken()
    reader = SocketReader(read)
    running = asyncio.create_task(reader.run(taken))
    await asyncio.sleep(0.01)
    peer.send(b"end")
    while not read.getsockopt(zmq.EVENTS) & zmq.POLLIN:
        time.sleep(0.001)  # noqa: ASYNC251 - the event loop must not see it
    # The socket has told once, and will not again.
    await asyncio.sleep(0.05)
    assert not taken
    reader.look()
    with pytest.raises(Ended):
        await asyncio.wait_for(running, 20)


async def test_a_flood_leaves_the_event_loop_to_others(pair: Pair) -> None:
    read, peer = pair
    read.setsockopt(zmq.RCVHWM, 0)
    taken = Taken()
    for _ in range(900):
        peer.send(b"x")
    peer.send(b"end")
    running = asyncio.create_task(SocketReader(read).run(taken))
    seen: set[int] = set()
    while not running.done():
        seen.add(len(taken))
        await asyncio.sleep(0)
    assert len(taken) == 901
    assert len(seen) > 9
    with pytest.raises(Ended):
        await running
