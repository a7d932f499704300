"""Log-probabilities as the API shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from frontend.continuation import ScoredToken
from ipc.vocabulary import TokenLogprob

from .responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
)

TokenBytes = Callable[[int], bytes]

# JSON has no infinity; the API's number for "impossible".
_LEAST_LOGPROB = -9999.0


def chat_logprobs(tokens: Iterable[ScoredToken], num_top_tokens: int, token_bytes: TokenBytes) -> ChatLogprobs:
    """Of generated tokens. Each lists its `num_top_tokens` likeliest rivals, itself included where it is one."""
    content = []
    for token in tokens:
        if token.logprob is None:
            continue
        value = token_bytes(token.token_id)
        top = [
            ChatTopLogprob(_text(rival), _finite(logprob), list(rival))
            for rival, logprob in ((token_bytes(i), logprob) for i, logprob in token.logprob.top[:num_top_tokens])
        ]
        content.append(ChatTokenLogprob(_text(value), _finite(token.logprob.logprob), list(value), top))
    return ChatLogprobs(content)


def completion_logprobs(
    tokens: Iterable[ScoredToken], num_top_tokens: int, token_bytes: TokenBytes
) -> CompletionLogprobs:
    """Of generated tokens and those of an echoed prompt. In each place the token itself is among the likeliest.

    The API knows these by their text alone: of several that look the same (parts of characters) it shows the likeliest.
    """
    shown = CompletionLogprobs([], [], [], [])
    for token in tokens:
        text = _text(token_bytes(token.token_id))
        shown.tokens.append(text)
        shown.text_offset.append(token.text_offset)
        if token.logprob is None:
            shown.token_logprobs.append(None)
            shown.top_logprobs.append(None)
            continue
        logprob = _finite(token.logprob.logprob)
        top: dict[str, float] = {}
        for token_id, value in token.logprob.top[:num_top_tokens]:
            top.setdefault(_text(token_bytes(token_id)), _finite(value))
        top.setdefault(text, logprob)
        shown.token_logprobs.append(logprob)
        shown.top_logprobs.append(top)
    return shown


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], num_top_tokens: int, token_bytes: TokenBytes
) -> PromptLogprobs:
    """Of a prompt's tokens, each first in its place."""
    return [None if entry is None else _place(entry, num_top_tokens, token_bytes) for entry in entries]


def _place(entry: TokenLogprob, num_top_tokens: int, token_bytes: TokenBytes) -> dict[int, PromptLogprob]:
    def shown(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(_finite(logprob), rank, _text(token_bytes(token_id)))

    place = {entry.token_id: shown(entry.token_id, entry.logprob, entry.rank)}
    for rank, (token_id, logprob) in enumerate(entry.top[:num_top_tokens], start=1):
        if token_id != entry.token_id:
            place[token_id] = shown(token_id, logprob, rank)
    return place


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
