"""`file:` URLs: files of the machine that serves, below one folder."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .errors import MediaError

NOT_FOLLOWED = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
OUTSIDE = "this server loads files only from below the folder its operator allows"


def read_local_file(url: str, root: Path | None, max_bytes: int) -> bytes:
    """The content of a regular file below `root`, which is resolved (`Path.resolve`); None: of no file.

    Symbolic links count as what they point to. What lies outside gets one answer, whether it exists or not. The path is
    opened folder by folder without following links, so swapping one in after it was resolved leads nowhere. Blocks.
    Raises MediaError.
    """
    if root is None:
        raise MediaError("this server loads no file: URLs")
    return _read(root, _relative_path(url, root), max_bytes)


def _relative_path(url: str, root: Path) -> Path:
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise MediaError("a file: URL names a path of the server, file:///path, and no host")
        path = Path(unquote(parts.path, errors="strict"))
        if not path.is_absolute():
            raise MediaError("a file: URL needs an absolute path, file:///path")
        resolved = path.resolve()
    except MediaError:
        raise
    except (ValueError, OSError, RuntimeError) as error:  # NUL bytes, no UTF-8, names too long, loops of links
        raise MediaError("the path of the file: URL cannot be read") from error
    if root not in resolved.parents:
        raise MediaError(OUTSIDE)
    return resolved.relative_to(root)


def _read(root: Path, relative: Path, max_bytes: int) -> bytes:
    file = _open(root, relative)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise MediaError("the file: URL names no regular file")
        _check_size(status.st_size, max_bytes)
        with open(file, "rb", closefd=False) as opened:
            content = opened.read(max_bytes + 1)
    except OSError as error:
        raise MediaError("the file cannot be read") from error
    finally:
        os.close(file)
    _check_size(len(content), max_bytes)
    return content


def _open(root: Path, relative: Path) -> int:
    *folders, name = relative.parts
    try:
        folder = os.open(root, NOT_FOLLOWED | os.O_DIRECTORY)
        try:
            for part in folders:
                inner = os.open(part, NOT_FOLLOWED | os.O_DIRECTORY, dir_fd=folder)
                os.close(folder)
                folder = inner
            # A pipe nobody writes to must not keep a thread.
            return os.open(name, NOT_FOLLOWED | os.O_NONBLOCK, dir_fd=folder)
        finally:
            os.close(folder)
    except FileNotFoundError as error:
        raise MediaError("there is no such file") from error
    except OSError as error:
        reason = OUTSIDE if error.errno in (errno.ELOOP, errno.ENOTDIR) else "the file cannot be opened"
        raise MediaError(reason) from error


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise MediaError(f"the file has {num_bytes} bytes, more than {max_bytes}")
