"""What the HTTP process is told, and by what command it is started. Light enough for the command line."""

from __future__ import annotations

import socket
import sys

import msgspec

from ipc.threads import WORKER_THREADS

from .isolation import IsolationMode
from .picture_config import PictureConfig

DEFAULT_MAX_BODY_BYTES = 32 << 20
DEFAULT_DRAIN_TIMEOUT_S = 5.0


class EngineAddress(msgspec.Struct, frozen=True):
    """Where an engine is; over `tcp://`, `key_file` holds the public key it must prove to have."""

    endpoint: str
    key_file: str | None = None


class HttpConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Settings of the HTTP process.

    Args:
        engines: those to use, all of one model.
        engine_model_names: what they may call that model; empty: whatever the first to answer calls it.
        curve_key_file: this frontend's secret key, for engines that are reached over `tcp://`.
        insecure: `tcp://` without keys.
        model_dir: a local transformers directory (what `resolve_model` returns).
        model_names: what clients may call the model; the first is its own name.
        port: 0 takes a free one; the line printed when all is ready says which.
        max_body_bytes: larger request bodies are refused.
        num_prompt_threads: threads that render and tokenize short prompts.
        cache_isolation: whose requests share what is cached.
        drain_timeout_s: time that running requests have to end when the process is told to.
        pictures: for models that take any.
    """

    engines: tuple[EngineAddress, ...]
    model_dir: str
    model_names: tuple[str, ...]
    engine_model_names: tuple[str, ...] = ()
    curve_key_file: str | None = None
    insecure: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    num_prompt_threads: int = WORKER_THREADS
    drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S
    cache_isolation: IsolationMode = "salt"
    pictures: PictureConfig = PictureConfig()


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises OSError: in use, not ours, no such address."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)


def child_argv(config: HttpConfig) -> list[str]:
    """The command that runs this process with `config`."""
    return [sys.executable, "-m", "frontend.http_process", "--config", msgspec.json.encode(config).decode()]
