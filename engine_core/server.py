"""The engine core as a process of its own: the same engine behind a ZMQ ROUTER.

    python -m engine_core.server --endpoint ipc:///run/user/1000/foreword-x/engine.sock --config '{"model": …}'

Two threads: `FrontendLink` talks to frontends, the main thread steps the engine. Idle, both sleep until something
arrives. Exits 0 on SIGTERM and SIGINT, 78 if it cannot start as configured, 1 on anything else, among it a model that
fails step after step: a device in such a state does not recover, a new process may.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from ipc.logs import configure_logging
from ipc.process import STARTUP_FAILURE_EXIT_CODE, exit_with_supervisor, raise_open_files_limit
from ipc.sockets import check_private, socket_path

from .config import EngineConfig
from .errors import InvalidConfigError
from .frontend_link import Abort, AbortContinuations, Add, Command, FrontendLink, LinkSettings, Reset, Stop

if TYPE_CHECKING:
    from .engine import EngineCore

logger = logging.getLogger(__name__)

_MAX_CONSECUTIVE_FAILED_STEPS = 3


class EngineCoreServer:
    """Serves one engine at one endpoint.

    Raises what `ipc.sockets.bind_router` raises if it cannot listen there.
    """

    def __init__(self, engine: EngineCore, endpoint: str, settings: LinkSettings | None = None) -> None:
        self.engine = engine
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self.link = FrontendLink(
            endpoint,
            engine.capabilities,
            engine.prepare_request,
            engine.stats,
            self._commands,
            settings or LinkSettings(),
        )

    def run(self) -> int:
        """Serve until stopped; returns the process's exit code. Frontends have been told goodbye then."""
        self.link.start()
        try:
            return self._loop()
        except Exception:
            logger.exception("engine_failed")
            return 1
        finally:
            self.link.stop()

    def stop(self, exit_code: int = 0) -> None:
        """Make `run` return after the current step. From any thread or signal handler."""
        self._commands.put(Stop(exit_code))

    def _loop(self) -> int:
        while True:
            for command in self._waiting_commands():
                if isinstance(command, Stop):
                    return command.exit_code
                self._obey(command)
            if self.engine.has_unfinished_requests():
                self.link.publish(self.engine.step())
                if self.engine.num_consecutive_failed_steps >= _MAX_CONSECUTIVE_FAILED_STEPS:
                    logger.error("engine_gives_up consecutive_failed_steps=%d", _MAX_CONSECUTIVE_FAILED_STEPS)
                    return 1

    def _waiting_commands(self) -> Iterator[Command]:
        if not self.engine.has_unfinished_requests():
            yield self._commands.get()
        with contextlib.suppress(Empty):
            while True:
                yield self._commands.get_nowait()

    def _obey(self, command: Add | Abort | AbortContinuations | Reset) -> None:
        if isinstance(command, Abort):
            self.engine.abort_requests(command.request_ids)
        elif isinstance(command, AbortContinuations):
            self.engine.abort_continuations(command.continuations)
        elif isinstance(command, Add):
            self.engine.add_prepared(command.request)
        else:
            result = self.engine.reset_prefix_cache(reset_running_requests=command.reset_running_requests)
            logger.info(
                "prefix_cache_reset dropped_blocks=%d blocks_in_use=%d",
                result.num_dropped_blocks,
                result.num_blocks_in_use,
            )
            command.answer(result)


def run_process(build_engine: Callable[[], EngineCore], endpoint: str, settings: LinkSettings | None = None) -> int:
    """Everything a process around `EngineCoreServer` needs: log, signals, supervisor, exit code."""
    configure_logging("engine")
    exit_with_supervisor(endpoint)
    raise_open_files_limit()
    # While loading there is nobody to say goodbye to.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    started_s = time.monotonic()
    try:
        # Loading may take minutes; a place where nobody may listen is found out before.
        check_private(socket_path(endpoint).parent)
        server = EngineCoreServer(build_engine(), endpoint, settings)
    except (ValueError, OSError, ImportError) as error:
        # Where the message names the setting, a traceback only hides it.
        plain = isinstance(error, InvalidConfigError | msgspec.ValidationError | PermissionError)
        logger.error("engine_start_failed reason=%r", f"{type(error).__name__}: {error}", exc_info=not plain)
        return STARTUP_FAILURE_EXIT_CODE
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    capabilities = server.engine.capabilities
    logger.info(
        "engine_ready epoch=%d model=%s blocks=%d block_size=%d max_model_len=%d load_s=%.1f",
        server.link.epoch,
        capabilities.model,
        capabilities.num_blocks,
        capabilities.block_size,
        capabilities.max_model_len,
        time.monotonic() - started_s,
    )
    exit_code = server.run()
    logger.info("engine_stopped exit_code=%d", exit_code)
    return exit_code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_core.server", description="One engine core as a process.")
    parser.add_argument("--endpoint", required=True, help="ipc:// address to listen at, in a directory of mode 0700")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    arguments = parser.parse_args()

    def build_engine() -> EngineCore:
        config = msgspec.json.decode(arguments.config, type=EngineConfig)
        logger.info("engine_loading model=%s directory=%s", config.model_name or config.model, config.model)
        from .engine import EngineCore

        return EngineCore(config)

    return run_process(build_engine, arguments.endpoint)


if __name__ == "__main__":
    sys.exit(main())
