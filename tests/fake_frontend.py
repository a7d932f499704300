"""A frontend process with requests that do not end: `python -m tests.fake_frontend ENDPOINT NUM_REQUESTS [--promise]`.

Prints "running" when the first output of each has arrived; with `--promise`, when the engine wants each one's picture,
which never comes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from frontend.engine_client import EngineClient
from tests.pictures_in_prompts import Pictures, pictured
from tests.wire_peers import request


async def main(endpoint: str, num_requests: int, *, promise: bool) -> None:
    client = EngineClient(endpoint)
    await client.start()
    await client.wait_ready(20)
    if promise:
        pictures = Pictures()
        pictures.ready.clear()
        streams = [client.submit(pictured(f"r{n}", [f"picture {n}"]), pictures) for n in range(num_requests)]
        while len(pictures.waiting) < len(streams):  # noqa: ASYNC110 - nobody would set an event
            await asyncio.sleep(0.01)
    else:
        streams = [client.submit(request(f"r{n}", [n + 1], 60_000)) for n in range(num_requests)]
        for stream in streams:
            await anext(stream)
    sys.stdout.write("running\n")
    sys.stdout.flush()
    await asyncio.sleep(3600)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("num_requests", type=int)
    parser.add_argument("--promise", action="store_true")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.endpoint, arguments.num_requests, promise=arguments.promise))
