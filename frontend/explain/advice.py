"""An explanation in words, and what to change."""

from __future__ import annotations

from datetime import UTC, datetime

from frontend.prompt.places import MessagePlace, Place, ToolPlace

from .answers import ExplainAnswer


def explanation_of(answer: ExplainAnswer, place: Place | None, *, is_chat: bool) -> str:
    """One or two sentences."""
    found = f"{answer.hit_tokens} of {answer.prompt_tokens} tokens are cached"
    where = _where(place, is_chat)
    at = f"at token {answer.token_index}"
    on = f"from token {answer.token_index} on"
    match answer.component:
        case "none":
            return f"{found}: all that need not be computed in any case."
        case "text":
            return f"{found}. The longest cached relative goes on differently {at}, in {where}."
        case "date":
            return f"{found}. The longest cached relative has another date or time {at}, in {where}."
        case "template":
            around = "" if place is None else f" around {place}"
            return f"{found}. The longest cached relative differs {at} in what the chat template writes{around}."
        case "tool":
            return f"{found}. The tools differ from those of the longest cached relative {at}, in {where}."
        case "tool_order":
            return f"{found}. The longest cached relative has the same tools in another order, {on}."
        case "image":
            return f"{found}. Picture {answer.image} ({where}) is another one than in the longest cached relative."
        case "lora":
            if answer.other_model is None:
                return f"{found}. The same tokens are cached for another LoRA adapter, or for none, {on}."
            return (
                f"{found} for '{answer.model}'; for '{answer.other_model}' {answer.other_model_hit_tokens} are, which"
                " were computed with other weights."
            )
        case "extra_key":
            return f"{found}. The same tokens are cached under another extra key, {on}."
        case "salt":
            return (
                f"{found} under the request's salt; without cache_salt {answer.unsalted_hit_tokens} would be found,"
                " which were computed for requests without one."
            )
        case "evicted":
            return f"{found}. What comes next was cached and gave way to other requests{_when(answer)}."
        case "reset":
            return f"{found}. What comes next was cached until the cache was reset{_when(answer)}."
        case "never_stored" if answer.token_index == 0:
            return f"{found}: nothing that begins like this request is cached, or was lately."
        case "never_stored":
            return f"{found}. It goes on behind the end of the longest cached relative {at}, in {where}."
        case "block_boundary":
            return f"{found}. {answer.token_index} are there, but only whole blocks are found on this server."
        case "read_disabled":
            return f"{found} for a request that does not read the cache; else {answer.readable_hit_tokens} would be."
        case "cache_disabled":
            return "This server has no prefix cache."


def advice_on(answer: ExplainAnswer, place: Place | None, *, is_chat: bool) -> str:
    """One sentence; empty where nothing is to be changed."""
    where = _where(place, is_chat)
    match answer.component:
        case "text" if place is not None and place == MessagePlace(0, 0):
            return f"Move what changes in {where} to the last message, so that what stays the same comes first."
        case "text":
            return f"If {where} was meant to be the same, send it unchanged; else put what stays the same before it."
        case "date":
            return f"Leave the date out of {where}, round it, or move it to the last message."
        case "template":
            return (
                "Send the same roles, tools, chat_template_kwargs, add_generation_prompt and continue_final_message"
                " with each request of a chat."
            )
        case "tool":
            return "Send the same tools with the same definitions each time; put those that change last."
        case "tool_order":
            return "Send tools in the same order each time, for instance sorted by name."
        case "image":
            return f"Put pictures that change behind what stays the same, or send the one of {where} unchanged."
        case "salt":
            return (
                "If others may share this, leave out cache_salt, or let it count from a later place: cache_salt.from."
            )
        case "lora":
            return "Nothing computed with one adapter can be used with another: send the same model."
        case "extra_key":
            return "Send the same extra_key_spans."
        case "evicted":
            return "Keep the prefix with cache.ttl_s or cache_control, or give the server a larger pool (--num-blocks)."
        case "block_boundary":
            return "Start the server with --prefix-match-unit token."
        case "read_disabled":
            return "Leave out cache.read: false and prompt_logprobs (or echo with logprobs)."
        case "cache_disabled":
            return "Start the server without --no-enable-prefix-caching."
        case "none" | "reset" | "never_stored":
            return ""


def _where(place: Place | None, is_chat: bool) -> str:
    match place:
        case MessagePlace() | ToolPlace():
            return str(place)
        case None:
            return "the text of the chat template" if is_chat else "the prompt"


def _when(answer: ExplainAnswer) -> str:
    if answer.lost_at is None:
        return ""
    return f" at {datetime.fromtimestamp(answer.lost_at, UTC).isoformat(timespec='seconds')}"
