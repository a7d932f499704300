"""The HTTP process: `python -m frontend.http_process --config JSON`. Loads a tokenizer, no torch, and answers.

It can start before the engine and outlive it: while there is none, `/health` and new requests say so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvicorn
import uvloop

from frontend.prompt.pictures import ChatPictures
from frontend.prompt.processor import PromptProcessor
from frontend.prompt.tokenizer import ModelTokenizer, TokenizerLoadError, load_tokenizer
from frontend.serving import ServedModel, Serving
from ipc.logs import configure_logging
from ipc.process import (
    STARTUP_FAILURE_EXIT_CODE,
    end_process,
    exit_with_supervisor,
    raise_open_files_limit,
    spare_garbage_collector,
)
from ipc.threads import tokenize_where_called

from .announcement import announcement
from .api_key import ADMIN_API_KEY_ENV, take_api_keys
from .app import create_app
from .detokenizer import detokenizer_factory, token_bytes_of
from .drain import DrainingServer
from .engine_pool import EnginePool, open_engines
from .http_config import HttpConfig, listen
from .isolation import check_isolation
from .metrics import Metrics
from .open_pictures import open_pictures
from .tool_calls import TAGS

logger = logging.getLogger(__name__)

# Longer than clients keep idle connections, so that it is never us who closes one a request is on its way in.
_KEEP_ALIVE_S = 75


async def serve(
    config: HttpConfig,
    tokenizer: ModelTokenizer,
    pictures: ChatPictures | None,
    client: EnginePool,
    listener: socket.socket,
    api_keys: Sequence[str],
    admin_api_keys: Sequence[str],
) -> None:
    """Answer requests on `listener` until SIGTERM or SIGINT; then give running ones `drain_timeout_s` to end.

    Those that take longer end with an error that says so. `client` is started, and closed at the end, and so are
    `pictures`. `api_keys` and `admin_api_keys` are as in `create_app`.
    """
    prompts = PromptProcessor(tokenizer, pictures, num_threads=config.num_prompt_threads)
    serving = Serving(
        client=client,
        prompts=prompts,
        new_detokenizer=detokenizer_factory(tokenizer.backend),
        new_detokenizer_of_calls=detokenizer_factory(tokenizer.backend, spelled_out=TAGS),
        token_bytes=token_bytes_of(tokenizer.backend),
        model=ServedModel(config.model_names, int(time.time()), client.adapters.by_name),
        metrics=Metrics(
            client.engines,
            config.model_names[0],
            prompts.tokenization,
            None if pictures is None else pictures.stats,
            # Without keys `/v1/models` names them to everybody as well.
            names_adapters=not api_keys,
        ),
        isolation=config.cache_isolation,
    )

    async def end_requests() -> None:
        serving.is_shutting_down = True
        await client.close()

    server = DrainingServer(
        uvicorn.Config(
            create_app(serving, max_body_bytes=config.max_body_bytes, api_keys=api_keys, admin_api_keys=admin_api_keys),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        ),
        drain_timeout_s=config.drain_timeout_s,
        end_requests=end_requests,
    )
    # Also before and after uvicorn listens to signals itself: an early one must not be lost, and those that it raises
    # again at its end must not cut the rest of the shutdown short.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    await client.start()
    url = _url(listener)
    text = announcement(
        url,
        has_chat_template=tokenizer.chat_template is not None,
        sees_pictures=pictures is not None,
        needs_key=bool(api_keys),
    )
    announcing = asyncio.create_task(_announce(client, server, url, text))
    try:
        await server.serve(sockets=[listener])
    finally:
        announcing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await announcing
        await client.close()
        prompts.close()
        if pictures is not None:
            await pictures.close()


async def _announce(client: EnginePool, server: uvicorn.Server, url: str, text: str) -> None:
    """Once, when a request would be answered: say so."""
    await client.wait_ready()
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.05)
    spare_garbage_collector()
    logger.info("http_ready url=%s", url)
    sys.stdout.write(text)
    sys.stdout.flush()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _keep_torch_out() -> None:
    """Make `import torch` fail in this process: transformers would load it (2 s, 230 MB) and not use it here."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m frontend.http_process", description=__doc__)
    parser.add_argument("--config", required=True, help="HttpConfig as JSON")
    config = msgspec.json.decode(parser.parse_args().config, type=HttpConfig)
    configure_logging("http")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    exit_with_supervisor()
    raise_open_files_limit()
    _keep_torch_out()
    tokenize_where_called()
    try:
        api_keys, admin_api_keys = take_api_keys(), take_api_keys(ADMIN_API_KEY_ENV)
        check_isolation(config.cache_isolation, api_keys)
        listener = listen(config.host, config.port)
        pictures = open_pictures(Path(config.model_dir), config.pictures)
        tokenizer = load_tokenizer(Path(config.model_dir), None if pictures is None else pictures.image_token)
        client = open_engines(config)
    except (ValueError, OSError, TokenizerLoadError) as error:
        logger.error("http_start_failed reason=%r", str(error))
        return STARTUP_FAILURE_EXIT_CODE
    if config.insecure:
        logger.warning("engines_insecure endpoints=%s", ",".join(engine.endpoint for engine in config.engines))
    uvloop.run(serve(config, tokenizer, pictures, client, listener, api_keys, admin_api_keys))
    logger.info("http_stopped")
    return 0


if __name__ == "__main__":
    end_process(main())
