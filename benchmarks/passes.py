"""What each pass over the model buys: steps of engines that have all of them, all but one, and none.

    python -m benchmarks.passes [--dtype float32] [--rounds 5] [--rows 1,8] [--contexts 32,2048] [--prompts 256,1024]

The engines live in one process and are asked in turn, round after round. A figure is the median wall time of an
`EngineCore.step` in ms, with what it takes longer than with all passes. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.engine_bench import decoding, prefilling
from benchmarks.in_turn import Case, measure, numbers, step_s, table
from engine_core import EngineConfig, EngineCore, resolve_model

# The switches of `EngineConfig` that stand for a pass.
PASSES = ("fuse_layers", "prepack_weights", "linear_kernel")

BLOCK_SIZE = 16
STEPS_A_ROUND = 8


def decode(num_rows: int, num_context_tokens: int) -> Case[EngineCore]:
    def times_s(engine: EngineCore, number: int) -> list[float]:
        with decoding(engine, num_rows, num_context_tokens):
            return [step_s(engine) for _ in range(STEPS_A_ROUND)]

    return Case(f"{num_rows} decode{'s' * (num_rows > 1)} after {num_context_tokens:,}", times_s)


def prefill(num_tokens: int) -> Case[EngineCore]:
    def times_s(engine: EngineCore, number: int) -> list[float]:
        with prefilling(engine, f"prefill-{num_tokens}-{number}", num_tokens):
            return [step_s(engine)]

    return Case(f"prefill of {num_tokens:,}", times_s)


def make_engines(passes: Sequence[str], settings: dict[str, Any]) -> dict[str, EngineCore]:
    """By what they are called in the table; the first has all passes. `settings` are those of `EngineConfig`."""
    variants: dict[str, dict[str, bool]] = {"all": {}}
    variants |= {f"without {name}": {name: False} for name in passes}
    variants["none"] = dict.fromkeys(passes, False)
    return {name: EngineCore(EngineConfig(**settings, **switches)) for name, switches in variants.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, help="default: as the engine decides")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="1,8", help="how many requests decode")
    parser.add_argument("--contexts", default="32,2048", help="after how many tokens")
    parser.add_argument("--prompts", default="256,1024", help="sizes of prefills")
    parser.add_argument("--passes", default=",".join(PASSES), help="those to switch off, with commas between them")
    arguments = parser.parse_args()
    rows, contexts, prompts = (numbers(text) for text in (arguments.rows, arguments.contexts, arguments.prompts))
    # Room for the prompts of all decodes, which are to stay in the cache, and for as many tokens that come and go.
    num_tokens = max(prompts) + sum(max(rows) * (context + STEPS_A_ROUND + BLOCK_SIZE) for context in contexts)
    settings = {
        "model": str(resolve_model(arguments.model).path),
        "dtype": arguments.dtype,
        "device": "cpu",
        "num_threads": arguments.threads,
        "block_size": BLOCK_SIZE,
        "num_blocks": 2 * num_tokens // BLOCK_SIZE,
        "max_num_batched_tokens": max(2048, *prompts),
        "max_num_seqs": max(rows),
        "max_model_len": max(*contexts, *prompts) + 2 * STEPS_A_ROUND,
    }
    cases = [decode(count, context) for count in rows for context in contexts] + [prefill(size) for size in prompts]
    engines = make_engines(arguments.passes.split(","), settings)
    print("\n".join(table(measure(engines, cases, arguments.rounds))))


if __name__ == "__main__":
    main()
