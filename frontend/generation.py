"""One engine request → its text as it appears. Knows no API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from ipc.messages import EngineRequest, RequestError, RequestOutput

from .detokenizer import Detokenizer
from .engine_client import EngineClient
from .engine_errors import EngineUnavailableError, RequestRefusedError
from .metrics.request_record import RequestRecord
from .stop_strings import StopStringScanner


@dataclass(slots=True)
class TextDelta:
    """What one engine output added.

    `num_tokens` counts the output's tokens, whether they have shown as text yet or not (special tokens never do).
    `stop_reason` is the stop string or the id of `stop_token_ids` that ended the text, if one did.
    """

    text: str
    num_tokens: int
    num_cached_tokens: int
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None


async def generate(
    client: EngineClient,
    request: EngineRequest,
    detokenizer: Detokenizer,
    stop_strings: Sequence[str],
    record: RequestRecord,
) -> AsyncGenerator[TextDelta]:
    """Run `request` and yield one delta per engine output; exactly the last one has a `finish_reason`.

    A token that ends the sequence (end of sequence, `stop_token_ids`) and a stop string are not part of the text.
    A stop string ends the request in the engine, and so does closing this generator: use `aclosing`. `record` is told
    what becomes of it.

    Raises:
        EngineUnavailableError: there is no engine, or it was lost.
        RequestRefusedError: the engine refused the request or gave it up.
    """
    scanner = StopStringScanner(stop_strings)
    with record:
        async with client.submit(request) as stream:
            record.follow(stream)
            async for output in stream:
                delta = _delta(output, detokenizer, scanner)
                record.count(output.index, delta.num_tokens, delta.num_cached_tokens, delta.finish_reason)
                yield delta
                if delta.finish_reason is not None:
                    return
        raise EngineUnavailableError("the engine ended the request without a reason")


def _delta(output: RequestOutput, detokenizer: Detokenizer, scanner: StopStringScanner) -> TextDelta:
    finish = output.finish_reason
    if finish == "abort" or finish == "error":  # noqa: PLR1714 - narrows the type
        raise RequestRefusedError(output.error or RequestError("internal", "the engine gave the request up"))
    token_ids = output.new_token_ids
    shown_ids = token_ids[:-1] if finish == "stop" else token_ids
    texts: list[str] = []
    # One by one, so that what is counted and shown does not depend on how tokens were grouped on the way.
    for num_tokens, token_id in enumerate(shown_ids, start=1):
        text, stop = scanner.push(detokenizer.push((token_id,)))
        texts.append(text)
        if stop is not None:
            return TextDelta("".join(texts), num_tokens, output.num_cached_tokens, "stop", stop)
    if finish is not None:
        text, stop = scanner.push(detokenizer.flush())
        texts.append(text)
        if stop is not None:
            return TextDelta("".join(texts), len(token_ids), output.num_cached_tokens, "stop", stop)
        texts.append(scanner.flush())
    return TextDelta("".join(texts), len(token_ids), output.num_cached_tokens, finish, output.stop_reason)


async def interleave(generations: Sequence[AsyncGenerator[TextDelta]]) -> AsyncGenerator[tuple[int, TextDelta]]:
    """Run several generations at once; yield `(index, delta)` as they come. The first failure ends all.

    Memory is bounded: a consumer that is slow makes every generation wait.
    """
    if len(generations) == 1:
        async with aclosing(generations[0]) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, TextDelta] | Exception] = asyncio.Queue(maxsize=1)

    async def pump(index: int, generation: AsyncGenerator[TextDelta]) -> None:
        try:
            async with aclosing(generation):
                async for delta in generation:
                    await arrived.put((index, delta))
        except Exception as error:
            await arrived.put(error)

    tasks = [asyncio.create_task(pump(i, generation)) for i, generation in enumerate(generations)]
    num_unfinished = len(tasks)
    try:
        while num_unfinished:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            num_unfinished -= item[1].finish_reason is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
