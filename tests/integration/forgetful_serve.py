"""`foreword serve`, broken on purpose: its pictures are all alike where they are told apart by their content.

    python -m tests.integration.forgetful_serve FIELD serve …

FIELD of every `Picture` is the same: `content_hash`, by which the KV cache knows it, or `key`, by which the caches of
model inputs and of encoder rows do.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

import frontend.cli.serve
import multimodal.pictures
from frontend.cli import main
from frontend.http_config import HttpConfig
from frontend.http_process import main as http_main
from multimodal.picture import Picture

_HTTP = "http"


def _serve(field: str) -> None:
    def child_argv(config: HttpConfig) -> list[str]:
        config_json = msgspec.json.encode(config).decode()
        return [sys.executable, "-m", "tests.integration.forgetful_serve", _HTTP, field, "--config", config_json]

    frontend.cli.serve.child_argv = child_argv
    main()


def _forget(field: str) -> None:
    def picture(**fields: Any) -> Picture:
        return Picture(**fields | {field: bytes(32)})

    multimodal.pictures.Picture = picture  # type: ignore[assignment, misc]


if __name__ == "__main__":
    if sys.argv[1] == _HTTP:
        _forget(sys.argv[2])
        del sys.argv[1:3]
        sys.exit(http_main())
    _serve(sys.argv.pop(1))
