"""Decoding and processing happen in threads, in which large pictures do not hold up small ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# What takes longer than a few tenths of a second waits in its own line.
LARGE_PIXELS = 4 << 20


class WorkThreads:
    """`num_threads` threads for pictures of up to `LARGE_PIXELS`, one for larger ones, and one for what is quick.

    So the wait of a small picture does not depend on how many large ones are being worked on, nor that of one which is
    known already on any of them. Work whose caller is cancelled before its turn is dropped; what runs cannot be
    interrupted.
    """

    def __init__(self, num_threads: int) -> None:
        self._quick = ThreadPoolExecutor(1, thread_name_prefix="quick_picture")
        self._small = ThreadPoolExecutor(num_threads, thread_name_prefix="picture")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large_picture")

    def close(self) -> None:
        """Drop what has not begun. What runs is not waited for."""
        for pool in (self._quick, self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], T], num_pixels: int) -> T:
        """Work that takes the longer, the more pixels a picture has."""
        pool = self._large if num_pixels > LARGE_PIXELS else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def run_quick(self, work: Callable[[], T]) -> T:
        """Work that takes milliseconds for a picture of any size."""
        return await asyncio.get_running_loop().run_in_executor(self._quick, work)
