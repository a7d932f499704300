"""`cache_control`: the prompt up to a place is to stay in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ipc.vocabulary import KeepPrefix

from .cache_options import CacheControl, CacheOptions, check_cache_options, whole_prompt_kept
from .places import Place
from .prompt import Prompt


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Keep the prompt up to the end of `place`. `field` is where the request says so."""

    place: Place
    control: CacheControl
    field: str


def check_kept(options: CacheOptions | None, breakpoints: Sequence[Breakpoint] = ()) -> None:
    """Raises PromptError as `check_cache_options`."""
    check_cache_options(options, [point.field for point in breakpoints])


def with_kept(prompt: Prompt, options: CacheOptions | None, breakpoints: Sequence[Breakpoint] = ()) -> Prompt:
    """`prompt` with what is to be kept of it: up to the end of each breakpoint, in their order, then all of it.

    `prompt.places` must have the breakpoints' places. Where nothing comes before the end of one, it keeps nothing.
    """
    ends = [(prompt.places[point.place].end, point.control.ttl_s) for point in breakpoints]
    keep = tuple(KeepPrefix(end, ttl_s) for end, ttl_s in ends if end)
    return replace(prompt, keep=keep + whole_prompt_kept(options, len(prompt.token_ids)))
