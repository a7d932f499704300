"""How well a model foretells a text, in each type and quantization: `python -m benchmarks.perplexity smollm2`,
with `--kv-cache-dtype auto int8 fp8_e4m3` with each of these caches, too.

The text is cut into contexts, each computed by itself through the engine (`prompt_logprobs`). Perplexity is e to the
mean negative log-probability of all tokens that something precedes. Where the tokenizer puts something before a text
(BOS), every context begins with it. Fewer bits should raise it by little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import transformers

from engine_core import EngineConfig, EngineCore, EngineRequest, SamplingParams, resolve_model
from engine_core.config import KVCacheDtype

TEXT = Path(__file__).parent.parent / "tests" / "data" / "text" / "engineers_thumb.txt"
# dtype, and what weights are quantized to
VARIANTS = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}


def contexts_of(token_ids: Sequence[int], num_tokens: int, before: Sequence[int] = ()) -> list[list[int]]:
    """Contexts of so many tokens: `before`, and a part of `token_ids`. A single one says nothing and is left out."""
    step = num_tokens - len(before)
    contexts = [[*before, *token_ids[start : start + step]] for start in range(0, len(token_ids), step)]
    return [context for context in contexts if len(context) > 1]


def perplexity(logprobs: Sequence[float]) -> float:
    """Of tokens with these log-probabilities."""
    return math.exp(-sum(logprobs) / len(logprobs))


def token_logprobs(engine: EngineCore, contexts: Sequence[Sequence[int]]) -> list[float]:
    """Of all tokens that something precedes, each given those before it in its context.

    Raises:
        RuntimeError: the engine failed at one.
    """
    for index, token_ids in enumerate(contexts):
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        engine.add_request(EngineRequest(str(index), list(token_ids), params))
    logprobs: list[float] = []
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            if output.finish_reason == "error":
                raise RuntimeError(f"context {output.request_id} failed: {output.error}")
            logprobs += [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
    assert len(logprobs) == sum(len(token_ids) - 1 for token_ids in contexts)
    return logprobs


def decode_ms(engine: EngineCore, num_requests: int, num_tokens: int) -> float:
    """Milliseconds of a step that continues so many short requests; the fastest of `num_tokens`."""
    for index in range(num_requests):
        params = SamplingParams(temperature=0, max_tokens=num_tokens + 2, ignore_eos=True)
        engine.add_request(EngineRequest(f"decode-{index}", [7 + index] * 16, params))
    engine.step()
    fastest = math.inf
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        engine.step()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory, a .gguf file or a built-in model's name")
    parser.add_argument("--quantization", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    parser.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDtype), nargs="+", default=["auto"])
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--decode-tokens", type=int, default=64, help="for the speed of decodes; 0: do not measure it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    model = resolve_model(arguments.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.path, local_files_only=True)
    token_ids = tokenizer(arguments.text.read_text(), add_special_tokens=False).input_ids
    contexts = contexts_of(token_ids, arguments.context, before=tokenizer("").input_ids)
    print(f"{arguments.text.name}: {sum(map(len, contexts))} tokens in {len(contexts)} contexts", file=sys.stderr)
    results = {}
    first: np.ndarray | None = None
    columns = ["perplexity", "from the first: mean", "99 % below", "largest", "decode of 1, ms", "of 8, ms"]
    print(f"| | cache | {' | '.join(columns)} |\n{'| --- ' * (2 + len(columns))}|")
    for name, kv_cache_dtype in itertools.product(arguments.quantization, arguments.kv_cache_dtype):
        dtype, quantization = VARIANTS[name]
        engine = EngineCore(
            EngineConfig(
                model=str(model.path),
                dtype=dtype,
                quantization=quantization,
                kv_cache_dtype=kv_cache_dtype,
                device="cpu",
                kv_cache_memory_bytes=1 << 30,
                enable_prefix_caching=False,
            )
        )
        logprobs = token_logprobs(engine, contexts)
        first = np.array(logprobs) if first is None else first
        apart = np.abs(np.array(logprobs) - first)
        found = {"perplexity": perplexity(logprobs), "mean": apart.mean(), "p99": np.quantile(apart, 0.99)}
        found["largest"] = apart.max()
        if arguments.decode_tokens:
            found |= {f"decode_ms_{rows}": decode_ms(engine, rows, arguments.decode_tokens) for rows in (1, 8)}
        results[f"{name}, {kv_cache_dtype}"] = found
        print(f"| {name} | {kv_cache_dtype} | {' | '.join(f'{value:.3f}' for value in found.values())} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
