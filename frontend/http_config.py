"""What the HTTP process is told, and by what command it is started. Light enough for the command line."""

from __future__ import annotations

import socket
import sys

import msgspec

DEFAULT_MAX_BODY_BYTES = 32 << 20


class HttpConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Settings of the HTTP process.

    Args:
        endpoint: the engine's.
        model_dir: a local transformers directory (what `resolve_model` returns).
        model_names: what clients may call the model; the first is its own name.
        port: 0 takes a free one; the line printed when all is ready says which.
        max_body_bytes: larger request bodies are refused.
        num_prompt_threads: threads that render and tokenize short prompts.
        drain_timeout_s: time that running requests have to end when the process is told to.
    """

    endpoint: str
    model_dir: str
    model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    num_prompt_threads: int = 2
    drain_timeout_s: float = 5.0


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises OSError: in use, not ours, no such address."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)


def child_argv(config: HttpConfig) -> list[str]:
    """The command that runs this process with `config`."""
    return [sys.executable, "-m", "frontend.http_process", "--config", msgspec.json.encode(config).decode()]
