"""The engine core as a process of its own: the same engine behind a ZMQ ROUTER.

    python -m engine_core.server --endpoint ipc:///run/user/1000/foreword-x/engine.sock --config '{"model": …}'

Three threads: `FrontendLink` talks to frontends, `AdapterCalls` reads LoRA adapters, the main thread steps the engine.
Idle, all sleep until something arrives. Exits 0 on SIGTERM, after running requests have had a time to end, and on
SIGINT, at once; 78 if it cannot start as configured; 1 on anything else, among it a model that fails step after step: a
device in such a state does not recover, a new process may.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import msgspec
import zmq

from ipc.curve import EngineKeys
from ipc.key_files import KeyFileError, load_key_pair
from ipc.logs import configure_logging
from ipc.messages import EngineOutputs
from ipc.process import (
    STARTUP_FAILURE_EXIT_CODE,
    end_process,
    exit_with_supervisor,
    raise_open_files_limit,
    spare_garbage_collector,
)
from ipc.sockets import check_listenable
from ipc.stats import EngineStats
from ipc.vocabulary import RequestError, RequestOutput

from .adapter_calls import AdapterCalls
from .commands import Abort, AbortContinuations, Add, Command, Drain, Probe, Reset, SnapshotKVCache, Stop, Supply
from .config import EngineConfig
from .errors import EngineOverloadedError, InvalidConfigError
from .frontend_link import FrontendLink, LinkSettings
from .kv_events.publisher import KVEventPublisher
from .request import Request

if TYPE_CHECKING:
    from .engine import EngineCore

logger = logging.getLogger(__name__)

_MAX_CONSECUTIVE_FAILED_STEPS = 3
# Without commands: for times that end, and for signals. Of two in quick succession another thread may take both; then
# nothing interrupts the waiting of this one, where alone their handlers can run.
_LOOK_INTERVAL_S = 0.25


class EngineCoreServer:
    """Serves one engine at one endpoint.

    Raises what `ipc.sockets.bind_router` raises if it cannot listen there, and InvalidConfigError where KV events are
    wanted and cannot be published.
    """

    def __init__(self, engine: EngineCore, endpoint: str, settings: LinkSettings | None = None) -> None:
        self.engine = engine
        self._drain_timeout_s = 0.0
        self._drain_ends_s: float | None = None
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._adapter_calls = AdapterCalls(engine)
        self._kv_publisher = self._make_kv_publisher()
        try:
            self.link = FrontendLink(
                endpoint,
                engine.capabilities,
                engine.prepare_request,
                self._stats,
                self._adapter_calls,
                self._commands,
                settings or LinkSettings(),
            )
        except BaseException:
            if self._kv_publisher is not None:
                self._kv_publisher.stop()
            raise

    def _make_kv_publisher(self) -> KVEventPublisher | None:
        engine_config = self.engine.config
        config = engine_config.kv_events_config
        if config is None or not config.enable_kv_cache_events:
            return None
        try:
            config.check_is_published()
        except ValueError as error:
            raise InvalidConfigError(str(error)) from error
        return KVEventPublisher(
            config,
            self.engine.kv_describer,
            event_format=engine_config.kv_events_format,
            ask_for_snapshot=lambda: self._commands.put(SnapshotKVCache()),
            on_failure=lambda: self.stop(1),
        )

    def run(self) -> int:
        """Serve until stopped; returns the process's exit code. Frontends have been told goodbye then."""
        self.link.start()
        self._adapter_calls.start()
        if self._kv_publisher is not None:
            self._kv_publisher.start()
        try:
            return self._loop()
        except Exception:
            logger.exception("engine_failed")
            return 1
        finally:
            self.link.stop()
            self._adapter_calls.stop()
            if self._kv_publisher is not None:
                self._kv_publisher.stop()

    def stop(self, exit_code: int = 0) -> None:
        """Make `run` return after the current step. From any thread or signal handler."""
        self._commands.put(Stop(exit_code))

    def drain(self, timeout_s: float) -> None:
        """Take no new requests, and make `run` return 0 when those running have ended, after `timeout_s` at the latest.

        Frontends are told at once. From any thread or signal handler.
        """
        self._drain_timeout_s = timeout_s
        self.link.drain()

    def _loop(self) -> int:
        while not self._is_drained():
            if (stop := self._obey_waiting()) is not None:
                return stop.exit_code
            self._ask_for_features()
            if self.engine.has_work_now():
                self.link.publish(self.engine.step())
                self._publish_kv_events()
                self._ask_for_features()
                if self.engine.num_consecutive_failed_steps >= _MAX_CONSECUTIVE_FAILED_STEPS:
                    logger.error("engine_gives_up consecutive_failed_steps=%d", _MAX_CONSECUTIVE_FAILED_STEPS)
                    return 1
        return 0

    def _is_drained(self) -> bool:
        if self._drain_ends_s is None:
            return False
        if self.engine.has_unfinished_requests() and time.monotonic() < self._drain_ends_s:
            return False
        stats = self.engine.stats()
        logger.info("engine_drained cut_short=%d", stats.num_running + stats.num_waiting)
        return True

    def _obey_waiting(self) -> Stop | None:
        # A method of its own: as the loop's variable the last command would keep its inputs as long as nothing comes.
        for command in self._waiting_commands():
            if isinstance(command, Stop):
                return command
            self._obey(command)
        return None

    def _waiting_commands(self) -> Iterator[Command]:
        if not self.engine.has_work_now():
            with contextlib.suppress(Empty):
                yield self._commands.get(timeout=_LOOK_INTERVAL_S)
        with contextlib.suppress(Empty):
            while True:
                yield self._commands.get_nowait()

    def _ask_for_features(self) -> None:
        if wanted := self.engine.take_wanted():
            self.link.publish_wanted(wanted)

    def _publish_kv_events(self) -> None:
        recorder = self.engine.kv_recorder
        if self._kv_publisher is not None and recorder is not None and recorder.has_changes:
            self._kv_publisher.publish(recorder.take())

    def _stats(self) -> EngineStats:
        stats, publisher = self.engine.stats(), self._kv_publisher
        if publisher is None:
            return stats
        return msgspec.structs.replace(
            stats, kv_event_batches=publisher.num_batches, kv_event_batches_dropped=publisher.dropped_batches
        )

    def _obey(
        self, command: Add | Supply | Abort | AbortContinuations | Reset | Probe | SnapshotKVCache | Drain
    ) -> None:
        if isinstance(command, Add):
            self._add(command.request)
        elif isinstance(command, Supply):
            self.engine.supply_feature(command.request_id, command.key, command.inputs, command.error)
        elif isinstance(command, Abort):
            self.engine.abort_requests(command.request_ids)
        elif isinstance(command, AbortContinuations):
            self.engine.abort_continuations(command.continuations)
        elif isinstance(command, Probe):
            command.answer(self.engine.probe_prepared(command.request, command.relative_end))
        elif isinstance(command, Drain):
            self._drain_ends_s = time.monotonic() + self._drain_timeout_s
            logger.info("engine_draining timeout_s=%g", self._drain_timeout_s)
        elif isinstance(command, SnapshotKVCache):
            if self._kv_publisher is not None and self.engine.kv_recorder is not None:
                self._publish_kv_events()
                self._kv_publisher.publish_snapshot(self.engine.kv_recorder.snapshot())
        else:
            result = self.engine.reset_prefix_cache(reset_running_requests=command.reset_running_requests)
            logger.info(
                "prefix_cache_reset dropped_blocks=%d blocks_in_use=%d",
                result.num_dropped_blocks,
                result.num_blocks_in_use,
            )
            # Now: it may be long until the next step.
            self._publish_kv_events()
            command.answer(result)

    def _add(self, request: Request) -> None:
        try:
            self.engine.add_prepared(request)
        except EngineOverloadedError as error:
            reason = RequestError("overloaded", str(error), reason=error.reason, retry_after_s=error.retry_after_s)
            refusal = RequestOutput(request.output_id, [], finish_reason="error", error=reason)
            self.link.publish(EngineOutputs([refusal]))


def run_process(
    build_engine: Callable[[], EngineCore],
    endpoint: str,
    link_settings: Callable[[], LinkSettings] = LinkSettings,
    *,
    drain_timeout_s: float = 0.0,
) -> int:
    """Everything a process around `EngineCoreServer` needs: log, signals, supervisor, exit code.

    `link_settings` may raise KeyFileError.
    """
    configure_logging("engine")
    exit_with_supervisor(endpoint)
    raise_open_files_limit()
    # While loading there is nobody to say goodbye to.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    started_s = time.monotonic()
    try:
        settings = link_settings()
        # Loading may take minutes; a place where nobody may listen is found out before.
        check_listenable(endpoint, keys=settings.keys, insecure=settings.insecure)
    except (ValueError, OSError) as error:
        logger.error("engine_start_failed reason=%r", f"{type(error).__name__}: {error}")
        return STARTUP_FAILURE_EXIT_CODE
    if settings.insecure:
        logger.warning("endpoint_insecure endpoint=%s", endpoint)
    try:
        server = EngineCoreServer(build_engine(), endpoint, settings)
    except (ValueError, OSError, ImportError, zmq.ZMQError) as error:
        # Where the message names the setting, a traceback only hides it.
        plain = isinstance(error, InvalidConfigError | msgspec.ValidationError | PermissionError | KeyFileError)
        logger.error("engine_start_failed reason=%r", f"{type(error).__name__}: {error}", exc_info=not plain)
        return STARTUP_FAILURE_EXIT_CODE
    signal.signal(signal.SIGTERM, lambda *_: server.drain(drain_timeout_s))
    signal.signal(signal.SIGINT, lambda *_: server.stop())
    capabilities = server.engine.capabilities
    spare_garbage_collector()
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
    parser.add_argument(
        "--endpoint", required=True, help="where to listen: ipc:// in a directory of mode 0700, or tcp://"
    )
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    add_link_options(parser)
    arguments = parser.parse_args()

    def build_engine() -> EngineCore:
        config = msgspec.json.decode(arguments.config, type=EngineConfig)
        logger.info("engine_loading model=%s directory=%s", config.model_name or config.model, config.model)
        from .engine import EngineCore

        return EngineCore(config)

    return run_process(
        build_engine,
        arguments.endpoint,
        lambda: link_settings_of(arguments),
        drain_timeout_s=arguments.drain_timeout_s,
    )


def add_link_options(parser: argparse.ArgumentParser) -> None:
    """Options that say who may use the endpoint, and how patient the process is when it is told to stop."""
    parser.add_argument("--curve-key", type=Path, help="file with the engine's secret key")
    parser.add_argument("--curve-authorized", type=Path, help="file or directory with the public keys of frontends")
    parser.add_argument("--insecure", action="store_true", help="tcp:// without keys")
    parser.add_argument("--drain-timeout-s", type=float, default=0.0, help="time for running requests at SIGTERM")


def link_settings_of(arguments: argparse.Namespace) -> LinkSettings:
    """What `add_link_options` was told. Raises KeyFileError."""
    if arguments.curve_key is None:
        return LinkSettings(insecure=arguments.insecure)
    keys = EngineKeys(load_key_pair(arguments.curve_key), arguments.curve_authorized)
    return LinkSettings(keys=keys, insecure=arguments.insecure)


if __name__ == "__main__":
    end_process(main())
