"""What the frontend costs: requests and tokens through it, with an engine that takes no time, beside others.

    python -m benchmarks.frontend_overhead [--peer-python VLLM_VENV/bin/python] [--rounds 5] [--streams 64]

The others are a bare handler that streams as many chunks (`benchmarks.bare_server`) and, with `--peer-python`, vLLM's
frontend (`benchmarks/vllm_frontend.py`). All run at once and are asked in turn, round by round, by the same client; the
figures are medians over the rounds. Behind ours is `benchmarks.echo_engine`: chat template, tokenizer, wire, scheduler
and detokenizer are the real ones. CPU time is that of the serving process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import uvloop

from engine_core import resolve_model
from frontend.http_config import EngineAddress, HttpConfig, child_argv

_HOST = "127.0.0.1"
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_START_TIMEOUT_S = 120.0
_PROMPT = "Tell me about rivers, mountains and the weather over the sea in winter. " * 8


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one round. `request_ms`: a request for one token, alone. The others: all streams at once."""

    request_ms: float
    requests_per_s: float
    tokens_per_s: float
    cpu_us_per_request: float
    cpu_us_per_token: float


class Server:
    """One of them, as the client sees it."""

    def __init__(self, port: int, process: psutil.Process) -> None:
        self.port = port
        self._process = process

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    async def stream(self, max_tokens: int) -> int:
        """One request over a connection of its own; returns the number of tokens in the answer."""
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": _PROMPT}],
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        reader, writer = await asyncio.open_connection(_HOST, self.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {_HOST}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        received = await reader.read(-1)
        writer.close()
        if b"[DONE]" not in received:
            raise RuntimeError(f"the answer broke off: {received[-500:]!r}")
        # Not the number of events: where the client is slow, one may carry several tokens.
        return int(_COMPLETION_TOKENS.findall(received)[-1])


async def measure(server: Server, num_streams: int, num_tokens: int) -> Figures:
    latencies_s = []
    for _ in range(30):
        started_s = time.perf_counter()
        await server.stream(1)
        latencies_s.append(time.perf_counter() - started_s)
    one_token_s, _, one_token_cpu_s = await _all_at_once(server, num_streams, 4 * num_streams, 1)
    wall_s, num_received, cpu_s = await _all_at_once(server, num_streams, 2 * num_streams, num_tokens)
    return Figures(
        request_ms=statistics.median(latencies_s) * 1e3,
        requests_per_s=4 * num_streams / one_token_s,
        tokens_per_s=num_received / wall_s,
        cpu_us_per_request=one_token_cpu_s / (4 * num_streams) * 1e6,
        cpu_us_per_token=cpu_s / num_received * 1e6,
    )


async def _all_at_once(
    server: Server, num_streams: int, num_requests: int, num_tokens: int
) -> tuple[float, int, float]:
    """`num_requests` of them, `num_streams` at a time. Returns wall time, tokens received, CPU time of the server."""
    remaining = iter(range(num_requests))
    num_received = 0

    async def ask() -> None:
        nonlocal num_received
        for _ in remaining:
            received = await server.stream(num_tokens)
            num_received += received

    started_s, started_cpu_s = time.perf_counter(), server.cpu_s()
    await asyncio.gather(*(ask() for _ in range(num_streams)))
    return time.perf_counter() - started_s, num_received, server.cpu_s() - started_cpu_s


@contextmanager
def running(*argv: str, log: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=log) as process:
        try:
            yield process
        finally:
            process.terminate()


def free_port() -> int:
    with socket.create_server((_HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def wait_until_ready(name: str, server: Server) -> None:
    ends_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            await server.stream(1)
            return
        except (OSError, RuntimeError) as error:
            if time.monotonic() > ends_s:
                raise RuntimeError(f"{name} does not answer") from error
            await asyncio.sleep(0.2)


async def compare(servers: dict[str, Server], rounds: int, num_streams: int, num_tokens: int) -> dict[str, Figures]:
    for name, server in servers.items():
        await wait_until_ready(name, server)
        await measure(server, num_streams, num_tokens)
    measured: dict[str, list[Figures]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, server in servers.items():
            measured[name].append(await measure(server, num_streams, num_tokens))
    return {name: _median(figures) for name, figures in measured.items()}


def _median(figures: list[Figures]) -> Figures:
    rows = [asdict(one) for one in figures]
    return Figures(**{name: statistics.median(row[name] for row in rows) for name in rows[0]})


def print_table(results: dict[str, Figures]) -> None:
    others = [name for name in results if name != "foreword"]
    print(f"{'':20}" + "".join(f"{name:>12}" for name in results) + "".join(f"{'÷ ' + name:>10}" for name in others))
    for figure in asdict(results["foreword"]):
        ours = getattr(results["foreword"], figure)
        values = "".join(f"{getattr(figures, figure):12.1f}" for figures in results.values())
        ratios = "".join(f"{_ratio(ours, getattr(results[name], figure)):>10}" for name in others)
        print(f"{figure:20}{values}{ratios}")


def _ratio(ours: float, other: float) -> str:
    # CPU time is counted in hundredths of a second.
    return f"{ours / other:.2f}" if other else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--peer-python", help="interpreter of a virtual environment with vLLM 0.32")
    arguments = parser.parse_args()
    model_dir = resolve_model("smollm2").path
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    with TemporaryDirectory() as directory, ExitStack() as stack:

        def start(port: int, *argv: str, log: int | None = None) -> Server:
            return Server(port, psutil.Process(stack.enter_context(running(*argv, log=log)).pid))

        endpoint = f"ipc://{directory}/engine"
        stack.enter_context(running(sys.executable, "-m", "benchmarks.echo_engine", endpoint, str(vocab_size)))
        port = free_port()
        config = HttpConfig(
            engines=(EngineAddress(endpoint),), model_dir=str(model_dir), model_names=("echo",), port=port
        )
        servers = {"foreword": start(port, *child_argv(config))}
        port = free_port()
        servers["bare"] = start(port, sys.executable, "-m", "benchmarks.bare_server", str(port))
        if arguments.peer_python:
            port = free_port()
            script = Path(__file__).with_name("vllm_frontend.py")
            servers["vllm"] = start(
                port, arguments.peer_python, str(script), str(port), str(model_dir), log=subprocess.DEVNULL
            )
        results = uvloop.run(compare(servers, arguments.rounds, arguments.streams, arguments.tokens))
    print_table(results)
    if arguments.out:
        arguments.out.write_text(json.dumps({name: asdict(figures) for name, figures in results.items()}, indent=1))


if __name__ == "__main__":
    main()
