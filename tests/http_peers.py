"""The HTTP process, for tests of it and of what it talks to."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO

import httpx
import msgspec

from frontend.http_config import HttpConfig, child_argv
from tests.wire_peers import ROOT, free_tcp_endpoint, wait_until


@contextmanager
def http_process(
    config: HttpConfig, *, log: IO[bytes] | int = subprocess.PIPE, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yields the process and its URL, once there is an engine. `log` gets its standard error."""
    process = subprocess.Popen(
        child_argv(config),
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            urls = (re.match(r"curl (http://[^/]+)/v1/", line) for line in process.stdout)
            yield process, next(url[1] for url in urls if url)
        finally:
            process.kill()


@contextmanager
def answering_http_process(config: HttpConfig) -> Iterator[str]:
    """Yields the process's URL once it answers, whether there is an engine or not."""
    port = int(free_tcp_endpoint().rsplit(":", 1)[1])
    url = f"http://127.0.0.1:{port}"
    argv = child_argv(msgspec.structs.replace(config, port=port))
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: _answers(url), 60)
        yield url
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/version").is_success
    except httpx.TransportError:
        return False
