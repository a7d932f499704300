"""Several servers of one model, asked in turn: the README's table, with the goals beside it.

    python -m benchmarks.beside_peers --model smollm2 --tokenizer MODEL_DIR --out run.json \\
        Foreword=http://127.0.0.1:8000 vLLM=http://127.0.0.1:8001 llama-server=http://127.0.0.1:8002 \\
        --start Foreword='foreword serve smollm2 --port 8000 …' --start vLLM='vllm serve …' --start llama-server='…'

A server with a command is started for each round and ended after it, so that only one is there at a time: the time
until its first answer is measured then, and the memory of all its processes after the round. One without a command has
to run already, with its share of memory and cores. Each is measured with `foreword bench`, round after round, every
round with a seed of its own and starting with another server; a figure is the median over the rounds. Commands for the
peers stand in docs/benchmarks.md. Nothing else should run meanwhile: the servers share the cores with whatever does,
and with the client.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import httpx
import msgspec

from benchmarks.peer_table import MEMORY, START, Rows, rows, table
from benchmarks.started_server import Memory, started_server
from frontend.bench.results import Parts, Result


class Machine(msgspec.Struct):
    cpu: str
    num_cpus: int
    memory_bytes: int
    kernel: str
    python: str


class Run(msgspec.Struct):
    """One server in one round. What only its start tells is null for a server that ran already."""

    server: str
    round: int
    result: Result
    start_s: float | None = None
    memory: Memory | None = None


class Report(msgspec.Struct):
    """`versions` are those of this environment and what the servers said theirs is, where they did."""

    date: str
    machine: Machine
    versions: dict[str, str]
    commands: dict[str, str]
    runs: list[Run] = []
    format: str = "foreword-beside-peers-1"


def measure(url: str, model: str | None, parts: str, tokenizer: str | None, seed: int, *, quick: bool) -> Result:
    """One run of `foreword bench`. Raises CalledProcessError if any request failed."""
    command = "from frontend.cli import main; main()"
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run.json"
        argv = [sys.executable, "-c", command, "bench", "--url", url, "--parts", parts, "--seed", str(seed)]
        argv += ["--out", str(out), *(["--model", model] if model else []), *["--quick"] * quick]
        argv += ["--tokenizer", tokenizer] if tokenizer else []
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        return msgspec.json.decode(out.read_bytes(), type=Result)


def machine() -> Machine:
    info = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return Machine(
        cpu=names[0] if names else platform.machine(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
    )


def server_version(url: str) -> str | None:
    """What the server says, where vLLM and Foreword do or where llama-server does."""
    for path, field in (("version", "version"), ("props", "build_info")):
        try:
            told = httpx.get(f"{url}/{path}", trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            continue
        if isinstance(told, dict) and isinstance(told.get(field), str):
            return str(told[field])
    return None


def figures(run: Run) -> Rows:
    table_rows = rows(run.result)
    if run.start_s is not None:
        table_rows[START] = run.start_s
    if run.memory is not None:
        table_rows[MEMORY] = run.memory.pss_bytes / 2**20
    return table_rows


def print_report(report: Report, names: list[str]) -> None:
    print("\n".join(table({name: [figures(run) for run in report.runs if run.server == name] for name in names})))
    m = report.machine
    told = ", ".join(f"{name} {told}" for name, told in report.versions.items())
    print(f"\n{report.date}; {m.num_cpus} × {m.cpu}, {m.memory_bytes / 2**30:.0f} GiB, Linux {m.kernel}; {told}")


def _pairs(values: list[str], parser: argparse.ArgumentParser) -> dict[str, str]:
    if malformed := [value for value in values if not all(value.partition("=")[::2])]:
        parser.error(f"{malformed[0]!r} is not NAME=…")
    return dict(value.split("=", 1) for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL", help="the first is compared with the others")
    parser.add_argument(
        "--start", action="append", default=[], metavar="NAME=COMMAND", help="what starts this server, for a shell"
    )
    parser.add_argument("--model", help="what all of them call the model; default: their first")
    parser.add_argument("--tokenizer", help="the model's directory, to size prompts exactly")
    parser.add_argument("--parts", default=",".join(Parts.__struct_fields__))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller requests: a first look")
    parser.add_argument("--out", type=Path, help="write all figures of all rounds as JSON, after each")
    arguments = parser.parse_args()
    servers, commands = _pairs(arguments.servers, parser), _pairs(arguments.start, parser)
    if unknown := commands.keys() - servers.keys():
        parser.error(f"--start: there is no server {unknown.pop()!r}")
    names = list(servers)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {"torch": version("torch"), "transformers": version("transformers")}
    report = Report(now, machine(), versions, commands)
    seed = int(time.time())

    def run_once(name: str, number: int) -> Run:
        settings = (arguments.model, arguments.parts, arguments.tokenizer, seed + number)
        url = servers[name]
        if name not in commands:
            result = measure(url, *settings, quick=arguments.quick)
            report.versions[name] = server_version(url) or "?"
            return Run(name, number, result)
        with started_server(commands[name], url, arguments.model) as server:
            result = measure(url, *settings, quick=arguments.quick)
            report.versions[name] = server_version(url) or "?"
            return Run(name, number, result, server.start_s, server.memory())

    try:
        for number in range(arguments.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                print(f"round {number + 1}: {name}", file=sys.stderr)
                report.runs.append(run_once(name, number))
                if arguments.out:
                    arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    finally:
        # A round takes minutes: what was measured is shown however it ends.
        print_report(report, names)


if __name__ == "__main__":
    main()
