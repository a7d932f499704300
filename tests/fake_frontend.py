"""A frontend process with requests that do not end: `python -m tests.fake_frontend ENDPOINT NUM_REQUESTS`.

Prints "running" when the first output of each has arrived.
"""

from __future__ import annotations

import asyncio
import sys

from frontend.engine_client import EngineClient
from tests.wire_peers import request


async def main(endpoint: str, num_requests: int) -> None:
    client = EngineClient(endpoint)
    await client.start()
    await client.wait_ready(20)
    streams = [client.submit(request(f"r{n}", [n + 1], 60_000)) for n in range(num_requests)]
    for stream in streams:
        await anext(stream)
    sys.stdout.write("running\n")
    sys.stdout.flush()
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
