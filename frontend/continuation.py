"""One continuation of a prompt: its tokens → what may be shown of it, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ipc.vocabulary import CacheReport, RequestError, RequestOutput, TokenLogprob

from .detokenizer import Detokenizer
from .engine_errors import RequestRefusedError
from .stop_strings import StopStringScanner


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability (None for the first of a prompt, which nothing predicts).

    `text_offset`: characters of the text before the token's own.
    """

    text_offset: int
    token_id: int
    logprob: TokenLogprob | None


@dataclass(slots=True)
class TextDelta:
    """What one engine output added to the continuation `index` of its request.

    `num_tokens` counts the output's tokens, whether they have shown as text yet or not (special tokens never do).
    `stop_reason` is the stop string or the id of `stop_token_ids` that ended the text, if one did. `scored_tokens` are
    those whose text begins in `text` or before it, each once, where log-probabilities were asked for.
    `prompt_logprobs`, where asked for, are in every delta. `cache` is in the request's first one.
    """

    text: str
    num_tokens: int
    num_cached_tokens: int
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    index: int = 0
    scored_tokens: Sequence[ScoredToken] = ()
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cache: CacheReport | None = None


class Continuation:
    """Turns the outputs of one continuation into deltas, up to the end of sequence or a stop string.

    Neither is part of the text, unless `include_stop`: then the stop string is, and so is the text of the token that
    ended the sequence. A token's log-probability comes with the beginning of its text, so text and log-probabilities
    agree in every delta: of what a stop string cuts off there is neither. The token that ended the sequence has one.
    """

    def __init__(self, detokenizer: Detokenizer, stop_strings: Sequence[str], *, include_stop: bool = False) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopStringScanner(stop_strings, include_stop=include_stop)
        self._include_stop = include_stop
        self._scored: deque[ScoredToken] = deque()
        # In characters: what was detokenized, and what of it was handed out.
        self._num_known = 0
        self._num_shown = 0

    def take(self, output: RequestOutput) -> TextDelta:
        """What `output` adds. Nothing may be taken after a delta with a `finish_reason`.

        Raises RequestRefusedError if the engine gave the request up.
        """
        finish = output.finish_reason
        if finish == "abort" or finish == "error":  # noqa: PLR1714 - narrows the type
            raise RequestRefusedError(output.error or RequestError("internal", "the engine gave the request up"))
        token_ids = output.new_token_ids
        num_in_text = len(token_ids) - (finish == "stop" and not self._include_stop)
        texts: list[str] = []
        # One by one, so that what is counted and shown does not depend on how tokens were grouped on the way.
        for place in range(num_in_text):
            if output.logprobs is not None:
                self._score(output.logprobs[place])
            if (stop := self._show(self._detokenizer.push((token_ids[place],)), texts)) is not None:
                return self._delta(output, texts, place + 1, "stop", stop)
        if finish is None:
            return self._delta(output, texts, len(token_ids), None, None)
        if (stop := self._show(self._detokenizer.flush(), texts)) is not None:
            return self._delta(output, texts, len(token_ids), "stop", stop)
        texts.append(self._scanner.flush())
        if output.logprobs is not None and num_in_text < len(token_ids):
            self._score(output.logprobs[-1])
        delta = self._delta(output, texts, len(token_ids), finish, output.stop_reason)
        # What is left has no text, but nothing cut it off.
        delta.scored_tokens = [*delta.scored_tokens, *self._scored]
        return delta

    def _score(self, logprob: TokenLogprob) -> None:
        self._scored.append(ScoredToken(self._num_known, logprob.token_id, logprob))

    def _show(self, text: str, texts: list[str]) -> str | None:
        """Adds to `texts` what may be shown; returns the stop string that ended it, if one did."""
        self._num_known += len(text)
        shown, stop = self._scanner.push(text)
        texts.append(shown)
        return stop

    def _delta(
        self,
        output: RequestOutput,
        texts: list[str],
        num_tokens: int,
        finish_reason: Literal["stop", "length"] | None,
        stop_reason: str | int | None,
    ) -> TextDelta:
        text = "".join(texts)
        self._num_shown += len(text)
        scored_tokens = []
        while self._scored and self._scored[0].text_offset < self._num_shown:
            scored_tokens.append(self._scored.popleft())
        return TextDelta(
            text,
            num_tokens,
            output.num_cached_tokens,
            finish_reason,
            stop_reason,
            output.index,
            scored_tokens,
            cache=output.cache,
        )
