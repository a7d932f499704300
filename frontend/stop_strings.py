"""Find stop strings in text that arrives in pieces, and hold back no more than could still become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringScanner:
    """Passes text through up to the first stop string.

    The stop string that is *complete* first ends the text (of several that end together, the longest), so the
    outcome does not depend on how the text was cut into pieces. Neither it (unless `include_stop`: then nothing need be
    held back) nor anything after it is handed out.
    Work is linear in the length of the text (Knuth-Morris-Pratt, one automaton per stop string).
    """

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool = False) -> None:
        """Raises ValueError for an empty stop string: it would end every text."""
        if "" in stop_strings:
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(sorted(set(stop_strings), key=lambda stop: (-len(stop), stop)))
        self._borders = [_borders(stop) for stop in self._stops]
        # Per stop string: how many of its characters the text ends with. The text before the longest is certain.
        self._matched = [0] * len(self._stops)
        self._held = ""
        self._include_stop = include_stop

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text. Returns what may be shown and the stop string that was found, if any.

        After a stop string was found the scanner is spent.
        """
        if not self._stops:
            return text, None
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            for i, stop in enumerate(self._stops):
                matched = self._matched[i]
                while matched and stop[matched] != character:
                    matched = self._borders[i][matched]
                if stop[matched] == character:
                    matched += 1
                    if matched == len(stop):
                        self._held = ""
                        return buffer[: position if self._include_stop else position - matched], stop
                self._matched[i] = matched
        certain = len(buffer) - (0 if self._include_stop else max(self._matched))
        self._held = buffer[certain:]
        return buffer[:certain], None

    def flush(self) -> str:
        """The text has ended: return what was held back."""
        held, self._held = self._held, ""
        return held


def _borders(pattern: str) -> list[int]:
    """`borders[n]`: length of the longest proper prefix of `pattern[:n]` that is also its suffix."""
    borders = [0, 0]
    for end in range(1, len(pattern)):
        length = borders[end]
        while length and pattern[length] != pattern[end]:
            length = borders[length]
        borders.append(length + 1 if pattern[length] == pattern[end] else 0)
    return borders
