"""What clients of the OpenAI API may send. The types are the validation; the descriptions are the documentation.

`None` means "not given" everywhere: many clients send null for what they leave out. Fields that are accepted
but not done yet are listed in `openai.unsupported`; a field that is not named here is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from frontend.prompt.cache_options import CacheControl, CacheOptions
from frontend.prompt.cache_salt import CacheSalt
from frontend.request_fields import Ignored, Int64, JsonObject, NotYet

TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
TokenId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
KeepUpToHere = Annotated[
    CacheControl | None,
    Meta(description="Keep the prompt up to the end of this cached for a while; in up to 4 places of a request."),
]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: Annotated[
        bool | None,
        Meta(description="Send one more chunk before the end, with `usage` and without choices."),
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="Every chunk has the `usage` so far; cached tokens are known in the first.")
    ] = None
    include_obfuscation: Annotated[bool | None, Ignored] = None


class RequestFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both completion APIs take."""

    model: Annotated[str | None, Meta(description="A served model's name; default the first one served.")] = None
    max_tokens: Annotated[Int64 | None, Meta(description="Most tokens to generate, at least 1.")] = None
    temperature: Annotated[Annotated[float, Meta(ge=0, le=2)] | None, Meta(description="0 is greedy; default 1.")] = (
        None
    )
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, Meta(description="1 (default) is off.")] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None, Meta(description="0 or -1 (default) is off.")
    ] = None
    seed: Annotated[
        Int64 | None, Meta(description="With a seed the outcome does not depend on what else the server does.")
    ] = None
    stop: Annotated[
        str | list[str] | None,
        Meta(description="Up to 16 strings that end the text; the one that ended it is not part of it."),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, Meta(description="The text includes what ended it: the stop string, or the text of the token.")
    ] = None
    stop_token_ids: Annotated[list[TokenId] | None, Meta(description="Tokens that end the text.")] = None
    ignore_eos: Annotated[bool | None, Meta(description="Go on after the model's end-of-sequence token.")] = None
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[
        CacheSalt | None,
        Meta(
            description="Share cached prefixes only with requests of the same salt. 1 to 128 characters, none of"
            " `@`, `/`, `\\`, NUL. As an object, from a place on: what comes before is shared by all."
        ),
    ] = None
    cache: Annotated[
        CacheOptions | None, Meta(description="Whether to use the prefix cache, and how long to keep the prompt there.")
    ] = None
    priority: Annotated[
        Int64 | None, Meta(description="Lower runs first, where the server schedules by priority; default 0.")
    ] = None

    presence_penalty: Annotated[
        float | None,
        Meta(description="In [-2, 2]: taken from the logits of tokens that stand in the output; default 0."),
    ] = None
    frequency_penalty: Annotated[
        float | None, Meta(description="In [-2, 2]: the same once for each time the token stands there; default 0.")
    ] = None
    repetition_penalty: Annotated[
        float | None, Meta(description="Above 1, tokens that stand in prompt or output become less likely; default 1.")
    ] = None
    min_p: Annotated[
        float | None, Meta(description="Least probability, relative to the most likely token's; default 0.")
    ] = None
    logit_bias: Annotated[dict[int, float] | None, Meta(description="Token id → what is added to its logit.")] = None
    allowed_token_ids: Annotated[
        list[TokenId] | None, Meta(description="If given, only these tokens can be generated.")
    ] = None
    min_tokens: Annotated[
        Int64 | None, Meta(description="Nothing but a stop string ends the output before it has as many tokens.")
    ] = None

    bad_words: Annotated[
        list[str] | None,
        Meta(description="Texts that are not generated in the tokens they have alone or after a space."),
    ] = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=128)] | None,
        Meta(
            description="How many choices to generate for each prompt, which is computed and counted once; default 1."
        ),
    ] = None
    prompt_logprobs: Annotated[
        TopLogprobs | None,
        Meta(
            description="For each token of the prompt but the first: its log-probability, and that of so many of the"
            " likeliest tokens in its place. Such a request reads nothing from the prefix cache. Not with `stream`."
        ),
    ] = None

    user: Annotated[str | None, Ignored] = None
    use_beam_search: Annotated[bool | None, NotYet] = None

    def max_tokens_field(self) -> tuple[str, int | None]:
        """The limit on generated tokens, and the name of the field that sets it."""
        return "max_tokens", self.max_tokens


class TextPart(Struct, forbid_unknown_fields=True, tag="text", tag_field="type"):
    text: str
    cache_control: KeepUpToHere = None


class ImageUrl(Struct, forbid_unknown_fields=True):
    url: Annotated[
        str,
        Meta(description="`data:image/png;base64,…`; where the server allows it, `http(s)://…` or `file:///…`."),
    ]
    detail: Annotated[
        Literal["auto", "low", "high"] | None,
        Meta(description="With `low` the picture is made to fit 512 × 512 first. Default `auto`, which is `high`."),
    ] = None


class ImageUrlPart(Struct, forbid_unknown_fields=True, tag="image_url", tag_field="type"):
    image_url: Annotated[
        ImageUrl | str | None,
        Meta(description="A picture, or just its URL; null if `uuid` names one that came before."),
    ]
    uuid: Annotated[
        str | None, Meta(description="A name for this picture. Later requests can send it without the picture.")
    ] = None
    cache_control: KeepUpToHere = None


class InputAudioPart(Struct, tag="input_audio", tag_field="type"):
    input_audio: Annotated[Any, NotYet]


class FilePart(Struct, tag="file", tag_field="type"):
    file: Annotated[Any, NotYet]


class VideoUrlPart(Struct, tag="video_url", tag_field="type"):
    video_url: Annotated[Any, NotYet]


ContentPart = TextPart | ImageUrlPart | InputAudioPart | FilePart | VideoUrlPart


class CalledFunction(Struct, forbid_unknown_fields=True):
    name: str
    arguments: Annotated[str, Meta(description="A JSON object, as a string.")]
    # SDKs add it to what they were answered.
    parsed_arguments: Annotated[Any, Ignored] = None


class ToolCallField(Struct, forbid_unknown_fields=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    # Of a call in a stream.
    index: Annotated[int | None, Ignored] = None


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn of a chat. An answer's `message` can be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | list[ContentPart] | None,
        Meta(
            description="A string, or a list of texts and, where a model takes them, pictures; null only for assistants"
        ),
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallField] | None, Meta(description="Of an assistant: the calls it asked for.")] = (
        None
    )
    tool_call_id: Annotated[
        str | None, Meta(description="Of the role `tool`, and required there: the call whose result this is.")
    ] = None
    reasoning_content: Annotated[Any, Ignored] = None
    reasoning: Annotated[Any, Ignored] = None
    refusal: Annotated[str | None, Ignored] = None
    annotations: Annotated[list[Any] | None, Ignored] = None
    parsed: Annotated[Any, Ignored] = None
    audio: Annotated[Any, NotYet] = None
    function_call: Annotated[Any, NotYet] = None


class FunctionDefinition(Struct, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: Annotated[
        JsonObject | UnsetType, Meta(description="JSON schema of the arguments. The order of its keys does not matter.")
    ] = UNSET
    strict: Annotated[bool | None, NotYet] = None


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: KeepUpToHere = None


# What decides how messages are rendered, besides themselves.
Tools = Annotated[list[Tool] | None, Meta(description="Functions that the model is shown, in this order.")]
AddGenerationPrompt = Annotated[
    bool | None,
    Meta(
        description="End the prompt where the assistant is to speak; default true, or false with"
        " `continue_final_message`."
    ),
]
ContinueFinalMessage = Annotated[
    bool | None, Meta(description="Go on with the last message instead of beginning a new one; default false.")
]
ChatTemplateKwargs = Annotated[
    JsonObject | UnsetType, Meta(description="More variables for the model's chat template, by name.")
]
MmProcessorKwargs = Annotated[
    JsonObject | UnsetType,
    Meta(description="Settings of the model's image processor for all pictures of this request, by name."),
]


class ResponseFormat(Struct):
    type: str


class ChatCompletionRequest(RequestFields, forbid_unknown_fields=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Annotated[
        Int64 | None, Meta(description="Most tokens to generate; default as many as fit. Goes before `max_tokens`.")
    ] = None

    tools: Tools = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = None
    chat_template_kwargs: ChatTemplateKwargs = UNSET
    mm_processor_kwargs: MmProcessorKwargs = UNSET
    tool_choice: Annotated[
        Any,
        Meta(
            description="`auto` or `none`. Neither changes the prompt: with `none` the model still sees the tools, so"
            " that the cache finds them, and a call it makes even so is text."
        ),
    ] = None
    store: Annotated[bool | None, Ignored] = None
    metadata: Annotated[dict[str, str] | None, Ignored] = None
    service_tier: Annotated[str | None, Ignored] = None
    safety_identifier: Annotated[str | None, Ignored] = None
    prompt_cache_key: Annotated[str | None, Ignored] = None
    prompt_cache_retention: Annotated[str | None, Ignored] = None
    prediction: Annotated[Any, Ignored] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="With false, calls after the first are left out of a choice; default true.")
    ] = None

    logprobs: Annotated[bool | None, Meta(description="Report the log-probability of each generated token.")] = None
    top_logprobs: Annotated[
        TopLogprobs | None,
        Meta(description="With `logprobs`: list so many of the likeliest tokens in each place; default 0."),
    ] = None
    functions: Annotated[list[Any] | None, NotYet] = None
    function_call: Annotated[Any, NotYet] = None
    response_format: Annotated[ResponseFormat | None, NotYet] = None
    modalities: Annotated[list[str] | None, NotYet] = None
    audio: Annotated[Any, NotYet] = None
    reasoning_effort: Annotated[str | None, NotYet] = None
    verbosity: Annotated[str | None, NotYet] = None
    web_search_options: Annotated[Any, NotYet] = None

    def max_tokens_field(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class CompletionRequest(RequestFields, forbid_unknown_fields=True, kw_only=True):
    prompt: Annotated[
        str | list[str | TokenId | list[TokenId]],
        Meta(
            description="One prompt (a string, or a list of token ids), or several (a list of strings, or of lists of"
            " token ids), each of which gets a choice, in order."
        ),
    ]

    echo: Annotated[
        bool | None,
        Meta(
            description="The text begins with the prompt, and so do the `logprobs`. `max_tokens` may be 0 then: nothing"
            " follows."
        ),
    ] = None
    best_of: Annotated[int | None, Meta(description="Null or equal to `n`: all that is generated is returned.")] = None
    logprobs: Annotated[
        TopLogprobs | None,
        Meta(description="Report each token's log-probability, and so many of the likeliest tokens in each place."),
    ] = None
    suffix: Annotated[str | None, NotYet] = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Of `prompt` and `messages` one."""

    model: Annotated[str | None, Meta(description="A served model's name; default the first one served.")] = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: Tools = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = None
    chat_template_kwargs: ChatTemplateKwargs = UNSET
    mm_processor_kwargs: MmProcessorKwargs = UNSET
    cache_salt: Annotated[
        CacheSalt | None,
        Meta(description="As in the request to come: what is kept of texts and pictures is kept for its salt."),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(
            description="Add what the tokenizer puts around a bare text; default true with `prompt`, false with"
            " `messages`, as the completion endpoints have it."
        ),
    ] = None
    return_token_strs: Annotated[bool | None, Meta(description="Also tell how the vocabulary spells each token.")] = (
        None
    )


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    model: Annotated[str | None, Meta(description="A served model's name; default the first one served.")] = None
    tokens: list[TokenId]
