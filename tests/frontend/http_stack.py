"""The HTTP process and an engine process with a fake model, seen from outside: answers, `/metrics`, the log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from frontend.http_config import EngineAddress, HttpConfig
from tests.http_peers import http_process
from tests.wire_peers import private_endpoint, start_engine, wait_until

MODEL_NAME = "tiny"
# (name, labels besides model_name, engine and le)
Sample = tuple[str, tuple[str, ...]]


class Scrape:
    """What `/metrics` showed at one time."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.values: dict[Sample, float] = {}
        self.labels: dict[str, set[tuple[str, ...]]] = {}
        for family in self.families.values():
            for sample in family.samples:
                own = [value for key, value in sample.labels.items() if key not in {"model_name", "engine", "le"}]
                self.values[sample.name.removeprefix("foreword:"), tuple(own)] = sample.value
                self.labels.setdefault(sample.name, set()).add(tuple(sorted(sample.labels)))

    def __call__(self, name: str, *labels: str) -> float:
        return self.values[name, labels]


class Stack:
    """`engine` is running from the start; `url` and `http` are there once requests are answered."""

    url: str
    http: httpx.Client

    def __init__(self, endpoint: str, log: Path, *engine_options: str) -> None:
        self._endpoint = endpoint
        self._log = log
        self._engine_options = engine_options
        self.start_engine()

    def start_engine(self) -> None:
        self.engine = start_engine(self._endpoint, 0.0, *self._engine_options)

    def kill_engine(self) -> None:
        self.engine.kill()
        self.engine.wait()

    def wait_ready(self) -> None:
        wait_until(lambda: self.http.get("/health").status_code == 200)

    def scrape(self) -> Scrape:
        return Scrape(self.http.get("/metrics").raise_for_status().text)

    def complete(self, prompt: Any, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]


@contextmanager
def http_stack(
    directory: Path, model_dir: Path, *engine_options: str, num_blocks: int = 4096, **settings: Any
) -> Iterator[Stack]:
    """Yields when requests are answered. `settings` go to `HttpConfig`; the log is JSON."""
    endpoint = private_endpoint(directory)
    config = HttpConfig(
        engines=(EngineAddress(endpoint),), model_dir=str(model_dir), model_names=(MODEL_NAME,), port=0, **settings
    )
    stack = Stack(endpoint, directory / "log", "--num-blocks", str(num_blocks), *engine_options)
    try:
        with (
            (directory / "log").open("wb") as log,
            http_process(config, log=log, environment={"FOREWORD_LOG_FORMAT": "json"}) as (_, stack.url),
            httpx.Client(base_url=stack.url, timeout=60) as stack.http,
        ):
            yield stack
    finally:
        stack.kill_engine()
