"""Anthropic request → what the engine is asked: everything that can be wrong with a request is found here."""

from __future__ import annotations

from dataclasses import dataclass

from frontend.choice import callable_tools
from frontend.errors import invalid_request
from frontend.isolation import isolate, isolated, places_of_salts, salts_in_places
from frontend.output_limits import check_max_tokens, check_stop_strings
from frontend.prepared import PreparedRequest
from frontend.prompt.breakpoints import check_kept, with_kept
from frontend.prompt.cache_options import CacheOptions
from frontend.prompt.places import bounds_of
from frontend.refusals import FieldNames, client_errors, prompt_errors
from frontend.serving import Serving
from ipc.vocabulary import SamplingParams

from .chat_prompt import AskedChat, asked_chat
from .protocol import CountTokensRequest, MessagesRequest, PromptFields, ToolChoiceAuto, ToolChoiceNone
from .unsupported import refuse_unsupported


@dataclass(frozen=True, slots=True)
class AskedMessage:
    """A request that is right, as far as can be known without the engine. `names` are those of its fields."""

    prepared: PreparedRequest
    max_tokens: int
    names: FieldNames


def _asked_chat(serving: Serving, request: PromptFields) -> AskedChat:
    serving.model.check(request.model)
    refuse_unsupported(request)
    return asked_chat(request, takes_pictures=serving.prompts.pictures is not None)


async def prepare_message(serving: Serving, request: MessagesRequest, caller: str) -> AskedMessage:
    """Validate `request` of `caller` (see `api_key.caller_of`) and make its prompt. Raises ApiError."""
    asked = _asked_chat(serving, request)
    with client_errors(serving, asked.names):
        prepared = await _prepare(serving, request, asked, caller)
    return AskedMessage(prepared, request.max_tokens, asked.names)


async def _prepare(serving: Serving, request: MessagesRequest, asked: AskedChat, caller: str) -> PreparedRequest:
    capabilities = serving.capabilities()
    check_max_tokens(request.max_tokens, "max_tokens", capabilities, least=0)
    stops = check_stop_strings(request.stop_sequences or (), "stop_sequences")
    options = request.cache or CacheOptions()
    check_kept(options, asked.breakpoints)
    isolation = isolate(serving.isolation, caller, request.cache_salt)
    salts = salts_in_places(isolation.salts, asked.place_named)
    starts, ends = places_of_salts(salts), [point.place for point in asked.breakpoints]
    prompt = await serving.prompts.chat(
        asked.chat,
        max_model_len=capabilities.max_model_len,
        tenant=isolation.memory_tenant,
        places=[*starts, *ends],
        bounds=bounds_of(starts, ends),
    )
    if not prompt.token_ids:
        raise invalid_request("the messages make a prompt of 0 tokens", "messages")
    model_name = serving.model.check(request.model)
    return PreparedRequest(
        model_name=model_name,
        prompts=(isolated(with_kept(prompt, options, asked.breakpoints), salts),),
        sampling_params=SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=request.top_k or 0,
            top_p=1.0 if request.top_p is None else request.top_p,
            max_tokens=max(request.max_tokens, 1),
        ),
        stop_strings=stops,
        include_stop=False,
        logprobs=None,
        prompt_logprobs=None,
        priority=0,
        include_usage=True,
        continuous_usage=False,
        scores_only=request.max_tokens == 0,
        tools=callable_tools(
            serving.prompts.tokenizer.chat_template, _callable_names(request), in_parallel=_calls_in_parallel(request)
        ),
        read_prefix_cache=options.read is not False,
        write_prefix_cache=options.write is not False,
        tenant=isolation.tenant,
        adapter=serving.model.adapter_of(model_name),
    )


async def count_tokens(serving: Serving, request: CountTokensRequest, caller: str) -> int:
    """How many tokens the prompt has, even if too many. Asks no engine. Raises ApiError."""
    asked = _asked_chat(serving, request)
    capabilities = serving.client.capabilities
    with prompt_errors(serving, asked.names):
        check_kept(None, asked.breakpoints)
        isolation = isolate(serving.isolation, caller, request.cache_salt)
        salts_in_places(isolation.salts, asked.place_named)  # a message would be refused, too
        prompt = await serving.prompts.chat(
            asked.chat,
            max_model_len=None if capabilities is None else capabilities.max_model_len,
            tenant=isolation.memory_tenant,
            check_length=False,
        )
    return len(prompt.token_ids)


def _callable_names(request: PromptFields) -> list[str]:
    if isinstance(request.tool_choice, ToolChoiceNone):
        return []
    return [tool.name for tool in request.tools or ()]


def _calls_in_parallel(request: PromptFields) -> bool:
    choice = request.tool_choice
    return not (isinstance(choice, ToolChoiceAuto) and choice.disable_parallel_tool_use)
