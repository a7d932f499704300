"""What the prefix cache saves: time to first token, cold and warm, of any OpenAI-compatible server.

    python -m benchmarks.cold_warm --base-url http://127.0.0.1:8000/v1 [--words 200 800 1600] [--repeats 3]

Each prompt is unique to this run and sent twice; the figure is the ratio of the two times, both from one run. A server
that reports `prompt_tokens_details.cached_tokens` shows what the second one found.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass

import httpx

WORDS = (
    "river mountain garden paper window music story market winter summer letter engine captain village history "
    "science machine number question answer teacher student kitchen station forest island bridge company weather"
).split()


@dataclass
class Measurement:
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int | None


def measure(client: httpx.Client, model: str, prompt: str) -> Measurement:
    """One streamed request; `ttft_s` is the time to the first content, or to the end of an empty answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, ttft_s, usage = time.perf_counter(), None, {}
    with client.stream("POST", "chat/completions", json=body) as response:
        if response.is_error:
            raise SystemExit(f"{response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if ttft_s is None and any(c["delta"].get("content") or c["finish_reason"] for c in chunk["choices"]):
                ttft_s = time.perf_counter() - started
            usage = chunk.get("usage") or usage
    if ttft_s is None:
        raise SystemExit("the stream ended without an answer")
    details = usage.get("prompt_tokens_details") or {}
    return Measurement(ttft_s, usage.get("prompt_tokens", 0), details.get("cached_tokens"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--words", type=int, nargs="+", default=[200, 800, 1600])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="default: a new one, so that cold is cold")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with httpx.Client(base_url=arguments.base_url.rstrip("/") + "/", timeout=600) as client:
        model = client.get("models").raise_for_status().json()["data"][0]["id"]
        measure(client, model, "Hello!")
        print(f"{'prompt tokens':>13} {'cold ms':>9} {'warm ms':>9} {'cached':>7} {'warm / cold':>12}")
        for num_words in arguments.words:
            pairs = []
            for _ in range(arguments.repeats):
                prompt = " ".join(rng.choices(WORDS, k=num_words))
                pairs.append((measure(client, model, prompt), measure(client, model, prompt)))
            cold_s = statistics.median(cold.ttft_s for cold, _ in pairs)
            warm_s = statistics.median(warm.ttft_s for _, warm in pairs)
            warm = pairs[-1][1]
            cached = "?" if warm.cached_tokens is None else warm.cached_tokens
            print(
                f"{warm.prompt_tokens:>13} {1e3 * cold_s:>9.0f} {1e3 * warm_s:>9.0f} {cached:>7}"
                f" {warm_s / cold_s:>12.3f}"
            )


if __name__ == "__main__":
    main()
