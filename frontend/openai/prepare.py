"""OpenAI request → what the engine is asked: everything that can be wrong with a request is found here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from frontend.errors import invalid_request
from frontend.isolation import Isolation, isolate, isolated, places_of_salts, salts_in_chat, salts_in_tokens
from frontend.prepared import PreparedRequest
from frontend.prompt.breakpoints import check_kept, with_kept
from frontend.prompt.cache_options import CacheOptions
from frontend.prompt.chat import Chat
from frontend.prompt.places import Place, TokenRange, bounds_of
from frontend.prompt.processor import check_prompt_length
from frontend.prompt.prompt import Prompt
from frontend.refusals import client_errors
from frontend.serving import Serving
from ipc.vocabulary import EngineCapabilities

from .cache_control import breakpoints_of
from .chat_prompt import chat_of
from .echo import prompt_text
from .protocol import ChatCompletionRequest, CompletionRequest, StreamOptions
from .refusals import field_names
from .sampling import check_combinations, check_vocabulary, num_logprobs, sampling_params, stop_strings
from .tool_calls import tools_of
from .unsupported import refuse_unsupported

MAX_PROMPTS = 1024
MAX_CHOICES = 1024


async def prepare_chat(serving: Serving, request: ChatCompletionRequest, caller: str) -> PreparedRequest:
    """Validate `request` of `caller` (see `api_key.caller_of`) and make its prompt. Raises ApiError."""
    with client_errors(serving, field_names(request)):
        capabilities = serving.capabilities()
        isolation = isolate(serving.isolation, caller, request.cache_salt)
        breakpoints = breakpoints_of(request.messages, request.tools)
        check_kept(request.cache, breakpoints)
        prepared = await _prepare_fields(serving, request, capabilities, isolation)
        chat = asked_chat(serving, request)
        salts = salts_in_chat(isolation.salts, chat)
        starts, ends = places_of_salts(salts), [point.place for point in breakpoints]
        prompt = await serving.prompts.chat(
            chat,
            max_model_len=capabilities.max_model_len,
            tenant=isolation.memory_tenant,
            places=[*starts, *ends],
            bounds=bounds_of(starts, ends),
        )
        if not prompt.token_ids:
            raise invalid_request("the messages make a prompt of 0 tokens", "messages")
        prompt = isolated(with_kept(prompt, request.cache, breakpoints), salts)
    return replace(prepared, prompts=(prompt,), tools=tools_of(serving, request))


def asked_chat(serving: Serving, request: ChatCompletionRequest) -> Chat:
    """The chat of a request that `prepare_chat` has found right."""
    return chat_of(request.messages, request, takes_pictures=serving.prompts.pictures is not None)


async def find_places(
    serving: Serving, request: ChatCompletionRequest, caller: str, places: Sequence[Place]
) -> Mapping[Place, TokenRange]:
    """Where places of `asked_chat` are in its prompt.

    Raises PromptError: they cannot be found; EngineUnavailableError: no engine is there any more.
    """
    isolation = isolate(serving.isolation, caller, request.cache_salt)
    prompt = await serving.prompts.chat(
        asked_chat(serving, request),
        max_model_len=serving.capabilities().max_model_len,
        tenant=isolation.memory_tenant,
        places=places,
    )
    return prompt.places


async def prepare_completion(serving: Serving, request: CompletionRequest, caller: str) -> PreparedRequest:
    """Validate `request` of `caller` (see `api_key.caller_of`) and make its prompts. Raises ApiError."""
    with client_errors(serving, field_names(request)):
        capabilities = serving.capabilities()
        isolation = isolate(serving.isolation, caller, request.cache_salt)
        salts = salts_in_tokens(isolation.salts)
        check_kept(request.cache)
        prepared = await _prepare_fields(serving, request, capabilities, isolation)
        texts_or_ids = _separate_prompts(request.prompt)
        _check_num_choices(request, len(texts_or_ids))
        prompts: list[Prompt] = []
        for i, prompt in enumerate(texts_or_ids):
            param = f"prompt[{i}]" if len(texts_or_ids) > 1 else "prompt"
            if isinstance(prompt, str):
                token_ids = await serving.prompts.text(
                    prompt, max_model_len=capabilities.max_model_len, tenant=isolation.memory_tenant
                )
            else:
                token_ids = prompt
                check_prompt_length(len(token_ids), capabilities.max_model_len)
                check_vocabulary(token_ids, capabilities.vocab_size, param)
            if not token_ids:
                raise invalid_request(f"{param} has 0 tokens; at least 1 is needed", param)
            prompts.append(isolated(with_kept(Prompt(token_ids), request.cache), salts))
        prompt_texts: tuple[str, ...] = ()
        if request.echo:
            prompt_texts = tuple(
                prompt if isinstance(prompt, str) else prompt_text(serving, prompt) for prompt in texts_or_ids
            )
    return replace(prepared, prompts=tuple(prompts), prompt_texts=prompt_texts)


async def _prepare_fields(
    serving: Serving,
    request: ChatCompletionRequest | CompletionRequest,
    capabilities: EngineCapabilities,
    isolation: Isolation,
) -> PreparedRequest:
    model_name = serving.model.check(request.model)
    refuse_unsupported(request)
    check_combinations(request)
    stream_options = request.stream_options or StreamOptions()
    cache = request.cache or CacheOptions()
    return PreparedRequest(
        model_name=model_name,
        prompts=(),
        sampling_params=await sampling_params(request, capabilities, serving.prompts.tokenizer),
        stop_strings=stop_strings(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        logprobs=num_logprobs(request),
        prompt_logprobs=request.prompt_logprobs,
        priority=request.priority or 0,
        include_usage=bool(stream_options.include_usage),
        continuous_usage=bool(stream_options.continuous_usage_stats),
        scores_only=request.max_tokens_field()[1] == 0,
        read_prefix_cache=cache.read is not False,
        write_prefix_cache=cache.write is not False,
        tenant=isolation.tenant,
        adapter=serving.model.adapter_of(model_name),
    )


def _check_num_choices(request: CompletionRequest, num_prompts: int) -> None:
    n = request.n or 1
    if num_prompts * n > MAX_CHOICES:
        raise invalid_request(
            f"n is {n} for {num_prompts} prompts: {num_prompts * n} choices; at most {MAX_CHOICES} are allowed", "n"
        )


def _separate_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid_request("prompt must not be empty", "prompt")
    token_ids = [part for part in prompt if isinstance(part, int)]
    if len(token_ids) == len(prompt):
        return [token_ids]
    if token_ids:
        raise invalid_request("prompt mixes token ids with whole prompts; send one or the other", "prompt")
    if len(prompt) > MAX_PROMPTS:
        raise invalid_request(f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed", "prompt")
    return [part for part in prompt if not isinstance(part, int)]
