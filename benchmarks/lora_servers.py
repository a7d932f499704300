"""Servers with LoRA adapters, one after the other: 8 streams of the model, of one adapter, and of 8 different ones.

    python -m benchmarks.lora_servers --model smollm2 [--streams 8] [--rank 16] [--rounds 5] [--out run.json] \\
        Foreword=http://127.0.0.1:8000 vLLM=http://127.0.0.1:8001 \\
        --start Foreword='foreword serve smollm2 --enable-lora --lora-modules {modules} …' \\
        --start vLLM='vllm serve MODEL_DIR --enable-lora --lora-modules {modules} …'

In a command `{modules}` becomes `adapter-0=PATH adapter-1=PATH …`: random adapters, the same for all servers. `--model`
is what a server calls the model itself. A figure is the median over the rounds of tokens a second after the first
tokens, all streams together. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from benchmarks.lora import write_adapter
from benchmarks.started_server import started_server
from engine_core import resolve_model
from frontend.bench.meter import ask
from frontend.bench.texts import TextMaker
from frontend.openai_client import OpenAIClient

PROMPT_WORDS, OUTPUT_TOKENS = 24, 64
TIMEOUT_S = 120.0


async def tokens_per_s(url: str, models: Sequence[str], name: str) -> float:
    """Of one stream for each of `models`, all begun at one time, with prompts that are new if `name` is."""
    texts = TextMaker(0)

    def body(stream: int) -> dict[str, object]:
        return {
            "model": models[stream],
            "messages": [{"role": "user", "content": texts.words(f"{name}/{stream}", PROMPT_WORDS)}],
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }

    async with aclosing(OpenAIClient(url)) as client:
        asked = [ask(client, body(stream), timeout_s=TIMEOUT_S, stream=True) for stream in range(len(models))]
        answers = await asyncio.gather(*asked)
    for answer in answers:
        if answer.usage is None or answer.usage.completion_tokens != OUTPUT_TOKENS:
            raise RuntimeError(f"{url} answered with {answer.usage}, not with {OUTPUT_TOKENS} tokens")
    arrivals_s = [arrival_s for answer in answers for arrival_s in answer.arrivals_s]
    return len(models) * (OUTPUT_TOKENS - 1) / (max(arrivals_s) - min(arrivals_s))


def measure(url: str, model: str, adapters: Sequence[str], rounds: int) -> dict[str, float]:
    """Median tokens a second, by what the streams ask for."""
    streams = len(adapters)
    variants = {
        "the model": [model] * streams,
        "one adapter": [adapters[0]] * streams,
        f"{streams} adapters": list(adapters),
    }
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(-1, rounds):
        for name, models in variants.items():
            measured = asyncio.run(tokens_per_s(url, models, f"{number}/{name}"))
            # The first round warms up.
            if number >= 0:
                found[name].append(measured)
    return {name: statistics.median(figures) for name, figures in found.items()}


def table(measured: dict[str, dict[str, float]]) -> list[str]:
    """Markdown. Beside a figure of adapters: by how much longer a token takes than one of the model itself."""
    names = list(next(iter(measured.values())))
    lines = [f"| tokens/s | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for server, figures in measured.items():
        model = figures[names[0]]
        cells = [f"{model:.0f}", *(f"{figures[name]:.0f} ({model / figures[name] - 1:+.0%})" for name in names[1:])]
        lines.append(f"| {server} | {' | '.join(cells)} |")
    return lines


def pair(text: str) -> tuple[str, str]:
    name, separator, rest = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not like NAME=VALUE")
    return name, rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", type=pair, metavar="NAME=URL")
    parser.add_argument("--start", action="append", type=pair, required=True, metavar="NAME=COMMAND")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="all figures as JSON")
    arguments = parser.parse_args()
    commands = dict(arguments.start)
    if missing := [name for name, _ in arguments.servers if name not in commands]:
        parser.error(f"--start is missing for {missing[0]}")
    base = resolve_model(arguments.model).path
    adapters = [f"adapter-{number}" for number in range(arguments.streams)]
    measured = {}
    with tempfile.TemporaryDirectory() as directory:
        for seed, name in enumerate(adapters):
            write_adapter(base, Path(directory) / name, arguments.rank, seed)
        modules = " ".join(f"{name}={directory}/{name}" for name in adapters)
        for name, url in arguments.servers:
            with started_server(commands[name].replace("{modules}", modules), url, arguments.model):
                measured[name] = measure(url, arguments.model, adapters, arguments.rounds)
            # At once: the next server may not start.
            print("\n".join(table({name: measured[name]})), flush=True)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(measured, indent=1))
    if len(measured) > 1:
        print("\n".join(["", *table(measured)]))


if __name__ == "__main__":
    main()
