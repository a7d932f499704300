"""An engine process that computes nothing: each request's output is its prompt, over and over.

    python -m benchmarks.echo_engine ipc:///run/user/1000/foreword-x/engine VOCAB_SIZE

Scheduler, block pool and wire are the real ones; what is left of a request's time is the frontend's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine_core import EngineConfig
from engine_core.engine import EngineCore
from engine_core.runner import ComputedStep, ModelInfo, ScheduledRequest, SlotCopy, StepResult
from engine_core.server import run_process


class EchoRunner:
    """A `Runner` whose tokens are those of the prompt, from its start."""

    def __init__(self, vocab_size: int, num_blocks: int = 65_536, block_size: int = 16) -> None:
        self.info = ModelInfo("echo", vocab_size, 8192, frozenset(), num_blocks, "00")

    def copy_slots(self, copies: Sequence[SlotCopy]) -> None:
        pass

    def launch(self, batch: Sequence[ScheduledRequest]) -> ComputedStep:
        return ComputedStep(StepResult([_next_token(entry) if entry.samples else None for entry in batch]))


def _next_token(entry: ScheduledRequest) -> int:
    request = entry.request
    return request.token_ids[request.num_output_tokens % request.num_prompt_tokens]


def main() -> int:
    endpoint, vocab_size = sys.argv[1:]
    config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=8192)
    return run_process(lambda: EngineCore(config, EchoRunner(int(vocab_size))), endpoint)


if __name__ == "__main__":
    sys.exit(main())
