"""Engine and frontend survive each other under a supervisor, and neither survives it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine_core import EngineConfig
from frontend.engine_client import EngineClient
from frontend.launch import EngineKeyFiles, engine_child
from ipc.curve import FrontendKeys
from ipc.endpoints import local_endpoint, socket_path
from ipc.key_files import load_key_pair, load_public_key, write_key_set
from ipc.process import STARTUP_FAILURE_EXIT_CODE
from tests.fake_runner import continuation
from tests.fake_supervisor import POLICY
from tests.wire_peers import ROOT, free_tcp_endpoint, is_alive, private_endpoint, request, wait_until


class Supervised:
    """A supervisor process, seen through its log."""

    def __init__(self, directory: Path, *options: str, endpoint: str | None = None) -> None:
        (directory / "s").mkdir()
        self.endpoint = endpoint or private_endpoint(directory / "s")
        self.keys: FrontendKeys | None = None
        self._log = directory / "log"
        with self._log.open("wb") as log:
            argv = [sys.executable, "-m", "tests.fake_supervisor", self.endpoint, *options]
            self.process = subprocess.Popen(argv, cwd=ROOT, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def pids(self, name: str) -> list[int]:
        """Of all processes started under this name so far."""
        return [int(pid) for pid in re.findall(rf"child_started name={name} child_pid=(\d+)", self.log)]

    def wait_for(self, event: str, count: int = 1) -> None:
        wait_until(lambda: len(re.findall(event, self.log)) >= count)

    def wait_serving(self, num_engines: int = 1) -> None:
        self.wait_for("engine_found", num_engines)
        self.wait_for("frontend_idle")

    def generate(self) -> list[int]:
        return asyncio.run(self._generate())

    async def _generate(self) -> list[int]:
        client = EngineClient(local_endpoint(self.endpoint), keys=self.keys)
        await client.start()
        await client.wait_ready(20)
        async with client.submit(request("r", [5], 10)) as stream:
            tokens = [token async for output in stream for token in output.new_token_ids]
        await client.close()
        return tokens

    def clean_up(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.pids("engine") + self.pids("http"):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path)
    supervised.wait_serving()
    yield supervised
    supervised.clean_up()


def test_a_killed_engine_is_replaced_and_the_frontend_stays(supervised: Supervised) -> None:
    assert supervised.generate() == continuation([5], 10)
    os.kill(supervised.pids("engine")[0], signal.SIGKILL)
    supervised.wait_serving(num_engines=2)
    assert supervised.generate() == continuation([5], 10)
    assert len(supervised.pids("engine")) == 2 and len(supervised.pids("http")) == 1
    assert "child_exited name=engine" in supervised.log and "status=SIGKILL" in supervised.log


def test_an_engine_over_tcp_with_keys_is_watched_and_replaced(tmp_path: Path) -> None:
    key_dir = tmp_path / "keys"
    write_key_set(key_dir)
    endpoint = free_tcp_endpoint().replace("127.0.0.1", "*")
    supervised = Supervised(tmp_path, "--keys", str(key_dir), endpoint=endpoint)
    supervised.keys = FrontendKeys(load_key_pair(key_dir / "client.key"), load_public_key(key_dir / "engine.pub"))
    try:
        supervised.wait_serving()
        assert supervised.generate() == continuation([5], 10)
        os.kill(supervised.pids("engine")[0], signal.SIGKILL)
        supervised.wait_serving(num_engines=2)
        assert supervised.generate() == continuation([5], 10)
    finally:
        supervised.clean_up()


def test_a_killed_frontend_is_replaced_and_the_engine_stays(supervised: Supervised) -> None:
    os.kill(supervised.pids("http")[0], signal.SIGKILL)
    supervised.wait_for("child_started name=http", 2)
    assert supervised.generate() == continuation([5], 10)
    assert len(supervised.pids("engine")) == 1


def test_a_stuck_engine_is_killed_and_replaced(supervised: Supervised) -> None:
    os.kill(supervised.pids("engine")[0], signal.SIGSTOP)
    supervised.wait_for("child_stuck name=engine")
    supervised.wait_serving(num_engines=2)
    assert supervised.generate() == continuation([5], 10)


async def test_an_engine_that_drains_for_long_is_not_stuck(supervised: Supervised) -> None:
    client = EngineClient(supervised.endpoint)
    await client.start()
    await client.wait_ready(20)
    async with client.submit(request("r", [5], 60_000)) as stream:
        await anext(stream)
        # The supervisor has seen it ready.
        await asyncio.sleep(0.6)
        os.kill(supervised.pids("engine")[0], signal.SIGTERM)
        await asyncio.to_thread(supervised.wait_for, "engine_draining endpoint")
        # Longer than the supervisor is patient with one that is stuck.
        await asyncio.sleep(1.5 * POLICY.stuck_timeout_s)
        assert client.state == "draining"
    # Without its last request it ends, and is replaced.
    await asyncio.to_thread(supervised.wait_serving, 2)
    assert "child_stuck" not in supervised.log and "status=0" in supervised.log
    await client.close()


def test_a_child_that_keeps_dying_is_given_up(supervised: Supervised) -> None:
    for n in range(4):
        supervised.wait_for("child_started name=http", n + 1)
        os.kill(supervised.pids("http")[n], signal.SIGKILL)
    assert supervised.process.wait(20) == 1
    assert "child_given_up name=http restarts=3 window_s=60" in supervised.log
    assert not is_alive(supervised.pids("engine")[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_frontend_then_the_engine(supervised: Supervised, number: signal.Signals) -> None:
    supervised.process.send_signal(number)
    assert supervised.process.wait(20) == 0
    assert re.findall(r"child_stopped name=(\w+) child_pid=\d+ status=(\w+)", supervised.log) == [
        ("http", "0"),
        ("engine", "0"),
    ]


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, "--stop-timeout-s", "300")
    try:
        supervised.wait_serving()
        os.kill(supervised.pids("http")[0], signal.SIGSTOP)
        supervised.process.send_signal(signal.SIGINT)
        # The frontend cannot follow; only the second signal gets past it.
        with pytest.raises(subprocess.TimeoutExpired):
            supervised.process.wait(1)
        supervised.process.send_signal(signal.SIGINT)
        assert supervised.process.wait(60) == 0
    finally:
        supervised.clean_up()


def test_children_do_not_outlive_a_killed_supervisor(supervised: Supervised) -> None:
    pids = supervised.pids("engine") + supervised.pids("http")
    assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
    supervised.process.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    # Nor does the engine's socket, nor the directory that was made for it.
    assert not socket_path(supervised.endpoint).parent.exists()


def test_an_engine_that_cannot_start_is_reported_and_not_tried_again(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, "--engine-fails")
    try:
        assert supervised.process.wait(20) == STARTUP_FAILURE_EXIT_CODE
        assert len(supervised.pids("engine")) == 1
        assert "block_size: this engine was told to fail" in supervised.log
        assert "child_cannot_start name=engine" in supervised.log
        assert not is_alive(supervised.pids("http")[0])
    finally:
        supervised.clean_up()


def test_secrets_are_no_arguments(tmp_path: Path) -> None:
    write_key_set(tmp_path / "keys")
    files = EngineKeyFiles(tmp_path / "keys" / "engine.key", tmp_path / "keys" / "client.pub")
    child = engine_child(EngineConfig(model="m"), "tcp://0.0.0.0:5555", key_files=files, drain_timeout_s=7)
    assert child.engine_endpoint == "tcp://127.0.0.1:5555"
    assert str(files.key) in child.argv
    secret = load_key_pair(files.key).secret.decode()
    assert secret not in " ".join(child.argv) and secret not in repr(child)


def test_the_engine_child_gets_its_whole_configuration(tmp_path: Path) -> None:
    config = EngineConfig(model="some/where", num_blocks=77, prefix_caching_hash_algo="xxhash")
    child = engine_child(config, "ipc:///x/e")
    assert child.engine_endpoint == "ipc:///x/e"
    argv = list(child.argv)
    assert argv[argv.index("--endpoint") + 1] == "ipc:///x/e"
    assert msgspec.json.decode(argv[argv.index("--config") + 1], type=EngineConfig) == config


@pytest.mark.parametrize(
    ("mode", "config", "complaint"),
    [
        (0o755, "{}", "mode 0755: others can enter it"),
        (0o700, '{"block_size": "many"}', "block_size"),
        (0o700, '{"max_num_seqs": 0}', "max_num_seqs: must be at least 1"),
    ],
)
def test_the_engine_process_says_why_it_cannot_start(tmp_path: Path, mode: int, config: str, complaint: str) -> None:
    endpoint = private_endpoint(tmp_path)
    tmp_path.chmod(mode)
    argv = [sys.executable, "-m", "engine_core.server", "--endpoint", endpoint, "--config", config]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == STARTUP_FAILURE_EXIT_CODE
    assert complaint in result.stderr.splitlines()[-1]


def test_the_supervisor_loads_no_torch() -> None:
    code = "import sys, frontend.launch, engine_core.frontend_link; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
