"""Measurements anyone can repeat: `python -m benchmarks.NAME`, described where each begins.

What computes in a benchmark's own process waits for its threads as an engine's process does.
"""

from __future__ import annotations

from ipc.threads import limit_spinning

# Here, as it has to come before torch, and imports are sorted.
limit_spinning()
