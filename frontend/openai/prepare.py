"""OpenAI request → what the engine is asked: everything that can be wrong with a request is found here."""

from __future__ import annotations

from dataclasses import replace

from frontend.errors import invalid_request
from frontend.prompt.cache_salt import cache_salt_spans
from frontend.prompt.errors import PromptError
from frontend.prompt.processor import check_prompt_length
from ipc.messages import EngineCapabilities, SamplingParams

from .chat_prompt import chat_of
from .prepared import PreparedRequest
from .protocol import ChatCompletionRequest, CompletionRequest
from .refusals import client_errors, context_limit
from .serving import ServedModel, Serving
from .unsupported import refuse_unsupported

MAX_STOP_STRINGS = 16
MAX_PROMPTS = 1024
DEFAULT_COMPLETION_TOKENS = 16


async def prepare_chat(serving: Serving, request: ChatCompletionRequest) -> PreparedRequest:
    """Validate `request` and make its prompt. Raises ApiError."""
    with client_errors(serving, request):
        capabilities = serving.capabilities()
        prepared = _prepare_fields(serving.model, request, capabilities)
        chat = chat_of(request.messages, request)
        token_ids = await serving.prompts.chat(chat, max_model_len=capabilities.max_model_len)
        if not token_ids:
            raise invalid_request("the messages make a prompt of 0 tokens", "messages")
    return replace(prepared, prompts=(token_ids,))


async def prepare_completion(serving: Serving, request: CompletionRequest) -> PreparedRequest:
    """Validate `request` and make its prompts. Raises ApiError."""
    with client_errors(serving, request):
        capabilities = serving.capabilities()
        prepared = _prepare_fields(serving.model, request, capabilities)
        texts_or_ids = _separate_prompts(request.prompt)
        prompts: list[list[int]] = []
        for i, prompt in enumerate(texts_or_ids):
            param = f"prompt[{i}]" if len(texts_or_ids) > 1 else "prompt"
            if isinstance(prompt, str):
                token_ids = await serving.prompts.text(prompt, max_model_len=capabilities.max_model_len)
            else:
                token_ids = prompt
                check_prompt_length(len(token_ids), capabilities.max_model_len)
                check_vocabulary(token_ids, capabilities.vocab_size, param)
            if not token_ids:
                raise invalid_request(f"{param} has 0 tokens; at least 1 is needed", param)
            prompts.append(token_ids)
    return replace(prepared, prompts=tuple(prompts))


def _prepare_fields(
    model: ServedModel, request: ChatCompletionRequest | CompletionRequest, capabilities: EngineCapabilities
) -> PreparedRequest:
    model_name = model.check(request.model)
    refuse_unsupported(request)
    if request.stream_options is not None and not request.stream:
        raise invalid_request("stream_options is only allowed when stream is true", "stream_options")
    try:
        extra_key_spans = cache_salt_spans(request.cache_salt)
    except PromptError as error:
        raise invalid_request(str(error), "cache_salt") from error
    return PreparedRequest(
        model_name=model_name,
        prompts=(),
        sampling_params=_sampling_params(request, capabilities),
        stop_strings=_stop_strings(request.stop),
        extra_key_spans=extra_key_spans,
        priority=request.priority or 0,
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
    )


def _sampling_params(
    request: ChatCompletionRequest | CompletionRequest, capabilities: EngineCapabilities
) -> SamplingParams:
    field, max_tokens = request.max_tokens_field()
    if max_tokens is not None and max_tokens < 1:
        raise invalid_request(f"{field} must be at least 1, got {max_tokens}", field)
    if max_tokens is not None and max_tokens > capabilities.max_model_len:
        raise invalid_request(
            f"{field} is {max_tokens}, but {context_limit(capabilities)}",
            field,
        )
    if max_tokens is None and isinstance(request, CompletionRequest):
        max_tokens = DEFAULT_COMPLETION_TOKENS
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_vocabulary(stop_token_ids, capabilities.vocab_size, "stop_token_ids")
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=max(request.top_k or 0, 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=request.seed,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=request.logit_bias or {},
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        min_tokens=request.min_tokens or 0,
    )


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid_request(f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
    if "" in stops:
        raise invalid_request("stop must not contain an empty string", "stop")
    return stops


def check_vocabulary(token_ids: list[int] | tuple[int, ...], vocab_size: int, param: str) -> None:
    """Raises ApiError (400) naming `param` if a token id is too large."""
    if token_ids and max(token_ids) >= vocab_size:
        raise invalid_request(
            f"{param} holds token id {max(token_ids)}; this model's vocabulary has {vocab_size} tokens"
            f" (ids 0 to {vocab_size - 1})",
            param,
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
