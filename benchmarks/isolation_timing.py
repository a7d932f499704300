"""Whether time tells what others have asked: prompts cached for another salt, beside prompts that nobody has sent.

    python -m benchmarks.isolation_timing [--model smollm2] [--rounds 40] [--words 300] [--url URL]
        [--lora-modules NAME=PATH NAME=PATH]

Starts `foreword serve` (or asks the one at `--url`). In every round somebody with one salt sends a text, then somebody
with another salt sends three, in random order: that text, one that is new, and one of its own that it sent before. Time
is that of the whole answer, which is one token. The chance that a text of another's is answered sooner than a new one
is 0.5 if time tells nothing about it. That of an own text must not be: else the measurement would see nothing. Nothing
else should run meanwhile.

With two LoRA adapters, for which there is one slot, all of that is asked of the first one. Then somebody asks for one
of them, and somebody else for the first: is the answer sooner if it was in the slot already? Last, without salts,
whether time tells what was asked of the second. (A server at `--url` is to have both, and `--max-loras 1`.)
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.frontend_overhead import free_port
from benchmarks.started_server import started_server
from frontend.bench.texts import TextMaker

ANOTHERS, NEW, OWN = "cached for another", "new", "cached for the asker"
IN_SLOT, NOT_IN_SLOT = "adapter in the slot", "adapter not in it"
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Asker:
    """Somebody who asks: what sets its requests apart."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def ask(self, http: httpx.Client, text: str) -> float:
        """Seconds until the answer is there."""
        began_s = time.perf_counter()
        body = {"prompt": text, "max_tokens": 1, "temperature": 0, **self.fields}
        http.post("/v1/completions", json=body, headers=dict(self.headers)).raise_for_status()
        return time.perf_counter() - began_s


def measure(
    http: httpx.Client, asker: Asker, another: Asker, *, num_rounds: int, num_words: int, seed: int = 0
) -> dict[str, list[float]]:
    """Seconds that `asker` waited, by kind of text; one of each kind per round."""
    rng = random.Random(seed)
    texts = TextMaker(seed)
    times_s: dict[str, list[float]] = defaultdict(list)
    for number in range(num_rounds):
        text = {kind: texts.words(f"{kind} {number}", num_words) for kind in (ANOTHERS, NEW, OWN)}
        before = [(another, text[ANOTHERS]), (asker, text[OWN])]
        for who, what in rng.sample(before, 2):
            who.ask(http, what)
        for kind in rng.sample(list(text), 3):
            times_s[kind].append(asker.ask(http, text[kind]))
    return times_s


def measure_slot(
    http: httpx.Client, asker: Asker, same: Asker, other: Asker, *, num_rounds: int, seed: int = 0
) -> dict[str, list[float]]:
    """Seconds that `asker` waited for short answers, by whether `same` (with its adapter) or `other` asked before."""
    rng = random.Random(seed)
    times_s: dict[str, list[float]] = defaultdict(list)
    for number in range(num_rounds):
        for kind, before in rng.sample([(IN_SLOT, same), (NOT_IN_SLOT, other)], 2):
            before.ask(http, f"{number} before")
            times_s[kind].append(asker.ask(http, f"{number} after"))
    return times_s


def chance_of_sooner(first_s: Sequence[float], second_s: Sequence[float]) -> float:
    """That a value of `first_s` is less than one of `second_s`, equal ones counting half: Mann and Whitney's U / nm."""
    pairs = itertools.product(first_s, second_s)
    return sum((a < b) + (a == b) / 2 for a, b in pairs) / (len(first_s) * len(second_s))


def deviation(n: int, m: int) -> float:
    """Standard deviation of that chance's estimate where both kinds are alike."""
    return math.sqrt((n + m + 1) / (12 * n * m))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--url", help="of a running server; default: start one")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--words", type=int, default=300)
    parser.add_argument("--lora-modules", nargs=2, default=(), metavar="NAME=PATH")
    arguments = parser.parse_args()
    adapters = [module.partition("=")[0] for module in arguments.lora_modules]
    with ExitStack() as stack:
        url = arguments.url
        if url is None:
            url = f"http://127.0.0.1:{(port := free_port())}"
            command = [sys.executable, "-c", "from frontend.cli import main; main()", "serve", arguments.model]
            command += ["--port", str(port)]
            if adapters:
                command += ["--enable-lora", "--max-loras", "1", "--lora-modules", *arguments.lora_modules]
            stack.enter_context(started_server(f"exec {shlex.join(command)}", url, None))
        http = stack.enter_context(httpx.Client(base_url=url, timeout=_TIMEOUT_S))

        def texts(asker: Asker, another: Asker) -> None:
            times_s = measure(http, asker, another, num_rounds=arguments.rounds, num_words=arguments.words)
            _tell(times_s, (ANOTHERS, NEW), (OWN, NEW))

        model = {"model": adapters[0]} if adapters else {}
        asker, another = Asker({"cache_salt": "asker", **model}), Asker({"cache_salt": "another", **model})
        texts(asker, another)
        if adapters:
            other = Asker({"cache_salt": "another", "model": adapters[1]})
            _tell(measure_slot(http, asker, another, other, num_rounds=arguments.rounds), (IN_SLOT, NOT_IN_SLOT))
            http.post("/reset_prefix_cache").raise_for_status()
            texts(Asker(model), Asker({"model": adapters[1]}))
    return 0


def _tell(times_s: Mapping[str, Sequence[float]], *pairs: tuple[str, str]) -> None:
    for kind, values_s in times_s.items():
        print(f"{kind:22} median {statistics.median(values_s) * 1e3:7.1f} ms")
    for first, second in pairs:
        chance = chance_of_sooner(times_s[first], times_s[second])
        allowed = 2 * deviation(len(times_s[first]), len(times_s[second]))
        print(f"{first}, sooner than {second}: {chance:.2f} ± {allowed:.2f}")


if __name__ == "__main__":
    sys.exit(main())
