"""Which tokens a sequence holds and how often its output does, kept up at the cost of the new tokens."""

from __future__ import annotations

from array import array

import numpy as np

from engine_core.request import Request


class TokenHistory:
    """The distinct tokens of a request's prompt and output, each with its count in the output.

    A function of the request's `token_ids`, which only ever grow: neither preemption nor batch mates matter.
    """

    def __init__(self, request: Request) -> None:
        prompt = np.unique(np.array(request.token_ids[: request.num_prompt_tokens], dtype=np.int64)).tolist()
        self._ids = array("q", prompt)
        self._counts = array("q", bytes(8 * len(prompt)))
        self._places = {token_id: place for place, token_id in enumerate(prompt)}
        self._num_seen = request.num_prompt_tokens

    def update(self, request: Request) -> tuple[np.ndarray, np.ndarray]:
        """Take in what the request has generated since. Returns ids and counts, int64 `[num_distinct]` each."""
        for token_id in request.token_ids[self._num_seen :]:
            place = self._places.setdefault(token_id, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token_id)
                self._counts.append(0)
            self._counts[place] += 1
        self._num_seen = request.num_tokens
        # Copies: an array whose buffer is in use cannot grow.
        return np.array(self._ids), np.array(self._counts)
