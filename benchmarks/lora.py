"""What LoRA adapters cost: steps without them, with one, with as many as there are requests; and loading one meanwhile.

    python -m benchmarks.lora [--model smollm2] [--rows 8] [--rank 16] [--rounds 10] [--out run.json]

Adapters are random, of every linear layer of the decoder. One engine knows no adapters, the other has one for each
request. Both live in one process and are asked in turn, round after round. A figure is the median wall time of an
`EngineCore.step`. Then adapters are loaded by another thread while requests decode: the longest step of each load
stands beside the longest of as many steps in which nothing was loaded. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engine_bench import decoding, random_tokens
from benchmarks.in_turn import Case, measure, numbers, step_s, table
from engine_core import EngineConfig, EngineCore, EngineRequest, SamplingParams, resolve_model
from ipc.process import spare_garbage_collector

BLOCK_SIZE = 16
STEPS_A_ROUND = 8
NUM_LOADS = 9
# As many steps as may pass while one adapter is loaded.
MOST_STEPS_OF_A_LOAD = 400
FIRST_PROMPT_TOKENS = 16

WITHOUT, UNUSED, ONE = "without LoRA", "enabled, unused", "one adapter"


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine, and what its requests ask for in turn."""

    engine: EngineCore
    adapters: Sequence[str]


@dataclass(frozen=True, slots=True)
class Load:
    """Of one adapter: how long it took, and steps meanwhile. `joined_s` are the steps in which the first request that
    asks for it is computed, and one that is alike when it has a slot already.
    """

    took_s: float
    usual_step_s: float
    longest_step_s: float
    longest_otherwise_s: float
    joined_s: tuple[float, float]

    @property
    def stall_in_steps(self) -> float:
        """By how many usual steps the longest was later than usual."""
        return self.longest_step_s / self.usual_step_s - 1


def write_adapter(model: Path, directory: Path, rank: int, seed: int) -> Path:
    """A random adapter of all linear layers but the output head, as PEFT writes one. Returns its directory."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, local_files_only=True))
    generator = torch.Generator().manual_seed(seed)
    tensors, targets = {}, set()
    for path, module in base.named_modules():
        if isinstance(module, nn.Linear) and module is not base.get_output_embeddings():
            targets.add(path.rpartition(".")[2])
            for name, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                values = torch.randn(shape, generator=generator) * 0.01
                tensors[f"base_model.model.{path}.lora_{name}.weight"] = values
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(targets)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def decode(num_rows: int, num_context_tokens: int) -> Case[Variant]:
    def times_s(variant: Variant, number: int) -> list[float]:
        with decoding(variant.engine, num_rows, num_context_tokens, adapters=variant.adapters):
            return [step_s(variant.engine) for _ in range(STEPS_A_ROUND)]

    return Case(f"{num_rows} decodes after {num_context_tokens:,}", times_s)


def prefill(num_rows: int, num_tokens: int) -> Case[Variant]:
    """All in one step; nothing of them is cached."""

    def times_s(variant: Variant, number: int) -> list[float]:
        engine = variant.engine
        for row in range(num_rows):
            name = f"prefill-{num_tokens}-{number}-{row}-{'-'.join(variant.adapters)}"
            adapter = variant.adapters[row % len(variant.adapters)] if variant.adapters else ""
            engine.add_request(request(engine, name, num_tokens, adapter))
        try:
            return [step_s(engine)]
        finally:
            finish(engine)

    return Case(f"{num_rows} prompts of {num_tokens:,}", times_s)


def request(engine: EngineCore, name: str, num_tokens: int, adapter: str) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=1)
    return EngineRequest(name, random_tokens(engine, name, num_tokens), params, adapter=adapter)


def finish(engine: EngineCore) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def load_meanwhile(engine: EngineCore, path: Path, name: str, num_rows: int, num_context_tokens: int) -> Load:
    """Load an adapter, ask for it twice, and unload it, while `num_rows` requests decode."""

    def load() -> float:
        started_s = time.perf_counter()
        engine.load_adapter(name, path)
        return time.perf_counter() - started_s

    with decoding(engine, num_rows, num_context_tokens), ThreadPoolExecutor(1) as thread:
        loading, meanwhile_s = thread.submit(load), []
        while not loading.done():
            meanwhile_s.append(step_s(engine))
        otherwise_s = [step_s(engine) for _ in meanwhile_s]
        joined_s = []
        for turn in range(2):
            engine.add_request(request(engine, f"{name}-{turn}", FIRST_PROMPT_TOKENS, name))
            joined_s.append(step_s(engine))
        engine.unload_adapter(name)
    return Load(
        took_s=loading.result(),
        usual_step_s=statistics.median(otherwise_s),
        longest_step_s=max(meanwhile_s),
        longest_otherwise_s=max(otherwise_s),
        joined_s=(joined_s[0], joined_s[1]),
    )


def load_table(loads: Sequence[Load], rank: int) -> list[str]:
    """Markdown: medians over all loads."""

    def median_ms(values: Sequence[float]) -> str:
        return f"{statistics.median(values) * 1e3:.1f}"

    stalls = [load.stall_in_steps for load in loads]
    rows = {
        "loading takes": median_ms([load.took_s for load in loads]),
        "a usual step": median_ms([load.usual_step_s for load in loads]),
        "the longest step of a load": median_ms([load.longest_step_s for load in loads]),
        "the longest of as many without a load": median_ms([load.longest_otherwise_s for load in loads]),
        "the step that computes the first request with it": median_ms([load.joined_s[0] for load in loads]),
        "the step that computes one more": median_ms([load.joined_s[1] for load in loads]),
        "stall of the longest step, in usual steps": f"{statistics.median(stalls):.2f} (at most {max(stalls):.2f})",
    }
    title = f"ms, medians of {len(loads)} loads of rank {rank}"
    return [f"| {title} | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, help="default: as the engine decides")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rows", type=int, default=8, help="how many requests there are at once")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--contexts", default="32,1024", help="after how many tokens they decode")
    parser.add_argument("--prompts", default="128", help="sizes of prompts that are computed at once")
    parser.add_argument("--loads", type=int, default=NUM_LOADS)
    parser.add_argument("--out", type=Path, help="all figures as JSON")
    arguments = parser.parse_args()
    rows, contexts, prompts = arguments.rows, numbers(arguments.contexts), numbers(arguments.prompts)
    model = resolve_model(arguments.model).path
    longest = max(*contexts, *prompts)
    settings: dict[str, Any] = {
        "model": str(model),
        "dtype": arguments.dtype,
        "device": "cpu",
        "num_threads": arguments.threads,
        "block_size": BLOCK_SIZE,
        # For all prompts that are to stay in the cache: without an adapter, with one, each with its own.
        "num_blocks": 4 * rows * (longest + MOST_STEPS_OF_A_LOAD) // BLOCK_SIZE,
        "max_num_batched_tokens": max(2048, rows * max(prompts)),
        # A request that asks for a new adapter joins those that decode.
        "max_num_seqs": rows + 1,
        "max_model_len": longest + 2 * MOST_STEPS_OF_A_LOAD,
    }
    with tempfile.TemporaryDirectory() as directory:
        names = [f"adapter-{number}" for number in range(rows)]
        paths = [write_adapter(model, Path(directory) / name, arguments.rank, seed) for seed, name in enumerate(names)]
        plain = EngineCore(EngineConfig(**settings))
        able = EngineCore(EngineConfig(**settings, enable_lora=True, max_loras=rows, max_lora_rank=arguments.rank))
        for name, path in zip(names, paths, strict=True):
            able.load_adapter(name, path)
        # As an engine's process does before it serves.
        spare_garbage_collector()
        variants = {
            WITHOUT: Variant(plain, ()),
            UNUSED: Variant(able, ()),
            ONE: Variant(able, names[:1]),
            f"{rows} adapters": Variant(able, names),
        }
        cases = [decode(rows, context) for context in contexts] + [prefill(rows, size) for size in prompts]
        steps_s = measure(variants, cases, arguments.rounds)
        new = write_adapter(model, Path(directory) / "new", arguments.rank, seed=rows)
        loads = [load_meanwhile(able, new, f"new-{number}", rows, contexts[0]) for number in range(arguments.loads)]
    print("\n".join([*table(steps_s), "", *load_table(loads, arguments.rank)]))
    if arguments.out is not None:
        report = {"rank": arguments.rank, "steps_s": steps_s, "loads": [asdict(load) for load in loads]}
        arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
