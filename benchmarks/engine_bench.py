"""An engine in this process with requests in it, for benchmarks of its steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from engine_core import EngineCore, EngineRequest, SamplingParams


def random_tokens(engine: EngineCore, name: str, num_tokens: int) -> list[int]:
    """The same for the same name. From the middle of the vocabulary, where there are no special tokens as a rule."""
    rng = random.Random(name)
    vocab_size = engine.capabilities.vocab_size
    return [rng.randrange(vocab_size // 4, vocab_size // 2) for _ in range(num_tokens)]


@contextmanager
def decoding(
    engine: EngineCore,
    num_rows: int,
    num_context_tokens: int,
    params: SamplingParams | None = None,
    adapters: Sequence[str] = (),
) -> Iterator[None]:
    """Within it, every step of `engine` decodes `num_rows` requests, the first after `num_context_tokens` tokens.

    They have nothing in common; the next time their prompts are cached. `params` (default: greedy) get no end. With
    `adapters` each has one, the first the first, and so on.
    """
    params = msgspec.structs.replace(params or SamplingParams(temperature=0.0), max_tokens=None, ignore_eos=True)
    ids = [f"decode-{num_context_tokens}-{row}" for row in range(num_rows)]
    try:
        waiting = set(ids)
        for row, request_id in enumerate(ids):
            prompt = random_tokens(engine, request_id, num_context_tokens - 1)
            adapter = adapters[row % len(adapters)] if adapters else ""
            engine.add_request(EngineRequest(request_id, prompt, params, adapter=adapter))
        while waiting:
            outputs = engine.step().outputs
            failed = [output for output in outputs if output.finish_reason is not None]
            if failed:
                raise RuntimeError(f"{failed[0].request_id} ended: {failed[0].finish_reason} {failed[0].error}")
            waiting -= {output.request_id for output in outputs}
        yield
    finally:
        engine.abort_requests(ids)


@contextmanager
def prefilling(engine: EngineCore, name: str, num_tokens: int) -> Iterator[None]:
    """Within it, the next step of `engine` computes a prompt of `num_tokens` tokens that is new if `name` is."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    engine.add_request(EngineRequest(name, random_tokens(engine, name, num_tokens), params))
    try:
        yield
    finally:
        engine.abort_requests([name])
