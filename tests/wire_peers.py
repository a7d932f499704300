"""Both ends of the wire, for tests: a server in a thread, a frontend made of a bare socket, an engine as a process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import zmq

from engine_core.config import EngineConfig
from engine_core.engine import EngineCore
from engine_core.frontend_link import LinkSettings
from engine_core.server import EngineCoreServer
from ipc.codec import Decoder, encode
from ipc.messages import (
    AddRequest,
    EngineMessage,
    EngineOutputs,
    FrontendMessage,
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    Welcome,
)
from ipc.sequence import UNCOUNTED
from ipc.sockets import make_dealer
from ipc.vocabulary import EngineRequest, RequestOutput, SamplingParams
from tests.fake_runner import FakeRunner

FAST = LinkSettings(heartbeat_interval_s=0.1, frontend_timeout_s=5.0)
ROOT = Path(__file__).parent.parent


def private_endpoint(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"ipc://{tmp_path}/e"


def free_tcp_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Not a zombie, which whoever inherited it may leave for as long as it likes."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_idle(engine: EngineCore) -> bool:
    stats = engine.stats()
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


@contextlib.contextmanager
def running_server(
    endpoint: str, *, step_s: float = 0.0, settings: LinkSettings = FAST, engine: EngineCore | None = None
) -> Iterator[EngineCoreServer]:
    engine = engine or EngineCore(EngineConfig(), FakeRunner(step_s=step_s))
    server = EngineCoreServer(engine, endpoint, settings)
    thread = threading.Thread(target=server.run, name="engine", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


def start_engine(endpoint: str, step_s: float = 0.0, *options: str) -> subprocess.Popen[bytes]:
    """`options` are `tests.fake_engine`'s."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fake_engine", endpoint, "--step-s", str(step_s), *options],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )


def request(request_id: str, prompt: list[int], max_tokens: int = 20) -> EngineRequest:
    return EngineRequest(request_id, prompt, SamplingParams(temperature=0, max_tokens=max_tokens))


class BareFrontend:
    """A DEALER that sends what it is told and answers nothing by itself.

    It numbers what it sends and checks the numbers of what it gets.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, queue_messages: int = 1024) -> None:
        self.socket = make_dealer(context, endpoint, queue_messages=queue_messages)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.epoch = 0
        self.next_sequence = 1
        self._expected = 0
        self._decoder: Decoder[EngineMessage] = Decoder(EngineMessage)

    def hello(self) -> Welcome:
        self.send(Hello())
        welcome = self.receive(Welcome)
        assert isinstance(welcome, Welcome)
        return welcome

    def send(self, message: FrontendMessage, epoch: int | None = None) -> None:
        is_counted = epoch is None and not isinstance(message, Goodbye)
        sequence = self.next_sequence if is_counted else UNCOUNTED
        self.socket.send_multipart(encode(message, self.epoch if epoch is None else epoch, sequence))
        self.next_sequence += is_counted

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 20) -> None:
        self.send(AddRequest(request(request_id, prompt, max_tokens)))

    def receive(self, kind: type[Any] | None = None, timeout_s: float = 20.0) -> EngineMessage | None:
        """The next message of this kind (or any but a heartbeat); None if there is none in time."""
        deadline_s = time.monotonic() + timeout_s
        while (wait_s := deadline_s - time.monotonic()) > 0:
            if not self.socket.poll(wait_s * 1000):
                return None
            epoch, sequence, message = self._decoder.decode(self.socket.recv_multipart())
            if isinstance(message, Welcome):
                self.epoch = epoch
            elif isinstance(message, Goodbye | Refused):
                assert sequence == UNCOUNTED
            else:
                assert sequence == self._expected
            self._expected = sequence + 1
            if isinstance(message, kind) if kind else not isinstance(message, Heartbeat):
                return message
        return None

    def outputs(self) -> Iterator[RequestOutput]:
        while True:
            message = self.receive(EngineOutputs)
            assert isinstance(message, EngineOutputs), "the outputs ended early"
            yield from message.outputs

    def finish(self, *request_ids: str) -> dict[str, tuple[list[int], RequestOutput]]:
        """Tokens and last output of each of these requests."""
        tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
        last: dict[str, RequestOutput] = {}
        for output in self.outputs():
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                last[output.request_id] = output
                if len(last) == len(request_ids):
                    break
        return {request_id: (tokens[request_id], last[request_id]) for request_id in request_ids}


Connect = Callable[..., BareFrontend]
