"""Hits by tenant, under names that tell nobody who it is."""

from __future__ import annotations

import hashlib
import secrets

from prometheus_client import Counter

# Those that come first have a label of their own; what all others do is counted together.
MAX_TENANTS = 100
SHARED, OTHERS = "shared", "other"

_LABEL_BYTES = 6


class Tenants:
    """Counts prompt tokens by tenant, and those of them that were cached. Sums over all are those of all requests.

    A salt may be a guessable word, and `/metrics` needs no key: labels are digests under a key that is drawn anew at
    each start. Memory does not depend on how many tenants there are.
    """

    def __init__(self, model_name: str, prompt_tokens: Counter, cached_tokens: Counter) -> None:
        """Both counters have the labels `model_name` and `tenant`."""
        self._model_name = model_name
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = cached_tokens
        self._key = secrets.token_bytes(32)
        self._labels: set[str] = set()
        for label in (SHARED, OTHERS):
            self._add(label, 0, 0)

    def count(self, tenant: str, num_tokens: int, num_cached_tokens: int) -> None:
        """Once per request; `tenant` as in `EngineRequest`."""
        label = _digest(self._key, tenant)
        if tenant and label not in self._labels and len(self._labels) < MAX_TENANTS:
            self._labels.add(label)
        self._add(self._shown(tenant, label), num_tokens, num_cached_tokens)

    def label(self, tenant: str) -> str:
        """What `tenant` is called."""
        return self._shown(tenant, _digest(self._key, tenant))

    def _shown(self, tenant: str, label: str) -> str:
        if not tenant:
            return SHARED
        return label if label in self._labels else OTHERS

    def _add(self, label: str, num_tokens: int, num_cached_tokens: int) -> None:
        self._prompt_tokens.labels(self._model_name, label).inc(num_tokens)
        self._cached_tokens.labels(self._model_name, label).inc(num_cached_tokens)


def _digest(key: bytes, tenant: str) -> str:
    return "t" + hashlib.blake2b(tenant.encode(), key=key, digest_size=_LABEL_BYTES).hexdigest()
