"""The application behind the official Anthropic SDK, with an engine that says what a test wants."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anthropic
import msgspec

from frontend.prompt.tokenizer import ModelTokenizer
from ipc.vocabulary import CacheReport, EngineRequest, RequestOutput
from tests.frontend.live_app import live_app
from tests.frontend.scripted_engine import ScriptedEngine, says

HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
MAX_MODEL_LEN = 2048


class Served:
    """`create` and the others are the SDK's, for the model that is served."""

    def __init__(self, engine: ScriptedEngine, url: str, tokenizer: ModelTokenizer) -> None:
        self.engine = engine
        self.url = url
        self.tokenizer = tokenizer
        self.client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0)

    def create(self, **fields: Any) -> anthropic.types.Message:
        return self.client.messages.create(**self._request(fields))  # type: ignore[no-any-return]

    def stream(self, **fields: Any) -> Any:
        return self.client.messages.stream(**self._request(fields))

    def count(self, **fields: Any) -> int:
        fields.pop("max_tokens", None)
        request = {"model": "tiny", "messages": HELLO} | fields
        return self.client.messages.count_tokens(**request).input_tokens

    def answered(self, stream: bool, **fields: Any) -> anthropic.types.Message:
        """The same, put together from its events or not."""
        if not stream:
            return self.create(**fields)
        with self.stream(**fields) as events:
            return events.get_final_message()  # type: ignore[no-any-return]

    def _request(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": "tiny", "max_tokens": 64, "messages": HELLO} | fields

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.backend.encode(text, add_special_tokens=False).ids

    @property
    def eos(self) -> int:
        return self.tokenizer.backend.token_to_id("<|im_end|>")  # type: ignore[no-any-return]

    def say(self, text: str, **settings: Any) -> None:
        """Answers are `text` from now on, ended by the model unless `finish_reason` says otherwise."""
        ending = [self.eos] if settings.get("finish_reason", "stop") == "stop" else []
        self.engine.script = says([*self.ids(text), *ending], **settings)

    def cache(self, num_cached_tokens: int, num_kept_tokens: Sequence[int] = ()) -> None:
        """The engine says "ok", and this about its cache."""

        async def script(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
            report = CacheReport("continued", tuple(num_kept_tokens))
            first, *rest = [*self.ids("ok"), self.eos]
            yield RequestOutput(request.request_id, [first], num_cached_tokens, cache=report)
            for i, token_id in enumerate(rest):
                finish = "stop" if i == len(rest) - 1 else None
                yield RequestOutput(request.request_id, [token_id], num_cached_tokens, finish)  # type: ignore[arg-type]

        self.engine.script = script

    def prompt(self) -> str:
        """The text of the last request's prompt."""
        token_ids = self.engine.requests[-1].prompt_token_ids
        return self.tokenizer.backend.decode(token_ids, skip_special_tokens=False)  # type: ignore[no-any-return]


@contextmanager
def anthropic_app(tokenizer: ModelTokenizer, **settings: Any) -> Iterator[Served]:
    """`settings` go to `create_app`."""
    engine = ScriptedEngine(says([]))
    engine.capabilities = msgspec.structs.replace(engine.capabilities, max_model_len=MAX_MODEL_LEN)
    with live_app(engine, tokenizer, **settings) as url:
        yield Served(engine, url, tokenizer)
