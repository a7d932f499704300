"""The progress bars transformers draws, where somebody can see them move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
