"""What engines say of a request that is not run → what its sender is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from msgspec import UNSET

from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from frontend.prepared import PreparedRequest, engine_requests
from frontend.prompt.chat import Chat
from frontend.prompt.places import MessagePlace, Place, ToolPlace
from frontend.serving import Serving
from ipc.vocabulary import CacheExplanation, CacheProbe, EngineRequest, ExtraKeySpan, MultimodalFeature

from .advice import advice_on, explanation_of
from .answers import EngineAnswer, ExplainAnswer, PlaceAnswer, ProbeAnswer, Texts
from .ask_engines import EngineProbe, ask_engines, best_of
from .component import Parting, component_of
from .place_search import FindPlaces, place_of, tools_range

NUM_TOKENS_AROUND = 20
# Under so many other names it is tried whether more of a prompt is cached.
_MAX_OTHER_MODELS = 16
# The relative's tools may take some tokens more than the request's.
_TOOLS_SLACK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class AskedChat:
    """The chat that a prompt was made of, and where its places are in it."""

    chat: Chat
    find_places: FindPlaces


async def probe(serving: Serving, prepared: PreparedRequest) -> ProbeAnswer:
    """What the engines have of the prompt of `prepared`, which has one.

    Raises EngineUnavailableError and RequestRefusedError as `ask_engines`.
    """
    [request] = engine_requests(prepared, "probe")
    probes = await ask_engines(serving.client, request)
    engine, best = best_of(probes)
    return ProbeAnswer(
        model=prepared.model_name,
        prompt_tokens=len(request.prompt_token_ids),
        engine=engine,
        hit_tokens=best.num_hit_tokens,
        copied_tokens=best.num_copied_tokens,
        kept_tokens=best.num_kept_tokens,
        tiers=best.tier_tokens,
        miss_reason=best.miss_reason,
        engines=[_of_engine(each) for each in probes],
    )


async def explain(
    serving: Serving, prepared: PreparedRequest, asked: AskedChat | None, *, shows_shared: bool
) -> ExplainAnswer:
    """Why the engine that has most of the prompt of `prepared`, which has one, has no more.

    `asked` is None for a prompt that was not made of a chat. `shows_shared`: the text of relatives that anybody may
    find is shown, too, though they may be another caller's.

    Raises EngineUnavailableError and RequestRefusedError as `ask_engines`.
    """
    [request] = engine_requests(prepared, "explain")
    probes = await ask_engines(serving.client, request, explain=True)
    engine, best = best_of(probes)
    found = best.explanation
    assert found is not None
    place = None
    if asked is not None and best.miss_reason != "none":
        place = await place_of(asked.chat, asked.find_places, found.token_index)
    may_show = shows_shared or any(span.start <= found.token_index for span in _salts(request))
    parting = await _parting(serving, request, engine, found, place, asked, may_show=may_show)
    unsalted = await _hit_without_salt(serving, request, best)
    component = component_of(best, parting)
    # A few tokens, those that every prompt begins with, are no reason.
    num_lacking = 0 if unsalted is None else unsalted - best.num_hit_tokens
    goes_on_nowhere = best.miss_reason in {"not_found", "continued"}
    other_model, other_hit = None, None
    if goes_on_nowhere and num_lacking >= serving.capabilities().block_size:
        component = "salt"
    elif goes_on_nowhere:
        name, hit = await _most_under_another_name(serving, request)
        if hit - best.num_hit_tokens >= serving.capabilities().block_size:
            component, other_model, other_hit = "lora", name, hit
    image = _image_at(request.mm_features, found.token_index) if component == "image" else None
    answer = ExplainAnswer(
        model=prepared.model_name,
        prompt_tokens=len(request.prompt_token_ids),
        engine=engine,
        hit_tokens=best.num_hit_tokens,
        miss_reason=best.miss_reason,
        component=component,
        token_index=found.token_index,
        place=None if place is None else _shown_place(place),
        texts=_texts(parting, found, may_show=may_show),
        image=image,
        lost_at=found.lost_since_s,
        unsalted_hit_tokens=unsalted,
        other_model=other_model,
        other_model_hit_tokens=other_hit,
        readable_hit_tokens=await _hit_if_read(serving, request, best),
        explanation="",
        advice="",
        engines=[_of_engine(each) for each in probes],
    )
    answer.explanation = explanation_of(answer, place, is_chat=asked is not None)
    answer.advice = advice_on(answer, place, is_chat=asked is not None)
    return answer


async def _parting(
    serving: Serving,
    request: EngineRequest,
    engine: int,
    found: CacheExplanation,
    place: Place | None,
    asked: AskedChat | None,
    *,
    may_show: bool,
) -> Parting:
    """What may not be shown decides nothing either: else guesses could be tried on it."""
    tokens, at = request.prompt_token_ids, found.token_index
    before = tokens[max(0, at - NUM_TOKENS_AROUND) : at]
    own = tokens[at : at + NUM_TOKENS_AROUND]
    relative = found.relative_token_ids[:NUM_TOKENS_AROUND] if may_show else []
    shared = (await serving.prompts.detokenize(before)).rstrip("\ufffd")
    parting = Parting(
        before=shared,
        request=_behind(shared, await serving.prompts.detokenize([*before, *own])),
        relative=_behind(shared, await serving.prompts.detokenize([*before, *relative])),
        place=place,
        is_prompt=asked is None,
    )
    if asked is None:
        return parting
    if isinstance(place, MessagePlace) and asked.chat.messages[place.message].tool_calls:
        parting = replace(parting, has_calls=True)
    tools = await tools_range(asked.chat, asked.find_places)
    if tools is None or not tools.shown <= at <= tools.end or found.differing_kind is not None:
        return parting
    parting = replace(
        parting,
        tool_names=[tool.name for tool in asked.chat.tools],
        request_tools=await serving.prompts.detokenize(tokens[tools.shown : tools.end]),
    )
    if not may_show:
        return parting
    # Once more, for all of the relative's tools. If it is another one by now, nothing can be said of their order.
    [again] = await ask_engines(
        serving.client, request, engine=engine, explain=True, relative_end=tools.end + _TOOLS_SLACK_TOKENS
    )
    later = None if again.probe is None else again.probe.explanation
    theirs: list[int] = []
    if later is not None and later.token_index == at:
        theirs = [*tokens[tools.shown : at], *later.relative_token_ids]
    return replace(parting, relative_tools=await serving.prompts.detokenize(theirs))


def _behind(before: str, text: str) -> str:
    """What `text`, which begins with the same tokens as `before`, has behind them."""
    return text[len(before) :] if text.startswith(before) else text


async def _hit_without_salt(serving: Serving, request: EngineRequest, best: CacheProbe) -> int | None:
    """How much would be found without the request's salt, if more and if everybody could find that out. That is so
    where salts are the clients' own.
    """
    salts = _salts(request)
    if not salts or serving.isolation != "salt":
        return None
    spans = tuple(span for span in request.extra_key_spans if span not in salts)
    probe = await _hit_of(serving, msgspec.structs.replace(request, extra_key_spans=spans))
    return probe if probe is not None and probe > best.num_hit_tokens else None


async def _most_under_another_name(serving: Serving, request: EngineRequest) -> tuple[str, int]:
    """Where more would be found if the request asked for another adapter, or for none; it is not told whose that is,
    beyond what the request's own salts let it find.
    """
    adapters = [name for name in ("", *serving.model.adapters) if name != request.adapter][:_MAX_OTHER_MODELS]
    hits = await asyncio.gather(
        *(_hit_of(serving, msgspec.structs.replace(request, adapter=name)) for name in adapters)
    )
    found = [(name or serving.model.names[0], hit) for name, hit in zip(adapters, hits, strict=True) if hit is not None]
    return max(found, key=lambda item: item[1], default=("", 0))


async def _hit_if_read(serving: Serving, request: EngineRequest, best: CacheProbe) -> int | None:
    if best.miss_reason != "read_disabled":
        return None
    params = msgspec.structs.replace(request.sampling_params, prompt_logprobs=None)
    return await _hit_of(serving, msgspec.structs.replace(request, read_prefix_cache=True, sampling_params=params))


async def _hit_of(serving: Serving, request: EngineRequest) -> int | None:
    """Of the engine that has most; None if there is none any more."""
    try:
        _, best = best_of(await ask_engines(serving.client, request))
    except (EngineUnavailableError, RequestRefusedError):
        return None
    return best.num_hit_tokens


def _salts(request: EngineRequest) -> Sequence[ExtraKeySpan]:
    return [span for span in request.extra_key_spans if span.kind == "cache_salt"]


def _image_at(features: Sequence[MultimodalFeature], token: int) -> int | None:
    return next((k for k, feature in enumerate(features) if feature.start <= token < feature.end), None)


def _texts(parting: Parting, found: CacheExplanation, *, may_show: bool) -> Texts:
    if not found.relative_token_ids:
        return Texts(parting.before, parting.request, None)
    if not may_show:
        return Texts(parting.before, parting.request, None, cached_is_withheld=True)
    return Texts(parting.before, parting.request, parting.relative)


def _shown_place(place: Place) -> PlaceAnswer:
    match place:
        case ToolPlace(tool):
            return PlaceAnswer(str(place), tool=tool)
        case MessagePlace(message, part):
            return PlaceAnswer(str(place), message=message, part=UNSET if part is None else part)


def _of_engine(each: EngineProbe) -> EngineAnswer:
    if each.probe is None:
        return EngineAnswer(each.engine, error=str(each.error))
    return EngineAnswer(
        each.engine,
        hit_tokens=each.probe.num_hit_tokens,
        copied_tokens=each.probe.num_copied_tokens,
        kept_tokens=each.probe.num_kept_tokens,
        tiers=each.probe.tier_tokens,
        miss_reason=each.probe.miss_reason,
    )
