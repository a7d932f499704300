"""What `/v1/cache/probe` and `/v1/cache/explain` answer."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ipc.vocabulary import MissReason

Component = Literal[
    "none",
    "text",
    "template",
    "tool",
    "tool_order",
    "date",
    "image",
    "salt",
    "lora",
    "extra_key",
    "evicted",
    "reset",
    "never_stored",
    "block_boundary",
    "read_disabled",
    "cache_disabled",
]


class EngineAnswer(Struct, omit_defaults=True):
    """Of one engine: what it has of the prompt, or `error`, why it says nothing."""

    engine: int
    hit_tokens: int | UnsetType = UNSET
    copied_tokens: Annotated[
        int | UnsetType, Meta(description="Of the hit, what is copied from the beginning of a block.")
    ] = UNSET
    kept_tokens: Annotated[int | UnsetType, Meta(description="Of the hit, what is kept for a time.")] = UNSET
    tiers: Annotated[dict[str, int] | UnsetType, Meta(description="Where the tokens of the hit are.")] = UNSET
    miss_reason: MissReason | UnsetType = UNSET
    error: str | UnsetType = UNSET


class ProbeAnswer(Struct, kw_only=True):
    """What the engine with most of the prompt has of it, and what each has. Which one would compute the request depends
    on what they have to do then.
    """

    object: Literal["cache.probe"] = "cache.probe"
    model: str
    prompt_tokens: int
    engine: int
    hit_tokens: int
    copied_tokens: int
    kept_tokens: int
    tiers: dict[str, int]
    miss_reason: MissReason
    engines: list[EngineAnswer]


class PlaceAnswer(Struct, omit_defaults=True):
    """A place in the request. `field` spells it: `messages[1].content[0]`, `tools[2]`."""

    field: str
    message: int | UnsetType = UNSET
    part: int | UnsetType = UNSET
    tool: int | UnsetType = UNSET


class Texts(Struct):
    """Around the place where request and relative part: what both have before it, and how each goes on; special tokens
    are spelled out. `cached` is null where nothing is known of the relative, or where it may be somebody else's
    (`cached_is_withheld`).
    """

    before: str
    request: str
    cached: str | None
    cached_is_withheld: bool = False


class ExplainAnswer(Struct, kw_only=True):
    """Why no more of the prompt would be found, on the engine that has most of it.

    `token_index` is where request and cache part: the first token that was lost, or that the longest cached relative
    does not have. `place` is what of the request stands there, null if the chat template wrote it or the request is no
    chat. `image` counts the prompt's pictures from 0. `lost_at` is in seconds since 1970.
    """

    object: Literal["cache.explanation"] = "cache.explanation"
    model: str
    prompt_tokens: int
    engine: int
    hit_tokens: int
    miss_reason: MissReason
    component: Component
    token_index: int
    place: PlaceAnswer | None
    texts: Texts
    image: int | None = None
    lost_at: float | None = None
    unsalted_hit_tokens: Annotated[
        int | None, Meta(description="How much would be found without `cache_salt`, where that is more.")
    ] = None
    other_model: Annotated[
        str | None,
        Meta(description="The served name under which more of the prompt is cached, with `lora`."),
    ] = None
    other_model_hit_tokens: Annotated[int | None, Meta(description="How much would be found under that name.")] = None
    readable_hit_tokens: Annotated[
        int | None, Meta(description="How much would be found if the request read the cache, where it does not.")
    ] = None
    explanation: str
    advice: str
    engines: list[EngineAnswer]
