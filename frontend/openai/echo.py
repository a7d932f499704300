"""`echo`: a completion's text, and its log-probabilities, begin with the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from frontend.continuation import ScoredToken, TextDelta
from frontend.prepared import PreparedRequest
from frontend.serving import Serving
from ipc.vocabulary import TokenLogprob


async def with_prompts(
    serving: Serving, prepared: PreparedRequest, deltas: AsyncGenerator[tuple[int, TextDelta]]
) -> AsyncGenerator[tuple[int, TextDelta]]:
    """What `run` yields for a request with `prompt_texts`, each choice's first delta beginning with its prompt."""
    n = prepared.sampling_params.n
    begun: set[int] = set()
    scored_prompts: dict[int, list[ScoredToken]] = {}
    async with aclosing(deltas):
        async for index, delta in deltas:
            prompt_index = index // n
            text = prepared.prompt_texts[prompt_index]
            delta.scored_tokens = [
                replace(token, text_offset=len(text) + token.text_offset) for token in delta.scored_tokens
            ]
            if index not in begun:
                begun.add(index)
                delta.text = text + delta.text
                if prepared.logprobs is not None and delta.prompt_logprobs is not None:
                    if prompt_index not in scored_prompts:
                        # In a thread: there may be many tokens.
                        scored_prompts[prompt_index] = await asyncio.to_thread(
                            _score, serving, text, prepared.prompts[prompt_index].token_ids, delta.prompt_logprobs
                        )
                    delta.scored_tokens = [*scored_prompts[prompt_index], *delta.scored_tokens]
            yield index, delta


def _score(
    serving: Serving, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> list[ScoredToken]:
    offsets = token_offsets(serving, text, token_ids)
    return [ScoredToken(*token) for token in zip(offsets, token_ids, logprobs, strict=True)]


def token_offsets(serving: Serving, text: str, token_ids: Sequence[int]) -> list[int]:
    """Where in `text` each of its tokens begins, in characters.

    A special token takes room only where the text spells it. If the tokenizer changed the text before it cut it (case,
    Unicode forms), later offsets are as far off as the lengths differ, and never beyond the text's end.
    """
    detokenizer = serving.new_detokenizer()
    offsets = []
    position = 0
    for token_id in token_ids:
        offsets.append(min(position, len(text)))
        piece = detokenizer.push((token_id,))
        if not piece:
            spelled = serving.token_bytes(token_id).decode("utf-8", "replace")
            piece = spelled if text.startswith(spelled, position) else ""
        position += len(piece)
    return offsets


def prompt_text(serving: Serving, token_ids: Sequence[int]) -> str:
    """The text of a prompt that came as tokens. Special tokens have none."""
    detokenizer = serving.new_detokenizer()
    return detokenizer.push(token_ids) + detokenizer.flush()
