"""CURVE keys in files: made by `foreword keys`, read by engines and frontends that talk over TCP.

A file holds lines of `curve-secret KEY` (one) or `curve-public KEY` (any number), KEY being Z85, anything after it a
remark. Empty lines and lines that begin with `#` mean nothing.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

_KEY_CHARS = 40
_MAX_FILE_BYTES = 1 << 20
_SECRET, _PUBLIC = "curve-secret", "curve-public"


class KeyFileError(ValueError):
    """A key file is missing, not private, or not what it should be. The message names the file."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both as Z85. The secret one stays out of logs and tracebacks."""

    public: bytes
    secret: bytes = field(repr=False)


def write_key_set(directory: Path, *, force: bool = False) -> list[Path]:
    """Make one key pair for engines and one for frontends: `engine.key`, `engine.pub`, `client.key`, `client.pub`.

    `directory` is made if it is not there; it and the files are the user's alone. Returns the files.

    Raises:
        KeyFileError: a file of that name exists and `force` is false (then nothing was written).
        OSError: they cannot be written.
    """
    _require_curve()
    paths = [directory / name for name in ("engine.key", "engine.pub", "client.key", "client.pub")]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not force and (existing := [path for path in paths if path.exists()]):
        raise KeyFileError(f"{existing[0]} exists already (--force replaces all four files)")
    for owner, (secret_path, public_path) in {"engine": paths[:2], "client": paths[2:]}.items():
        public, secret = zmq.curve_keypair()
        _write_private(secret_path, f"# Whoever has this key is the {owner}.\n{_SECRET} {secret.decode()}\n")
        _write_private(public_path, f"{_PUBLIC} {public.decode()} {owner}\n")
    return paths


def load_key_pair(path: Path) -> KeyPair:
    """The pair whose secret key is in `path`.

    Raises KeyFileError; also where others can read the file: it is no secret then.
    """
    _require_curve()
    keys = _read(path, _SECRET, forbidden_mode=0o077)
    if len(keys) != 1:
        raise KeyFileError(f"{path} holds {len(keys)} lines '{_SECRET} KEY'; there must be one")
    return KeyPair(zmq.curve_public(keys[0]), keys[0])


def load_public_key(path: Path) -> bytes:
    """The only public key in `path`. Raises KeyFileError."""
    keys = _read(path, _PUBLIC, forbidden_mode=0o022)
    if len(keys) != 1:
        raise KeyFileError(f"{path} holds {len(keys)} lines '{_PUBLIC} KEY'; there must be one")
    return keys[0]


def load_public_keys(path: Path) -> frozenset[bytes]:
    """All public keys in `path`, a file, or in the `*.pub` files of `path`, a directory.

    Raises KeyFileError; also where others can write to a file or the directory: they could add themselves.
    """
    files = [path]
    try:
        if path.is_dir():
            _check_mode(path, path.stat(), 0o022, "write to it (run: chmod go-w")
            files = sorted(path.glob("*.pub"))
    except OSError as error:
        raise KeyFileError(f"the directory {path} cannot be read: {error.strerror}") from error
    return frozenset(key for file in files for key in _read(file, _PUBLIC, forbidden_mode=0o022))


def _read(path: Path, kind: str, *, forbidden_mode: int) -> list[bytes]:
    """The keys of `kind`."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(_MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise KeyFileError(f"the key file {path} cannot be read: {reason}") from error
    _check_mode(path, status, forbidden_mode, f"{'read' if kind == _SECRET else 'write to'} it (run: chmod 600")
    keys: list[bytes] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] != kind or len(words) < 2:
            raise KeyFileError(f"{path}, line {number}: a line '{kind} KEY' was expected")
        keys.append(_checked(words[1], path, number))
    return keys


def _check_mode(path: Path, status: os.stat_result, forbidden_mode: int, complaint: str) -> None:
    """What our own files may not allow, others' may still allow their group: a system that hands out keys does that."""
    mode = stat.S_IMODE(status.st_mode)
    if mode & (forbidden_mode if status.st_uid == os.geteuid() else forbidden_mode & 0o007):
        raise KeyFileError(f"{path} has mode {mode:04o}: others can {complaint} {path})")


def _checked(text: str, path: Path, line_number: int) -> bytes:
    key = text.encode()
    try:
        if len(key) != _KEY_CHARS:
            raise ValueError
        zmq.curve_public(key)  # fails for what is no Z85; which kind of key it is makes no difference
    except (ValueError, zmq.ZMQError) as error:
        raise KeyFileError(f"{path}, line {line_number}: a key is {_KEY_CHARS} characters of Z85") from error
    return key


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise KeyFileError("this ZeroMQ library was built without CURVE; install pyzmq from its wheels")
