"""What all tests share."""

import signal

# Before anything loads torch: it decides how the model's threads wait, and without it tests crawl on busy machines.
import engine_core.model  # noqa: F401

# A shell's background jobs ignore Ctrl-C, and so would every program a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
