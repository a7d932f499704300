"""`foreword keys`, `foreword engine` and `serve --engine`: mistakes are answered at once, on one line."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from ipc.key_files import write_key_set
from tests.frontend.test_cli import foreword, one_line
from tests.wire_peers import free_tcp_endpoint


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys") / "keys"
    write_key_set(directory)
    return directory


def test_keys_are_made_once(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    made = foreword("keys", str(directory))
    assert made.returncode == 0
    files = [Path(line) for line in made.stdout.splitlines()]
    assert [file.name for file in files] == ["engine.key", "engine.pub", "client.key", "client.pub"]
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    before = files[0].read_text()
    assert before.split()[-1] not in made.stdout
    assert "engine.key exists already (--force" in one_line(foreword("keys", str(directory)))
    assert files[0].read_text() == before
    assert foreword("keys", str(directory), "--force").returncode == 0
    assert files[0].read_text() != before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--endpoint", "127.0.0.1:5555"], "must start with ipc:// or tcp://"),
        (["--endpoint", "ipc://relative"], "absolute path"),
        (["--endpoint", "tcp://127.0.0.1:5555"], "--insecure"),
        (["--endpoint", "tcp://127.0.0.1:5555", "--curve-key", "K/engine.key"], "--curve-authorized go together"),
        (
            ["--endpoint", "ipc:///run/x", "--curve-key", "K/engine.key", "--curve-authorized", "K"],
            "keys are for tcp://",
        ),
        (
            ["--endpoint", "tcp://[::1]:5555", "--curve-key", "K/engine.pub", "--curve-authorized", "K"],
            "'curve-secret KEY' was expected",
        ),
        (
            ["--endpoint", "tcp://[::1]:5555", "--curve-key", "K/engine.key", "--curve-authorized", "K/none"],
            "none cannot be read",
        ),
        (["--endpoint", "tcp://192.0.2.1:5555", "--insecure"], "cannot listen at tcp://192.0.2.1:5555"),
    ],
)
def test_an_engine_that_cannot_be(keys: Path, arguments: list[str], complaint: str) -> None:
    words = [word.replace("K", str(keys), 1) if word.startswith("K") else word for word in arguments]
    assert complaint in one_line(foreword("engine", *words))


def test_an_endpoint_in_use() -> None:
    endpoint = free_tcp_endpoint()
    host, port = endpoint.removeprefix("tcp://").split(":")
    with socket.create_server((host, int(port))):
        said = one_line(foreword("engine", "--endpoint", endpoint, "--insecure"))
    assert f"cannot listen at {endpoint}: Address already in use" in said


def test_a_directory_that_others_can_enter(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert "mode 0755: others can enter it" in one_line(foreword("engine", "--endpoint", f"ipc://{tmp_path}/e"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--engine", "ipc:///x/e", "--num-blocks", "3"], "--num-blocks is a setting of the engine"),
        (["--engine", "ipc:///x/e", "--no-enable-prefix-caching"], "--enable-prefix-caching is a setting"),
        (["--engine", "http://x"], "must start with ipc:// or tcp://"),
        (["--engine", "tcp://x:1"], "--insecure"),
        (["--engine", "tcp://x:1", "--curve-key", "K/client.key"], "--curve-engine-key go together"),
        (
            ["--engine", "tcp://x:1", "--curve-key", "K/client.key", "--curve-engine-key", "K/client.key"],
            "'curve-public KEY' was expected",
        ),
        (
            [
                *["--engine", "tcp://x:1"] * 3,
                "--curve-key",
                "K/client.key",
                *["--curve-engine-key", "K/engine.pub"] * 2,
            ],
            "--curve-engine-key was given 2 times for 3 engines",
        ),
        (["--curve-key", "K/client.key"], "--curve-key is for engines elsewhere: it needs --engine"),
        (["--insecure"], "--insecure is for engines elsewhere"),
    ],
)
def test_a_frontend_that_cannot_be(keys: Path, arguments: list[str], complaint: str) -> None:
    words = [word.replace("K", str(keys), 1) if word.startswith("K") else word for word in arguments]
    assert complaint in one_line(foreword("serve", "--port", "0", *words))


def test_a_secret_key_for_everybody_is_refused(tmp_path: Path) -> None:
    write_key_set(tmp_path / "keys")
    (tmp_path / "keys" / "client.key").chmod(0o644)
    files = ["--curve-key", str(tmp_path / "keys/client.key"), "--curve-engine-key", str(tmp_path / "keys/engine.pub")]
    said = one_line(foreword("serve", "--port", "0", "--engine", "tcp://x:1", *files))
    assert "mode 0644: others can read it" in said and "chmod 600" in said
