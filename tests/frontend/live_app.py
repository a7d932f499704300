"""The real application behind a real uvicorn on a free port, with any engine client."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from frontend.app import create_app
from frontend.detokenizer import detokenizer_factory, token_bytes_of
from frontend.http_config import listen
from frontend.isolation import IsolationMode
from frontend.metrics import Metrics
from frontend.prompt.pictures import ChatPictures
from frontend.prompt.processor import PromptProcessor
from frontend.prompt.tokenizer import ModelTokenizer
from frontend.serving import ServedModel, Serving
from frontend.tool_calls import TAGS

MODEL_NAMES = ("tiny", "tiny-alias")


@contextmanager
def live_app(
    engine: Any,
    tokenizer: ModelTokenizer,
    pictures: ChatPictures | None = None,
    *,
    isolation: IsolationMode = "salt",
    **settings: Any,
) -> Iterator[str]:
    """Yields the base URL. `settings` go to `create_app`; `pictures` are closed at the end."""
    prompts = PromptProcessor(tokenizer, pictures)
    serving = Serving(
        client=engine,
        prompts=prompts,
        new_detokenizer=detokenizer_factory(tokenizer.backend),
        new_detokenizer_of_calls=detokenizer_factory(tokenizer.backend, spelled_out=TAGS),
        token_bytes=token_bytes_of(tokenizer.backend),
        model=ServedModel(MODEL_NAMES, 1, engine.adapters.by_name),
        metrics=Metrics(
            [engine],
            MODEL_NAMES[0],
            prompts.tokenization,
            None if pictures is None else pictures.stats,
            names_adapters=not settings.get("api_keys"),
        ),
        isolation=isolation,
    )
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(serving, **settings), lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        prompts.close()
        if pictures is not None:
            asyncio.run(pictures.close())
