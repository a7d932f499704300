"""`POST /tokenize` and `/detokenize`: what a prompt becomes, without asking the engine."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw

from frontend.errors import invalid_request
from frontend.isolation import isolate, salts_in_chat, salts_in_tokens
from frontend.prompt.breakpoints import check_kept
from frontend.refusals import FieldNames, prompt_errors
from frontend.serving import Serving

from .cache_control import breakpoints_of
from .chat_prompt import chat_of
from .protocol import DetokenizeRequest, TokenizeRequest
from .responses import Detokenized, Tokenized
from .sampling import check_vocabulary
from .unsupported import refuse_unsupported_in_prompt

_FIELDS_OF_CHATS = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)


async def tokenize(serving: Serving, request: TokenizeRequest, caller: str) -> bytes:
    """The tokens a completion endpoint would make of this prompt, as JSON, even if too many. Raises ApiError.

    `caller`: see `api_key.caller_of`.
    """
    serving.model.check(request.model)
    capabilities = serving.client.capabilities
    max_model_len = None if capabilities is None else capabilities.max_model_len
    token_ids = await _token_ids(serving, request, caller, max_model_len)
    spellings = await serving.prompts.spellings(token_ids) if request.return_token_strs else None
    return msgspec.json.encode(Tokenized(len(token_ids), max_model_len, token_ids, spellings))


async def detokenize(serving: Serving, request: DetokenizeRequest) -> bytes:
    """The text of the tokens, special ones spelled out, as JSON. Raises ApiError."""
    serving.model.check(request.model)
    capabilities = serving.client.capabilities
    vocab_size = serving.prompts.tokenizer.vocab_size if capabilities is None else capabilities.vocab_size
    check_vocabulary(request.tokens, vocab_size, "tokens")
    return msgspec.json.encode(Detokenized(await serving.prompts.detokenize(request.tokens)))


async def _token_ids(serving: Serving, request: TokenizeRequest, caller: str, max_model_len: int | None) -> list[int]:
    if request.messages is None:
        if request.prompt is None:
            raise invalid_request("missing required parameter 'prompt' (or 'messages')", "prompt")
        _refuse_fields_of_chats(request)
        with prompt_errors(serving, FieldNames("prompt")):
            isolation = isolate(serving.isolation, caller, request.cache_salt)
            salts_in_tokens(isolation.salts)  # the completions' endpoint would refuse it, too
            return await serving.prompts.text(
                request.prompt,
                max_model_len=max_model_len,
                tenant=isolation.memory_tenant,
                add_special_tokens=request.add_special_tokens is not False,
                check_length=False,
            )
    if request.prompt is not None:
        raise invalid_request("send prompt or messages, not both", "prompt")
    refuse_unsupported_in_prompt(request.messages, request.tools)
    with prompt_errors(serving, FieldNames("messages")):
        isolation = isolate(serving.isolation, caller, request.cache_salt)
        check_kept(None, breakpoints_of(request.messages, request.tools))
        chat = chat_of(request.messages, request, takes_pictures=serving.prompts.pictures is not None)
        salts_in_chat(isolation.salts, chat)  # the chat's endpoint would refuse it, too
        prompt = await serving.prompts.chat(
            chat,
            max_model_len=max_model_len,
            tenant=isolation.memory_tenant,
            add_special_tokens=bool(request.add_special_tokens),
            check_length=False,
        )
        return prompt.token_ids


def _refuse_fields_of_chats(request: TokenizeRequest) -> None:
    for field in _FIELDS_OF_CHATS:
        if getattr(request, field) not in (None, UNSET, Raw(b"null")):
            raise invalid_request(f"{field} is only allowed with messages", field)
