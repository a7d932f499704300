"""Key files are made private, stay private, and a wrong one is named."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import zmq

from ipc.key_files import KeyFileError, load_key_pair, load_public_key, load_public_keys, write_key_set


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_key_set(tmp_path / "keys")
    return tmp_path / "keys"


def test_a_key_set_is_two_pairs_for_nobody_else(tmp_path: Path) -> None:
    paths = write_key_set(tmp_path / "new" / "keys")
    assert [path.name for path in paths] == ["engine.key", "engine.pub", "client.key", "client.pub"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600] * 4
    assert stat.S_IMODE((tmp_path / "new" / "keys").stat().st_mode) == 0o700
    engine, client = load_key_pair(paths[0]), load_key_pair(paths[2])
    assert load_public_key(paths[1]) == engine.public == zmq.curve_public(engine.secret)
    assert load_public_key(paths[3]) == client.public != engine.public
    assert engine.secret.decode() not in repr(engine)


def test_keys_are_not_replaced_unless_told(directory: Path) -> None:
    before = {path: path.read_bytes() for path in directory.iterdir()}
    (directory / "engine.key").unlink()
    with pytest.raises(KeyFileError, match=r"engine\.pub exists already"):
        write_key_set(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["client.key", "client.pub", "engine.pub"]
    write_key_set(directory, force=True)
    after = {path: path.read_bytes() for path in directory.iterdir()}
    assert after.keys() == before.keys()
    assert all(after[path] != before[path] for path in after)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o666])
def test_a_secret_that_others_can_read_is_none(directory: Path, mode: int) -> None:
    (directory / "engine.key").chmod(mode)
    with pytest.raises(KeyFileError, match=f"mode 0{mode:o}: others can read it"):
        load_key_pair(directory / "engine.key")


def test_a_list_that_others_can_extend_is_none(directory: Path) -> None:
    (directory / "client.pub").chmod(0o644)
    assert len(load_public_keys(directory / "client.pub")) == 1
    (directory / "client.pub").chmod(0o664)
    for load in (load_public_key, load_public_keys):
        with pytest.raises(KeyFileError, match="others can write to it"):
            load(directory / "client.pub")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_can_add_to_lists_nobody(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    with pytest.raises(KeyFileError, match=f"mode {mode:04o}: others can write to it"):
        load_public_keys(directory)
    directory.chmod(0o755)
    assert len(load_public_keys(directory)) == 2


def test_many_public_keys_in_a_file_or_a_directory(directory: Path) -> None:
    engine, client = (load_public_key(directory / f"{name}.pub") for name in ("engine", "client"))
    assert load_public_keys(directory) == {engine, client}
    together = directory / "all"
    together.write_text(f"# frontends\n\ncurve-public {engine.decode()} first one\ncurve-public {client.decode()}\n")
    assert load_public_keys(together) == {engine, client}
    with pytest.raises(KeyFileError, match="2 lines"):
        load_public_key(together)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds 0 lines 'curve-secret KEY'"),
        ("curve-secret short\n", "line 1: a key is 40 characters"),
        ("# x\ncurve-secret " + "~" * 40, "line 2: a key is 40 characters"),
        ("curve-secret\n", "line 1: a line 'curve-secret KEY' was expected"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\n", "a line 'curve-secret KEY' was expected"),
    ],
)
def test_what_is_no_secret_key(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(text)
    with pytest.raises(KeyFileError, match=complaint) as caught:
        load_key_pair(file)
    assert str(file) in str(caught.value)


def test_a_public_key_is_no_secret_one_and_the_other_way_round(directory: Path) -> None:
    with pytest.raises(KeyFileError, match="'curve-secret KEY' was expected"):
        load_key_pair(directory / "engine.pub")
    secret = load_key_pair(directory / "engine.key").secret.decode()
    with pytest.raises(KeyFileError, match="'curve-public KEY' was expected") as caught:
        load_public_key(directory / "engine.key")
    assert secret not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="missing cannot be read: No such file"):
        load_key_pair(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(KeyFileError, match="is not text"):
        load_public_keys(tmp_path / "binary")
