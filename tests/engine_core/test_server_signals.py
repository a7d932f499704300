"""An engine process hears every signal."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wire_peers import ROOT, private_endpoint

# Of two signals in quick succession the system may give both to a thread that is not the main one.
_ANOTHER_THREAD_TAKES_THE_SIGNAL = """
import signal, sys, threading, time
from tests.fake_engine import main

def take(number):
    sys.stdin.readline()
    time.sleep(0.3)  # by when the main thread waits for something to do
    signal.pthread_kill(threading.get_ident(), number)

threading.Thread(target=take, args=(int(sys.argv.pop()),), daemon=True).start()
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_engine_stops_whichever_thread_takes_the_signal(tmp_path: Path, number: signal.Signals) -> None:
    argv = [sys.executable, "-c", _ANOTHER_THREAD_TAKES_THE_SIGNAL, private_endpoint(tmp_path), str(int(number))]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert any("engine_ready" in line for line in process.stderr)
            _, rest = process.communicate("\n", timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "engine_stopped exit_code=0" in rest
