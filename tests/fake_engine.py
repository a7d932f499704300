"""An engine process around `FakeRunner`: `python -m tests.fake_engine ENDPOINT`, see its options below."""

from __future__ import annotations

import argparse
import sys

import msgspec

from engine_core.config import EngineConfig
from engine_core.engine import EngineCore
from engine_core.errors import InvalidConfigError
from engine_core.server import run_process
from tests.fake_runner import FakeRunner


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--num-blocks", type=int, default=4096)
    parser.add_argument("--fail", action="store_true", help="do not start, as with an impossible configuration")
    parser.add_argument("--config", default="{}", help="EngineConfig as JSON")
    arguments = parser.parse_args()

    def build_engine() -> EngineCore:
        if arguments.fail:
            raise InvalidConfigError("block_size: this engine was told to fail")
        config = msgspec.json.decode(arguments.config, type=EngineConfig)
        return EngineCore(config, FakeRunner(num_blocks=arguments.num_blocks, step_s=arguments.step_s))

    return run_process(build_engine, arguments.endpoint)


if __name__ == "__main__":
    sys.exit(main())
