"""Layouts of sizes that were asked for lately: at hand at once, without waiting for pictures that are worked on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .byte_lru import ByteLRU
from .shared_calls import SharedCalls
from .work_threads import WorkThreads

if TYPE_CHECKING:
    from .layout import ImageLayout
    from .options import ImageOptions
    from .processor import PictureProcessor

_MAX_BYTES = 4 << 20
# A layout besides its text and runs.
_LAYOUT_BYTES = 1024
_RUN_BYTES = 40

# Tenant, height, width, options, and whether the picture is the only one of its prompt: more of its company counts
# nowhere.
_Key = tuple[str, int, int, "ImageOptions", bool]


class KnownLayouts:
    """`PictureProcessor.layout` in threads, remembered by tenant: how fast one comes tells nobody what others sent.

    For one event loop.
    """

    def __init__(self, processor: PictureProcessor, threads: WorkThreads) -> None:
        self._processor = processor
        self._threads = threads
        self._known: ByteLRU[_Key, ImageLayout] = ByteLRU(_MAX_BYTES)
        self._calls: SharedCalls[ImageLayout] = SharedCalls()

    async def get(self, height: int, width: int, options: ImageOptions, num_images: int, tenant: str) -> ImageLayout:
        """Raises MediaError: the processor does not take such a picture."""
        key = (tenant, height, width, options, num_images == 1)
        known = self._known.get(key)
        if known is not None:
            return known

        async def work_out() -> ImageLayout:
            layout = await self._threads.run(
                lambda: self._processor.layout(height, width, options, num_images), height * width
            )
            weight = _LAYOUT_BYTES + len(tenant) + len(layout.replacement) + _RUN_BYTES * len(layout.embed_runs)
            self._known.put(key, layout, weight)
            return layout

        return await self._calls.run(key, work_out)
