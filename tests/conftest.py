"""What all tests share."""

import os
import signal

# Kernels' modules ask for it when they are imported: without a GPU they can only be interpreted.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Before anything loads torch: it decides how the model's threads wait, and without it tests crawl on busy machines.
import engine_core.model  # noqa: F401

# A shell's background jobs ignore Ctrl-C, and so would every program a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
