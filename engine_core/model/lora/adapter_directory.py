"""The files of an adapter's directory, opened so that nobody is led elsewhere and nothing blocks."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine_core.errors import AdapterError

from .refusals import invalid_adapter, quoted

WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLE_NAME = "adapter_model.bin"


@contextmanager
def open_file(path: Path, root: Path | None, name: str) -> Iterator[int]:
    """A descriptor of the regular file `name` in the directory `path`, to read from; closed afterwards.

    With `root`, a relative `path` begins there, and both must lie below it, links followed; what lies elsewhere is
    never opened, not even if a link changes meanwhile. Raises AdapterError, which tells nothing of what lies elsewhere.
    """
    directory = _resolved(path, root, path)
    try:
        if not directory.is_dir():
            if os.path.lexists(directory):
                raise invalid_adapter(f"lora_path {quoted(str(path))} is no directory")
            raise AdapterError(f"lora_path {quoted(str(path))} does not exist", "path_not_found", "lora_path")
        file = _resolved(directory / name, root, path)
        # A device may do something when it is opened, so it is not even tried.
        if not stat.S_ISREG(os.lstat(file).st_mode):
            raise invalid_adapter(f"{name} in lora_path {quoted(str(path))} is no regular file")
        descriptor = _open_below(file.parent if root is None else root.resolve(), file)
    except FileNotFoundError:
        raise _missing(directory, name, path) from None
    except OSError as error:
        raise invalid_adapter(f"{name} in lora_path {quoted(str(path))} cannot be read: {error.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _resolved(path: Path, root: Path | None, asked: Path) -> Path:
    try:
        if root is None:
            return path.resolve()
        resolved_root = root.resolve()
        resolved = (resolved_root / path).resolve()
    except (OSError, RuntimeError, ValueError):  # a name too long, links in a circle, a NUL byte
        raise AdapterError(f"lora_path {quoted(str(asked))} cannot be a path", "path_not_found", "lora_path") from None
    if not resolved.is_relative_to(resolved_root):
        raise AdapterError(
            f"lora_path {quoted(str(asked))} must lie below the directory that the engine has as lora_root, links "
            "followed",
            "outside_lora_root",
            "lora_path",
        )
    return resolved


def _open_below(root: Path, path: Path) -> int:
    """No part of a path that was resolved is a link. One that is now was put there since, and is not followed."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(root, flags | os.O_DIRECTORY)
    *directories, name = path.relative_to(root).parts
    for part in directories:
        descriptor = _open_in(descriptor, part, flags | os.O_DIRECTORY)
    return _open_in(descriptor, name, flags)


def _open_in(directory: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=directory)
    finally:
        os.close(directory)


def _missing(directory: Path, name: str, path: Path) -> AdapterError:
    if name == WEIGHTS_NAME and os.path.lexists(directory / _PICKLE_NAME):
        return invalid_adapter(
            f"lora_path {quoted(str(path))} has only {_PICKLE_NAME}, a pickle, which may run any code and is never "
            "loaded. To convert it, run this in that directory: "
            'python -c "import torch, safetensors.torch as s; '
            f"s.save_file({{k: v.contiguous() for k, v in torch.load('{_PICKLE_NAME}', map_location='cpu', "
            f"weights_only=True).items()}}, '{WEIGHTS_NAME}')\""
        )
    return AdapterError(f"lora_path {quoted(str(path))} has no {name}", "path_not_found", "lora_path")
