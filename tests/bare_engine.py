"""An engine made of a bare socket, which says exactly what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import zmq.asyncio

from ipc.codec import Decoder, encode
from ipc.messages import EngineMessage, FrontendMessage, Heartbeat, Hello, Welcome
from ipc.sockets import bind_router
from ipc.vocabulary import AdapterInfo, EngineCapabilities

MessageT = TypeVar("MessageT")

CAPABILITIES = EngineCapabilities("bare", 100, 1000, 16, 8, "sha256", "00")


class BareEngine:
    """A ROUTER that says exactly what a test wants."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.router = bind_router(context, endpoint)
        self.identity = b""
        self.next_sequence = 1
        self.hello_sequence = 0

    async def say(self, *frames: object) -> None:
        await self.router.send_multipart([self.identity, *frames])

    async def tell(self, message: EngineMessage, epoch: int) -> None:
        """Say `message` with the next number of the session."""
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        await self.say(*encode(message, epoch, sequence))

    async def welcome(self, epoch: int, adapters: Sequence[AdapterInfo] = ()) -> None:
        """Answer the next hello; what was sent to an earlier session is passed over."""
        _, frames = await self.hear(Hello)
        self.hello_sequence = Decoder[FrontendMessage](FrontendMessage).decode(frames).sequence
        self.next_sequence = 1
        await self.tell(Welcome(CAPABILITIES, self.hello_sequence, list(adapters)), epoch)

    async def hear(self, kind: type[MessageT]) -> tuple[MessageT, list[bytes]]:
        """The next message of this kind, others are passed over, and the frames it came in."""
        decoder: Decoder[FrontendMessage] = Decoder(FrontendMessage)
        async with asyncio.timeout(20):
            while True:
                self.identity, *frames = await self.router.recv_multipart()
                message = decoder.decode(frames).message
                if isinstance(message, kind):
                    return message, frames


async def keep_alive(engine: BareEngine, epoch: int, work: Awaitable[None]) -> None:
    async def beat() -> None:
        while True:
            await engine.tell(Heartbeat(), epoch)
            await asyncio.sleep(0.1)

    beating = asyncio.create_task(beat())
    try:
        await work
    finally:
        beating.cancel()
