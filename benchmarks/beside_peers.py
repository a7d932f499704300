"""Several servers of one model, asked in turn: the README's table.

    python -m benchmarks.beside_peers foreword=http://127.0.0.1:8000 vllm=http://127.0.0.1:8001 llama=http://127.0.0.1:8002

Each server is measured with `foreword bench`, round after round, every round with a seed of its own and starting with
another server; a figure is the median over the rounds. How the peers were started stands in docs/benchmarks.md. Nothing
else should run meanwhile: the servers share the cores with whatever does, and with the client.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from frontend.bench.results import Load, Result


def measure(url: str, model: str | None, parts: str, tokenizer: str | None, seed: int) -> Result:
    """One run of `foreword bench`. Raises CalledProcessError if any request failed."""
    command = "from frontend.cli import main; main()"
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run.json"
        argv = [sys.executable, "-c", command, "bench", "--url", url, "--parts", parts, "--seed", str(seed)]
        argv += ["--out", str(out), *(["--model", model] if model else [])]
        argv += ["--tokenizer", tokenizer] if tokenizer else []
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        return msgspec.json.decode(out.read_bytes(), type=Result)


def rows(result: Result) -> dict[str, float | None]:
    """The figures of one run by their names in the table; times in ms."""
    parts = result.parts
    table: dict[str, float | None] = {}
    for prefix in parts.prefix or ():
        size = f"{prefix.target_tokens:,} tokens"
        table[f"TTFT cold, {size}, ms"] = _ms(prefix.cold_ttft_s)
        table[f"TTFT warm, {size}, ms"] = _ms(prefix.warm_ttft_s)
    for decode in parts.decode or ():
        table[f"decode at {decode.target_context_tokens:,}, tokens/s"] = decode.tokens_per_s
    loads: list[tuple[str, Load | None]] = [
        ("chats", parts.chats and parts.chats.load),
        ("shared prompt", parts.shared),
        ("unique prompts", parts.unique),
    ]
    for name, load in loads:
        if load is not None:
            table[f"{name}, wall s"] = load.wall_s
            table[f"{name}, output tokens/s"] = load.output_tokens_per_s
            table[f"{name}, TTFT median, ms"] = load.ttft and _ms(load.ttft.median_s)
    if parts.tiny is not None:
        table["tiny request, ms"] = parts.tiny.plain and _ms(parts.tiny.plain.median_s)
        table["tiny request streamed, ms"] = parts.tiny.stream and _ms(parts.tiny.stream.median_s)
    return table


def print_table(measured: dict[str, list[dict[str, float | None]]]) -> None:
    """Markdown. The last column compares the first server with the best of the others."""
    first, *others = measured
    print(f"| | {' | '.join(measured)} | {first} ÷ the best other |")
    print("| --- |" + " --- |" * (len(measured) + 1))
    for name in measured[first][0]:
        values = {server: _median(run[name] for run in runs) for server, runs in measured.items()}
        better: Callable[[list[float]], float] = max if "tokens/s" in name else min
        known = [value for server in others if (value := values[server]) is not None]
        ours = values[first]
        ratio = "" if ours is None or not known else f"{ours / better(known):.2f}"
        print(f"| {name} | {' | '.join(_shown(values[server]) for server in measured)} | {ratio} |")


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL", help="the first is compared with the others")
    parser.add_argument("--model", help="what all of them call the model; default: their first")
    parser.add_argument("--tokenizer", help="the model's directory, to size prompts exactly")
    parser.add_argument("--parts", default="prefix,decode,chats,shared,unique,tiny")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    servers = dict(server.split("=", 1) for server in arguments.servers)
    names = list(servers)
    measured: dict[str, list[dict[str, float | None]]] = {name: [] for name in names}
    seed = int(time.time())
    for number in range(arguments.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            print(f"round {number + 1}: {name}", file=sys.stderr)
            result = measure(servers[name], arguments.model, arguments.parts, arguments.tokenizer, seed + number)
            measured[name].append(rows(result))
    print_table(measured)


if __name__ == "__main__":
    main()
