"""A client of any server that speaks the OpenAI chat API: what `foreword chat` and `foreword bench` ask through.

It expects nothing of the server: whatever comes back, or does not, is an answer or a `ServerError` a person can read.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import httpx
import msgspec

MAX_EVENT_BYTES = 8 << 20
MAX_BODY_BYTES = 64 << 20
MAX_REASON_CHARS = 500
MAX_PORT = 65535
CONNECT_TIMEOUT_S = 10.0


class ServerError(Exception):
    """The server did not answer as asked. The message is one a person can act on."""


class UnreachableError(ServerError):
    """Nobody answers, or nobody says anything any more."""


class RefusedError(ServerError):
    """An HTTP status other than success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server answered {status}: {message}")
        self.status = status


class BrokenAnswerError(ServerError):
    """The answer broke off, told of an error, or is not the OpenAI API's."""


class Usage(msgspec.Struct, frozen=True):
    """`cached_tokens` and `image_tokens` are None where the server does not report them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    image_tokens: int | None = None


class Delta(NamedTuple):
    """Text that arrived: of the answer, or of the thoughts some models have before it."""

    kind: Literal["answer", "reasoning"]
    text: str


@dataclass(slots=True)
class Answer:
    """What has come of an answer so far. Times count from when the request was sent.

    `arrivals_s` has one entry per event that brought text; the end of an answer without any counts as one.
    """

    texts: list[str] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None
    total_s: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None before it."""
        return self.arrivals_s[0] if self.arrivals_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens per second after the first; None if there were fewer than two, or their number is not known."""
        if self.usage is None or self.usage.completion_tokens < 2 or len(self.arrivals_s) < 2:
            return None
        elapsed_s = self.arrivals_s[-1] - self.arrivals_s[0]
        return (self.usage.completion_tokens - 1) / elapsed_s if elapsed_s > 0 else None


class ModelCard(msgspec.Struct):
    """One entry of `/v1/models`. `max_model_len` is what vLLM and Foreword add to it."""

    id: str
    max_model_len: int | None = None


class OpenAIClient:
    """Talks to the server at `url`, with or without a `/v1` at its end. Close it with `aclose`.

    Args:
        silence_timeout_s: a server that sends nothing for so long is given up.

    Raises:
        ValueError: `url` is none, or `api_key` cannot be one.
    """

    def __init__(self, url: str, *, api_key: str | None = None, silence_timeout_s: float = 600.0) -> None:
        self.url = _base_url(url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the API key has characters that no HTTP header can hold")
        self._silence_timeout_s = silence_timeout_s
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(silence_timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            # A proxy named in the environment is for other machines, and seldom knows of this one's ports.
            trust_env=not _is_this_machine(self.url),
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def find_model(self, name: str | None) -> ModelCard:
        """The model called `name`, or the first the server lists.

        With a `name`, a server that has no list, or another one, is asked all the same: it can tell by itself that it
        does not know the model. Raises ServerError.
        """
        try:
            async with self._response("GET", "models") as response:
                listed: list[ModelCard] = _decode(_models_decoder, await _read(response)).data
        except RefusedError:
            if name is None:
                raise
            listed = []
        if name is not None:
            return next((card for card in listed if card.id == name), ModelCard(name))
        if not listed or not listed[0].id.isprintable():
            raise BrokenAnswerError("the server lists no model, or one whose name cannot be printed")
        return listed[0]

    async def ask(self, body: dict[str, Any], answer: Answer) -> None:
        """Request a whole answer; fills `answer`. Raises ServerError."""
        started_s = time.perf_counter()
        async with self._response("POST", "chat/completions", body) as response:
            completion = _decode(_event_decoder, await _read(response))
            answer.total_s = time.perf_counter() - started_s
        _note(completion, answer, answer.total_s)
        if answer.finish_reason is None:
            raise BrokenAnswerError("the server's answer has no choices")

    async def stream(self, body: dict[str, Any], answer: Answer) -> AsyncGenerator[Delta]:
        """Request an answer as a stream and yield its text as it comes; fills `answer`, `usage` included.

        Closing the generator closes the connection, which ends the server's work. Raises ServerError; what had
        come until then is in `answer`.
        """
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        started_s = time.perf_counter()
        async with self._response("POST", "chat/completions", body) as response, aclosing(_events(response)) as events:
            async for data in events:
                for delta in _note(_decode(_event_decoder, data), answer, time.perf_counter() - started_s):
                    yield delta
            answer.total_s = time.perf_counter() - started_s
            if answer.finish_reason is None:
                what = response.headers.get("content-type", "no content type")
                raise BrokenAnswerError(f"the stream ended before the answer did ({what})")

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> AsyncIterator[httpx.Response]:
        try:
            async with self._http.stream(method, f"{self.url}/{path}", json=body) as response:
                if not response.is_success:
                    raise RefusedError(response.status_code, _reason(response, await _read(response)))
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UnreachableError(f"no server answers at {self.url}: {str(error) or 'timed out'}") from error
        except httpx.TimeoutException as error:
            raise UnreachableError(f"the server said nothing for {self._silence_timeout_s:g} s") from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise BrokenAnswerError(
                f"the connection to the server broke: {str(error) or type(error).__name__}"
            ) from error


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    # A chunk of a stream has a delta, a whole answer a message.
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None
    image_tokens: int | None = None


class _UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _PromptTokensDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _UsageBody | None = None
    error: Any = None


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


_event_decoder = msgspec.json.Decoder(_Event)
_models_decoder = msgspec.json.Decoder(_ModelList)


def _note(event: _Event, answer: Answer, now_s: float) -> list[Delta]:
    if event.error is not None:
        raise BrokenAnswerError(f"the server broke the answer off: {_message_of(event.error)}")
    if event.usage is not None:
        details = event.usage.prompt_tokens_details or _PromptTokensDetails()
        answer.usage = Usage(
            event.usage.prompt_tokens, event.usage.completion_tokens, details.cached_tokens, details.image_tokens
        )
    deltas: list[Delta] = []
    for choice in event.choices or []:
        message = choice.delta or choice.message or _Message()
        if reasoning := message.reasoning_content or message.reasoning:
            deltas.append(Delta("reasoning", reasoning))
        if message.content:
            deltas.append(Delta("answer", message.content))
            answer.texts.append(message.content)
        answer.finish_reason = choice.finish_reason or answer.finish_reason
    if deltas or (answer.finish_reason is not None and not answer.arrivals_s):
        answer.arrivals_s.append(now_s)
    return deltas


async def _events(response: httpx.Response) -> AsyncGenerator[bytes]:
    """The data of each server-sent event until `[DONE]` or the end. Raises BrokenAnswerError."""
    # httpx's own lines end at U+2028 and its like too, which JSON strings may contain.
    pending = bytearray()
    async for piece in response.aiter_bytes():
        pending += piece
        *lines, rest = pending.split(b"\n") if b"\n" in piece else (pending,)
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = bytes(line[5:].strip())
            if data == b"[DONE]":
                return
            yield data
        pending = rest
        if len(pending) > MAX_EVENT_BYTES:
            raise BrokenAnswerError(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")


async def _read(response: httpx.Response) -> bytes:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise BrokenAnswerError(f"the server sent more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _decode(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BrokenAnswerError(f"the server's answer is not the OpenAI API's ({error}): {_excerpt(data)}") from error


def _reason(response: httpx.Response, body: bytes) -> str:
    """What the body of an error says: the message of the OpenAI API's shape, or of others, or simply its text."""
    if response.has_redirect_location:
        return f"look at {response.headers['location']}"
    try:
        return _message_of(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _excerpt(body) or response.reason_phrase


def _message_of(error: Any) -> str:
    while isinstance(error, dict):
        told = next((error[key] for key in ("error", "message", "detail") if error.get(key)), None)
        if told is None:
            break
        error = told
    return _printable(error if isinstance(error, str) else msgspec.json.encode(error).decode())


def _excerpt(data: bytes) -> str:
    return _printable(data[: 4 * MAX_REASON_CHARS].decode(errors="replace"))


def _printable(text: str) -> str:
    """One line that does nothing to a terminal but stand there."""
    words = " ".join(text[:MAX_REASON_CHARS].split())
    return "".join(character for character in words if character.isprintable())


def _base_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 0) > MAX_PORT:
        raise ValueError(f"{url!r} is no URL like http://127.0.0.1:8000")
    stripped = url.rstrip("/")
    return stripped if stripped.endswith("/v1") else f"{stripped}/v1"


def _is_this_machine(url: str) -> bool:
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
