"""`benchmarks.beside_peers`: what it makes of figures, and that a server it has started is gone afterwards."""

from __future__ import annotations

import shlex
import socket
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from benchmarks import started_server as starting
from benchmarks.peer_table import MEMORY, START, Rows, table
from benchmarks.started_server import started_server
from tests.frontend.canned_server import MODELS

HOLDS_BYTES = 64 << 20
LIVENESS_S = 60.0

# Two processes that hold the same memory. One serves; the other, in a session of its own, ignores SIGTERM.
SERVER = f"""
import http.server, json, os, signal, sys, time
held = os.urandom({HOLDS_BYTES})
worker = os.fork()
if not worker:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({MODELS!r})
    def do_POST(self):
        event = {{"choices": [{{"delta": {{"content": "yes"}}, "finish_reason": "stop"}}]}}
        self.reply(f"data: {{json.dumps(event)}}\\n\\ndata: [DONE]\\n\\n".encode(), "text/event-stream")
    def reply(self, body, kind="application/json"):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        number: int = listener.getsockname()[1]
        return number


def command(*arguments: str | Path) -> str:
    return shlex.join(map(str, [sys.executable, *arguments]))


def test_a_started_server_is_measured_and_ended_with_all_its_processes(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "STOP_TIMEOUT_S", 1.0)
    (tmp_path / "server.py").write_text(SERVER)
    with started_server(command(tmp_path / "server.py", port), f"http://127.0.0.1:{port}", None) as server:
        assert server.start_s > 0
        root = psutil.Process(server.process.pid)
        processes = [root, *root.children(recursive=True)]
        memory = server.memory()
    assert memory.num_processes == len(processes) >= 2
    assert HOLDS_BYTES < memory.pss_bytes < 2 * HOLDS_BYTES < memory.rss_bytes
    # A process that was killed is gone once whoever inherits it takes note.
    _, alive = psutil.wait_procs(processes, timeout=LIVENESS_S)
    assert not alive


def test_a_server_that_ends_says_why() -> None:
    program = command("-c", "import sys; sys.exit('no such model')")
    with (
        pytest.raises(RuntimeError, match="ended with 1; it printed:\nno such model"),
        started_server(program, "http://127.0.0.1:9", None),
    ):
        pass


def test_somebody_elses_server_is_not_measured() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(RuntimeError, match="somebody listens"), started_server("true", url, None):
            pass


def cells(name: str, **values: float) -> list[str]:
    measured: dict[str, list[Rows]] = {server.replace("_", "-"): [{name: value}] for server, value in values.items()}
    line = table(measured)[-1]
    return [cell.strip() for cell in line.strip("| ").split(" | ")]


@pytest.mark.parametrize(
    ("name", "ours", "compared"),
    [
        ("TTFT cold, 256 tokens, ms", 180.0, ["0.90 × vLLM", "≤ 0.9", "yes"]),
        ("TTFT warm, 256 tokens, ms", 60.0, ["0.60 × llama-server", "≤ 0.5", "**no**"]),
        ("decode at 2,048, tokens/s", 160.0, ["1.60 × llama-server", "≥ 1.5", "yes"]),
        ("8 streams at 32, tokens/s", 360.0, ["1.80 × vLLM", "≥ 2", "**no**"]),
        ("unique prompts, output tokens/s", 300.0, ["1.50 × vLLM", "≥ 1.5", "yes"]),
        (MEMORY, 120.0, ["0.60 × vLLM", "≤ 0.5", "**no**"]),
    ],
)
def test_a_goal_is_beside_the_peer_it_names(name: str, ours: float, compared: list[str]) -> None:
    assert cells(name, Foreword=ours, vLLM=200.0, llama_server=100.0)[-3:] == compared


def test_a_goal_of_its_own_needs_no_peer() -> None:
    assert cells(START, Foreword=14.0, vLLM=80.0) == [START, "14.0", "80.0", "", "≤ 15", "yes"]


def test_without_the_peer_of_the_goal_there_is_only_a_ratio() -> None:
    lines = table({"Foreword": [{"TTFT cold, 256 tokens, ms": 50.0}], "other": [{"TTFT cold, 256 tokens, ms": 100.0}]})
    assert lines[-1] == "| TTFT cold, 256 tokens, ms | 50.0 | 100 | 0.50 × other |  |  |"


def test_a_figure_is_the_median_over_the_rounds() -> None:
    rounds: list[Rows] = [{"tiny request, ms": value} for value in (1.0, 9.0, 2.0)]
    assert (
        table({"Foreword": rounds, "other": [{"tiny request, ms": None}]})[-1]
        == "| tiny request, ms | 2.0 |  |  |  |  |"
    )
