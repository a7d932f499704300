"""A supervisor over a fake engine and an idle frontend: `python -m tests.fake_supervisor ENDPOINT [--engine-fails]`.

Its restarts are quick, its patience short.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import signal
import sys
from pathlib import Path

from frontend.launch import ChildSpec, EngineKeyFiles, SupervisionPolicy, supervise
from ipc.endpoints import local_endpoint
from ipc.process import exit_with_supervisor

POLICY = SupervisionPolicy(
    max_restarts=3, restart_window_s=60.0, min_delay_s=0.1, max_delay_s=0.3, stuck_timeout_s=1.5, stop_timeout_s=5.0
)


def idle_frontend() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    exit_with_supervisor()
    # From here on it stops in order.
    sys.stderr.write("frontend_idle\n")
    while True:
        signal.pause()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("--engine-fails", action="store_true")
    parser.add_argument("--keys", type=Path, help="directory of `foreword keys`, for a tcp:// endpoint")
    parser.add_argument("--stop-timeout-s", type=float, default=POLICY.stop_timeout_s)
    parser.add_argument("--frontend", action="store_true", help="be the frontend child")
    arguments = parser.parse_args()
    if arguments.frontend:
        idle_frontend()
    # DEBUG: tests wait for what its own engine client sees.
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, format="%(message)s")
    engine = [sys.executable, "-m", "tests.fake_engine", arguments.endpoint, "--drain-timeout-s", "60"]
    engine += ["--fail"] * arguments.engine_fails
    frontend = [sys.executable, "-m", "tests.fake_supervisor", arguments.endpoint, "--frontend"]
    keys = None
    if arguments.keys is not None:
        files = EngineKeyFiles(arguments.keys / "engine.key", arguments.keys / "client.pub")
        engine += ["--curve-key", str(files.key), "--curve-authorized", str(files.authorized)]
        keys = files.load().as_frontend()
    children = [ChildSpec("engine", engine, local_endpoint(arguments.endpoint), keys), ChildSpec("http", frontend)]
    return supervise(children, dataclasses.replace(POLICY, stop_timeout_s=arguments.stop_timeout_s))


if __name__ == "__main__":
    sys.exit(main())
