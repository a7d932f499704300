"""The least a server can do: a bare Litestar handler that streams chat chunks of the same shape, one a token.

    python -m benchmarks.bare_server PORT

No tokenizer, no engine, no second process. It is the limit `benchmarks.frontend_overhead` compares the frontend with.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator

import msgspec
import uvicorn
import uvloop
from litestar import Litestar, Request, post
from litestar.response import Stream

from frontend.openai.protocol import ChatCompletionRequest
from frontend.openai.responses import ChatChunkChoice, ChatCompletionChunk, ChatDelta, PromptTokensDetails, Usage

_decode = msgspec.json.Decoder(ChatCompletionRequest).decode


@post("/v1/chat/completions", status_code=200)
async def chat_completions(request: Request) -> Stream:
    asked = _decode(await request.body())
    return Stream(_events(asked.max_tokens or 16), media_type="text/event-stream")


async def _events(num_tokens: int) -> AsyncGenerator[bytes]:
    chunk = ChatCompletionChunk("chatcmpl-0", int(time.time()), "bare", [])
    for _ in range(num_tokens):
        # As if each token came from somewhere else.
        await asyncio.sleep(0)
        chunk.choices = [ChatChunkChoice(index=0, delta=ChatDelta(content=" word"))]
        yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    chunk.choices, chunk.usage = [], Usage(0, num_tokens, num_tokens, PromptTokensDetails(0, 0))
    yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


def main() -> None:
    config = uvicorn.Config(
        Litestar([chat_completions], openapi_config=None),
        port=int(sys.argv[1]),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
    )
    uvloop.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main()
