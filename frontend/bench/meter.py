"""Requests, timed; what goes wrong with them is counted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Any

from frontend.openai_client import Answer, OpenAIClient, ServerError, UnreachableError

Messages = list[dict[str, str]]
Job = tuple[Messages, int]

# A server that has gone away is not asked a hundred times more, each time until the timeout.
MAX_UNANSWERED_IN_A_ROW = 3


class Meter:
    """Sends a part's requests.

    `failures` counts by message. `gave_up` is set when the server seems to be gone; from then on nothing is sent.
    `on_request` is told of each request that has ended, however.
    """

    def __init__(
        self,
        client: OpenAIClient,
        fields: dict[str, Any],
        *,
        timeout_s: float,
        on_request: Callable[[], None] = lambda: None,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.gave_up = False
        self._client = client
        self._fields = fields
        self._timeout_s = timeout_s
        self._on_request = on_request
        self._num_unanswered = 0

    async def ask(self, messages: Messages, max_tokens: int, *, stream: bool = True) -> Answer | None:
        """Greedy; None if there was no whole answer within the timeout."""
        if self.gave_up:
            return None
        body = self._fields | {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
        try:
            answer = await ask(self._client, body, timeout_s=self._timeout_s, stream=stream)
        except ServerError as error:
            self.failures[str(error)] += 1
            self._num_unanswered = self._num_unanswered + 1 if isinstance(error, UnreachableError) else 0
            self.gave_up |= self._num_unanswered >= MAX_UNANSWERED_IN_A_ROW
            return None
        finally:
            self._on_request()
        self._num_unanswered = 0
        return answer

    async def ask_all(self, jobs: Iterable[Job], *, concurrency: int) -> tuple[list[Answer], float]:
        """The answers there were to `jobs`, at most `concurrency` under way at once, and how many seconds it took."""
        waiting = iter(jobs)
        answers: list[Answer] = []

        async def work() -> None:
            for messages, max_tokens in waiting:
                if (answer := await self.ask(messages, max_tokens)) is not None:
                    answers.append(answer)

        started_s = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        return answers, time.perf_counter() - started_s


async def ask(client: OpenAIClient, body: dict[str, Any], *, timeout_s: float, stream: bool) -> Answer:
    """The whole answer to `body`. Raises ServerError, UnreachableError also when it takes longer than `timeout_s`."""
    answer = Answer()
    try:
        async with asyncio.timeout(timeout_s):
            if not stream:
                await client.ask(body, answer)
                return answer
            async with aclosing(client.stream(body, answer)) as deltas:
                async for _ in deltas:
                    pass
    except TimeoutError:
        raise UnreachableError(f"no whole answer within {timeout_s:g} s") from None
    return answer
