"""One engine request → the text of its continuations as it appears. Knows no API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from ipc.vocabulary import EngineRequest, TokenLogprob

from .continuation import Continuation, TextDelta
from .detokenizer import Detokenizer
from .engine_errors import EngineUnavailableError
from .engine_pool import EnginePool
from .feature_supply import FeatureSource
from .metrics.request_record import RequestRecord


async def generate(
    client: EnginePool,
    request: EngineRequest,
    new_detokenizer: Callable[[], Detokenizer],
    stop_strings: Sequence[str],
    record: RequestRecord,
    *,
    features: FeatureSource | None = None,
    include_stop: bool = False,
    scores_only: bool = False,
) -> AsyncGenerator[TextDelta]:
    """Run `request` and yield one delta per engine output; each continuation's last one has a `finish_reason`.

    See `Continuation` for what is part of the text. A stop string ends its continuation in the engine, and closing this
    generator all of them: use `aclosing`. `record` is told what becomes of the request. `features` has the inputs of
    its pictures. `scores_only`: it asks for nothing but its prompt's log-probabilities; the one token that comes with
    them is neither shown nor counted.

    Raises:
        EngineUnavailableError: there is no engine, or it was lost.
        RequestRefusedError: the engine refused the request or gave it up.
    """
    running = {
        index: Continuation(new_detokenizer(), stop_strings, include_stop=include_stop)
        for index in range(request.sampling_params.n)
    }
    prompt_logprobs: list[TokenLogprob | None] | None = None
    with record:
        async with client.submit(request, features) as stream:
            record.follow(stream)
            async for output in stream:
                # They come with the first continuation's first output, before any of the others.
                prompt_logprobs = prompt_logprobs or output.prompt_logprobs
                delta = running[output.index].take(output)
                if scores_only:
                    delta = TextDelta("", 0, delta.num_cached_tokens, "length", index=delta.index, cache=delta.cache)
                delta.prompt_logprobs = prompt_logprobs
                if delta.finish_reason is not None:
                    del running[output.index]
                    if output.finish_reason is None:
                        stream.abort_continuation(output.index)
                record.count(output.index, delta.num_tokens, delta.num_cached_tokens, delta.finish_reason)
                yield delta
                if not running:
                    return
        raise EngineUnavailableError("the engine ended the request without a reason")


async def interleave(generations: Sequence[AsyncGenerator[TextDelta]]) -> AsyncGenerator[tuple[int, TextDelta]]:
    """Run several generations at once; yield `(generation's index, delta)` as they come. The first failure ends all.

    Memory is bounded: a consumer that is slow makes every generation wait.
    """
    if len(generations) == 1:
        async with aclosing(generations[0]) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    # None: a generation has ended.
    arrived: asyncio.Queue[tuple[int, TextDelta] | Exception | None] = asyncio.Queue(maxsize=1)

    async def pump(index: int, generation: AsyncGenerator[TextDelta]) -> None:
        try:
            async with aclosing(generation):
                async for delta in generation:
                    await arrived.put((index, delta))
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

    tasks = [asyncio.create_task(pump(i, generation)) for i, generation in enumerate(generations)]
    num_unfinished = len(tasks)
    try:
        while num_unfinished:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_unfinished -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
