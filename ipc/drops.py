"""Counting what was received and not used, without letting a flood of it fill the log."""

from __future__ import annotations

import logging
import time
from collections import Counter

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 1.0


class DropCounter:
    """Dropped messages by reason. Each reason is logged at most once a second, with its running total."""

    def __init__(self, receiver: str) -> None:
        self.counts: Counter[str] = Counter()
        self._receiver = receiver
        self._logged_at_s: dict[str, float] = {}

    def add(self, reason: str, detail: str) -> None:
        self.counts[reason] += 1
        now_s = time.monotonic()
        if now_s - self._logged_at_s.get(reason, -_LOG_INTERVAL_S) >= _LOG_INTERVAL_S:
            self._logged_at_s[reason] = now_s
            logger.warning(
                "message_dropped receiver=%s reason=%s total=%d detail=%.200r",
                self._receiver,
                reason,
                self.counts[reason],
                detail,
            )
