"""`POST /v1/messages`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from frontend.choice import ChoiceReader, Part
from frontend.prepared import PreparedRequest, TokenCounts, run
from frontend.refusals import client_errors
from frontend.serving import Serving
from frontend.tool_calls import WrittenCall

from .prepare import AskedMessage
from .responses import (
    EMPTY_OBJECT,
    AnsweredBlock,
    AnsweredMessage,
    AnsweredText,
    AnsweredToolUse,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageDelta,
    MessageStart,
    MessageStop,
    StopDelta,
    StopReason,
    StreamedEvent,
    TextDelta,
    encode_event,
)
from .usage import MessageUsage, delta_usage, usage_of


async def answer_message(serving: Serving, asked: AskedMessage, counts: TokenCounts, answer_id: str) -> bytes:
    """The whole answer, as JSON, counted in `counts`. Raises ApiError."""
    prepared = asked.prepared
    reader = ChoiceReader(prepared.tools)
    parts: list[Part] = []
    with client_errors(serving, asked.names):
        async with aclosing(run(serving, prepared, answer_id)) as deltas:
            async for index, delta in deltas:
                counts.add(index, delta)
                parts += reader.read(delta)
    answer = _message(prepared, counts, answer_id)
    answer.content = _blocks(parts)
    stop = _stop(parts[-1], asked.max_tokens, counts)
    answer.stop_reason, answer.stop_sequence = stop.stop_reason, stop.stop_sequence
    return msgspec.json.encode(answer)


async def stream_message(
    serving: Serving, asked: AskedMessage, counts: TokenCounts, answer_id: str
) -> AsyncGenerator[bytes]:
    """The answer as server-sent events. The first comes with the first token.

    What was sent so far is counted in `counts`. Raises ApiError.
    """
    prepared = asked.prepared
    reader = ChoiceReader(prepared.tools)
    blocks = _BlockEvents()
    has_begun = False
    with client_errors(serving, asked.names):
        async with aclosing(run(serving, prepared, answer_id)) as deltas:
            async for index, delta in deltas:
                counts.add(index, delta)
                events: list[StreamedEvent] = []
                if not has_begun:
                    has_begun = True
                    events.append(MessageStart(_message(prepared, counts, answer_id)))
                for part in reader.read(delta):
                    events += blocks.of(part)
                    if part.finish_reason is not None:
                        usage = delta_usage(_usage(prepared, counts))
                        events += [MessageDelta(_stop(part, asked.max_tokens, counts), usage), MessageStop()]
                if events:
                    yield b"".join(map(encode_event, events))


def _message(prepared: PreparedRequest, counts: TokenCounts, answer_id: str) -> AnsweredMessage:
    return AnsweredMessage(id=answer_id, model=prepared.model_name, content=[], usage=_usage(prepared, counts))


def _usage(prepared: PreparedRequest, counts: TokenCounts) -> MessageUsage:
    (prompt,) = prepared.prompts
    return usage_of(counts, prompt.keep)


def _blocks(parts: list[Part]) -> list[AnsweredBlock]:
    """Of all parts of an answer: texts that follow each other are one block, without the space behind a call."""
    blocks: list[AnsweredBlock] = []
    texts: list[str] = []
    for part in parts:
        if part.text:
            texts.append(part.text.lstrip() if blocks and not texts else part.text)
        if texts and (part.call is not None or part.finish_reason is not None):
            blocks.append(AnsweredText("".join(texts)))
            texts = []
        if part.call is not None:
            blocks.append(_tool_use(part.call, Raw(part.call.arguments.encode())))
    return blocks


@dataclass(slots=True)
class _BlockEvents:
    """Makes the events of an answer's blocks."""

    index: int = 0
    is_in_text: bool = False

    def of(self, part: Part) -> list[StreamedEvent]:
        """What `part` adds. Each part is to be shown once, in their order."""
        events: list[StreamedEvent] = []
        if part.text:
            text = part.text
            if not self.is_in_text:
                events.append(ContentBlockStart(self.index, AnsweredText("")))
                self.is_in_text = True
                text = text.lstrip() if self.index else text
            events.append(ContentBlockDelta(self.index, TextDelta(text)))
        if self.is_in_text and (part.call is not None or part.finish_reason is not None):
            events.append(self._end())
            self.is_in_text = False
        if part.call is not None:
            events += [
                ContentBlockStart(self.index, _tool_use(part.call, EMPTY_OBJECT)),
                ContentBlockDelta(self.index, InputJsonDelta(part.call.arguments)),
                self._end(),
            ]
        return events

    def _end(self) -> ContentBlockStop:
        self.index += 1
        return ContentBlockStop(self.index - 1)


def _tool_use(call: WrittenCall, arguments: Raw) -> AnsweredToolUse:
    return AnsweredToolUse(f"toolu_{uuid.uuid4().hex}", call.name, arguments)


def _stop(last: Part, max_tokens: int, counts: TokenCounts) -> StopDelta:
    """Of an answer whose last part is `last`."""
    reason: StopReason
    if last.finish_reason == "tool_calls":
        reason = "tool_use"
    elif last.finish_reason == "length":
        has_room = counts.completion_tokens < max_tokens
        reason = "model_context_window_exceeded" if has_room else "max_tokens"
    elif isinstance(last.stop_reason, str):
        return StopDelta("stop_sequence", last.stop_reason)
    else:
        reason = "end_turn"
    return StopDelta(reason, None)
