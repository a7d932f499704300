"""A server that a benchmark starts, asks and ends, with every process it has started."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import IO
from urllib.parse import urlsplit

import psutil

from frontend.bench.meter import ask
from frontend.openai_client import OpenAIClient, ServerError

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.1
_ANSWER_TIMEOUT_S = 60.0
_LOG_CHARS = 3000


@dataclass(frozen=True, slots=True)
class Memory:
    """Of all processes of a server together. `pss_bytes` counts a page that several processes share once, split among
    them; `rss_bytes` counts it for each. Pages of a file that is mapped count in both as far as they are in memory.
    """

    pss_bytes: int
    rss_bytes: int
    num_processes: int


@dataclass(frozen=True, slots=True)
class StartedServer:
    """`start_s` is from before its process began until the first token of its first answer."""

    process: subprocess.Popen[bytes]
    start_s: float

    def memory(self) -> Memory:
        """As it is now."""
        pss_bytes = rss_bytes = num_processes = 0
        for process in _tree(self.process.pid):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                info = process.memory_full_info()
                pss_bytes, rss_bytes, num_processes = pss_bytes + info.pss, rss_bytes + info.rss, num_processes + 1
        return Memory(pss_bytes, rss_bytes, num_processes)


@contextmanager
def started_server(command: str, url: str, model: str | None) -> Iterator[StartedServer]:
    """Run `command` in a shell until the end of the block. It must serve the OpenAI API at `url`.

    At the end it gets SIGTERM; what of it still runs `STOP_TIMEOUT_S` later is killed.

    Raises:
        RuntimeError: somebody else serves there, or the command ended or did not answer within `START_TIMEOUT_S`; with
            the last of what it printed.
    """
    _check_free(url)
    with tempfile.TemporaryFile() as log:
        began_s = time.perf_counter()
        # A group of its own, to be signalled as a whole.
        process = subprocess.Popen(
            command, shell=True, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            answered_s = asyncio.run(_first_token_s(process, url, model, log))
            yield StartedServer(process, answered_s - began_s)
        finally:
            _stop(process)


async def _first_token_s(process: subprocess.Popen[bytes], url: str, model: str | None, log: IO[bytes]) -> float:
    ends_s = time.perf_counter() + START_TIMEOUT_S
    async with aclosing(OpenAIClient(url)) as client:
        while True:
            try:
                card = await client.find_model(model)
                body = {"model": card.id, "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 1}
                asked_s = time.perf_counter()
                answer = await ask(client, body, timeout_s=_ANSWER_TIMEOUT_S, stream=True)
                return asked_s + (answer.ttft_s or answer.total_s)
            except ServerError as error:
                if process.poll() is not None:
                    reason = f"the command ended with {process.returncode}"
                elif time.perf_counter() > ends_s:
                    reason = f"no answer from {url} within {START_TIMEOUT_S:g} s ({error})"
                else:
                    await asyncio.sleep(_POLL_INTERVAL_S)
                    continue
                raise RuntimeError(f"{reason}; it printed:\n{_tail(log)}") from error


def _check_free(url: str) -> None:
    parts = urlsplit(url)
    with suppress(OSError), socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=5):
        raise RuntimeError(f"somebody listens at {url} already")


def _tree(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def _stop(process: subprocess.Popen[bytes]) -> None:
    processes = _tree(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
    for one in alive:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _tail(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_CHARS))
    return log.read().decode(errors="replace")
