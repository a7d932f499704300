"""An engine process around `FakeRunner`: `python -m tests.fake_engine ENDPOINT`, see its options below."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import msgspec

from engine_core.config import EngineConfig
from engine_core.engine import EngineCore
from engine_core.errors import InvalidConfigError
from engine_core.server import add_link_options, link_settings_of, run_process
from tests.fake_runner import FakeRunner
from tests.pictures_in_prompts import PICTURES


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--num-blocks", type=int, default=4096)
    parser.add_argument("--fail", action="store_true", help="do not start, as with an impossible configuration")
    parser.add_argument("--config", default="{}", help="EngineConfig as JSON")
    parser.add_argument("--name", default="fake", help="of the model")
    parser.add_argument("--tokenizer-digest", default="")
    parser.add_argument("--pictures", action="store_true", help="the model takes pictures")
    parser.add_argument("--adapter-slots", type=int, default=0, help="for LoRA adapters (tests/fake_adapters.py)")
    add_link_options(parser)
    arguments = parser.parse_args()

    def build_engine() -> EngineCore:
        if arguments.fail:
            raise InvalidConfigError("block_size: this engine was told to fail")
        config = msgspec.json.decode(arguments.config, type=EngineConfig)
        runner = FakeRunner(
            num_blocks=arguments.num_blocks,
            step_s=arguments.step_s,
            multimodal=PICTURES if arguments.pictures else None,
            num_adapter_slots=arguments.adapter_slots,
        )
        runner.info = replace(runner.info, name=arguments.name, tokenizer_digest=arguments.tokenizer_digest)
        return EngineCore(config, runner)

    return run_process(
        build_engine,
        arguments.endpoint,
        lambda: link_settings_of(arguments),
        drain_timeout_s=arguments.drain_timeout_s,
    )


if __name__ == "__main__":
    sys.exit(main())
