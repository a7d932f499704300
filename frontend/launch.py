"""The supervisor of `foreword serve`: starts the engine and the HTTP process, and lets each survive the other.

Whichever dies is started again, with growing delays and a limit; the other keeps running (a new frontend attaches
to the warm engine, a new engine is found by the frontend's client). An engine that lives but answers no
heartbeat is killed first. The supervisor itself computes nothing and loads no torch. If it dies, its children
notice (`ipc.process.exit_with_supervisor`, which each of them calls) and exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine_core import EngineConfig
from ipc.curve import EngineKeys, FrontendKeys, check_security
from ipc.endpoints import check_endpoint, local_endpoint
from ipc.key_files import load_key_pair, load_public_keys
from ipc.process import STARTUP_FAILURE_EXIT_CODE, SUPERVISED_ENV

from .engine_client import EngineClient

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to keep running.

    `engine_endpoint`: where its heartbeat is to be found, if it is an engine; over `tcp://` with `engine_keys`, or
    `insecure`. `environment` is added to this process's own. Unlike arguments, others cannot see it: the place for
    secrets.
    """

    name: str
    argv: Sequence[str]
    engine_endpoint: str | None = None
    engine_keys: FrontendKeys | None = None
    insecure: bool = False
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class SupervisionPolicy:
    """How patient a supervisor is.

    At most `max_restarts` of one child within `restart_window_s`, the first after `min_delay_s`, each further one after
    twice the delay. An engine that was ready and then is not for `stuck_timeout_s`, though its process lives, is
    killed. A child has `stop_timeout_s` to follow a SIGTERM; after a second signal to the supervisor, a SIGINT and
    `hurry_timeout_s`.
    """

    max_restarts: int = 5
    restart_window_s: float = 300.0
    min_delay_s: float = 0.5
    max_delay_s: float = 10.0
    stuck_timeout_s: float = 30.0
    stop_timeout_s: float = 10.0
    hurry_timeout_s: float = 3.0


@dataclass(frozen=True, slots=True)
class EngineKeyFiles:
    """`key`: the engine's secret key; `authorized`: public keys of frontends, a file or a directory."""

    key: Path
    authorized: Path

    def load(self) -> EngineKeys:
        """Raises KeyFileError, also if the authorized keys cannot be read."""
        load_public_keys(self.authorized)
        return EngineKeys(load_key_pair(self.key), self.authorized)


def engine_child(
    config: EngineConfig,
    endpoint: str,
    *,
    key_files: EngineKeyFiles | None = None,
    insecure: bool = False,
    drain_timeout_s: float = 0.0,
) -> ChildSpec:
    """The engine process for `config`, listening at `endpoint`.

    Raises KeyFileError, and ValueError if the endpoint is none, or not protected.
    """
    check_endpoint(endpoint)
    check_security(endpoint, has_keys=key_files is not None, insecure=insecure)
    config_json = msgspec.json.encode(config).decode()
    argv = [sys.executable, "-m", "engine_core.server", "--endpoint", endpoint, "--config", config_json]
    argv += ["--drain-timeout-s", str(drain_timeout_s), *["--insecure"] * insecure]
    keys = None
    if key_files is not None:
        argv += ["--curve-key", str(key_files.key), "--curve-authorized", str(key_files.authorized)]
        keys = key_files.load().as_frontend()
    return ChildSpec("engine", argv, local_endpoint(endpoint), keys, insecure)


def supervise(children: Sequence[ChildSpec], policy: SupervisionPolicy | None = None) -> int:
    """Run `children` until SIGTERM or SIGINT, then stop them, the last first. Blocks; returns an exit code.

    0: stopped as asked. 78: a child could not start as configured (it exited with 78, or is an engine that was never
    ready); it said why on its own stderr. 1: a child died too often. In the last two cases the others are stopped.
    A second signal lets nobody finish what is still running.
    """
    return asyncio.run(_Supervisor(children, policy or SupervisionPolicy()).run())


class _Supervisor:
    def __init__(self, children: Sequence[ChildSpec], policy: SupervisionPolicy) -> None:
        self._children = children
        self._policy = policy
        self._processes: dict[str, Process] = {}
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        keepers = [asyncio.create_task(self._keep(child), name=child.name) for child in self._children]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([stopped, *keepers], return_when=asyncio.FIRST_COMPLETED)
            return next((keeper.result() for keeper in keepers if keeper.done()), 0)
        finally:
            for task in (stopped, *keepers):
                task.cancel()
            await asyncio.gather(stopped, *keepers, return_exceptions=True)
            for child in reversed(self._children):
                await self._stop_child(child.name)
            logger.info("supervisor_stopped")

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _keep(self, child: ChildSpec) -> int:
        """Keep one child running. Returns the supervisor's exit code when that is no use any more."""
        client = None
        if child.engine_endpoint is not None:
            client = EngineClient(
                child.engine_endpoint, name="supervisor", keys=child.engine_keys, insecure=child.insecure, quiet=True
            )
        try:
            if client is not None:
                await client.start()
            return await self._keep_watched(child, client)
        finally:
            if client is not None:
                await client.close()

    async def _keep_watched(self, child: ChildSpec, client: EngineClient | None) -> int:
        restarted_at_s: deque[float] = deque()
        while True:
            process = await self._start(child)
            started_s = time.monotonic()
            if client is not None:
                await self._watch(child, process, client)
            exit_code = await process.wait()
            now_s = time.monotonic()
            logger.warning(
                "child_exited name=%s child_pid=%d status=%s uptime_s=%.1f",
                child.name,
                process.pid,
                _describe(exit_code),
                now_s - started_s,
            )
            never_ready = client is not None and client.capabilities is None
            if exit_code == STARTUP_FAILURE_EXIT_CODE or never_ready:
                logger.error("child_cannot_start name=%s status=%s", child.name, _describe(exit_code))
                return STARTUP_FAILURE_EXIT_CODE
            while restarted_at_s and now_s - restarted_at_s[0] > self._policy.restart_window_s:
                restarted_at_s.popleft()
            if len(restarted_at_s) >= self._policy.max_restarts:
                logger.error(
                    "child_given_up name=%s restarts=%d window_s=%g",
                    child.name,
                    len(restarted_at_s),
                    self._policy.restart_window_s,
                )
                return 1
            delay_s = min(self._policy.min_delay_s * 2 ** len(restarted_at_s), self._policy.max_delay_s)
            restarted_at_s.append(now_s)
            logger.warning("child_restarting name=%s restart=%d delay_s=%g", child.name, len(restarted_at_s), delay_s)
            await asyncio.sleep(delay_s)

    async def _start(self, child: ChildSpec) -> Process:
        # A session of its own keeps a terminal's Ctrl-C from the engine while the frontend is still draining.
        process = await asyncio.create_subprocess_exec(
            *child.argv,
            stdin=PIPE,
            env={**os.environ, **child.environment, SUPERVISED_ENV: "1"},
            start_new_session=True,
        )
        self._processes[child.name] = process
        logger.info("child_started name=%s child_pid=%d", child.name, process.pid)
        return process

    async def _watch(self, child: ChildSpec, process: Process, client: EngineClient) -> None:
        """Until the engine's process has exited; kills it if it is stuck."""
        was_ready = False
        silent_s = 0.0
        while process.returncode is None:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            if client.is_connected:
                was_ready, silent_s = True, 0.0
            elif was_ready:
                # Turns are counted, not clock time: a supervisor that was stopped itself must not blame the engine.
                silent_s += _WATCH_INTERVAL_S
            if silent_s > self._policy.stuck_timeout_s and process.returncode is None:
                logger.error("child_stuck name=%s child_pid=%d silent_s=%.1f", child.name, process.pid, silent_s)
                process.kill()
                return

    async def _stop_child(self, name: str) -> None:
        process = self._processes.get(name)
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        exited = asyncio.create_task(process.wait())
        hurried = asyncio.create_task(self._hurry.wait())
        await asyncio.wait([exited, hurried], timeout=self._policy.stop_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not exited.done() and self._hurry.is_set():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            await asyncio.wait([exited], timeout=self._policy.hurry_timeout_s)
        if not exited.done():
            logger.warning("child_killed name=%s child_pid=%d", name, process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        exit_code = await exited
        logger.info("child_stopped name=%s child_pid=%d status=%s", name, process.pid, _describe(exit_code))


def _describe(exit_code: int) -> str:
    return signal.Signals(-exit_code).name if exit_code < 0 else str(exit_code)
