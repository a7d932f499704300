"""Progress bars of what takes a while at start-up, transformers' own among them, where somebody can see them move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

ItemT = TypeVar("ItemT")


@contextmanager
def transformers_progress(*, shown: bool) -> Iterator[None]:
    """Within, transformers draws its bars only if `shown`; afterwards as before. The switch is the whole process's."""
    from transformers.utils import logging as settings

    if shown or not settings.is_progress_bar_enabled():
        yield
        return
    settings.disable_progress_bar()
    try:
        yield
    finally:
        settings.enable_progress_bar()


def with_progress(items: Sequence[ItemT], title: str, *, shown: bool) -> Iterator[ItemT]:
    """The items, with a bar on standard error that moves from each to the next."""
    from rich.console import Console
    from rich.progress import track

    yield from track(items, title, console=Console(stderr=True), transient=True, disable=not shown)
