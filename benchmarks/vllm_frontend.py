"""vLLM's own frontend with an engine that takes no time, for `benchmarks.frontend_overhead --peer-python`.

    PEER_PYTHON vllm_frontend.py PORT MODEL_DIR

Runs under vLLM's interpreter (0.32) and imports nothing of Foreword. Its API server, tokenizer and detokenizer are used
as they are; the client of its engine process is replaced by one that answers in the same process, each request's output
being its prompt, over and over. So vLLM is spared its wire and its scheduler, which the other side is not.
"""

from __future__ import annotations

import asyncio
import sys
import time
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient


class EchoClient:
    """What vLLM's `AsyncLLM` asks of its engine while it generates text."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self) -> None:
        self._requests: dict[str, Any] = {}
        self._num_tokens: dict[str, int] = {}
        self._added = asyncio.Event()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        self._requests[request.request_id] = request
        self._num_tokens[request.request_id] = 0
        self._added.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    async def reset_mm_cache_async(self) -> None:
        pass

    async def get_output_async(self) -> EngineCoreOutputs:
        while not self._requests:
            self._added.clear()
            await self._added.wait()
        await asyncio.sleep(0)
        outputs = [self._next_output(request) for request in list(self._requests.values())]
        return EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())

    def _next_output(self, request: Any) -> EngineCoreOutput:
        request_id = request.request_id
        prompt = request.prompt_token_ids
        position = self._num_tokens[request_id]
        self._num_tokens[request_id] = position + 1
        is_last = position + 1 >= request.sampling_params.max_tokens
        if is_last:
            del self._requests[request_id]
        return EngineCoreOutput(
            request_id, [prompt[position % len(prompt)]], finish_reason=FinishReason.LENGTH if is_last else None
        )

    def shutdown(self, timeout: float | None = None) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"vLLM asks its engine for {name}, which this stand-in does not have")


def main() -> None:
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: EchoClient())
    port, model_dir = sys.argv[1:]
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv = [
        *("vllm", "serve", model_dir, "--port", port, "--host", "127.0.0.1", "--served-model-name", "echo"),
        *("--dtype", "bfloat16", "--max-model-len", "8192", "--enable-prompt-tokens-details"),
        *("--disable-uvicorn-access-log", "--no-enable-log-requests"),
    ]
    vllm_main()


if __name__ == "__main__":
    main()
