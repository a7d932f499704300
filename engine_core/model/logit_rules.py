"""What a request asks of its logits before temperature: biases, penalties, and tokens made impossible.

The order is vLLM's as far as it can be seen: bias, then repetition, frequency and presence penalty. Exclusions come
last here; nothing but them gives −inf, so that does not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np
import torch

from engine_core.request import Request
from engine_core.runner import ScheduledRequest
from kernels.penalties import LARGEST_LOGIT, Penalties, SeenTokens, penalize

from .staging import Staging
from .token_history import TokenHistory


class LogitRules:
    """Applies the rules of a batch's requests; keeps what it worked out about a request as long as that lives.

    Args:
        eos_token_ids: impossible during `min_tokens` unless the request ignores them.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._prepared: WeakKeyDictionary[Request, _PreparedRules] = WeakKeyDictionary()

    def apply(self, logits: torch.Tensor, batch: Sequence[ScheduledRequest], staging: Staging) -> torch.Tensor:
        """`logits` `[len(batch), vocab_size]` as their requests want them, in float32.

        The same tensor if no request has a rule, else a new one. Every row keeps a possible token: where the
        exclusions together would leave none, the row obeys `allowed_token_ids` alone.
        """
        rows = [row for row, item in enumerate(batch) if _has_rules(item)]
        if not rows:
            return logits
        ruled = logits.to(torch.float32, copy=True)
        if len(rows) == len(batch):
            return self._apply_to_all(ruled, batch, staging)
        (on_device,) = staging.upload(np.array(rows))
        own = self._apply_to_all(ruled.index_select(0, on_device), [batch[row] for row in rows], staging)
        return ruled.index_copy_(0, on_device, own)

    def _apply_to_all(self, logits: torch.Tensor, batch: Sequence[ScheduledRequest], staging: Staging) -> torch.Tensor:
        rules = [self._prepare(item.request, logits.shape[-1]) for item in batch]
        _add_biases(logits, rules, staging)
        _penalize(logits, [item.request for item in batch], rules, staging)
        logits.clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)
        return logits.masked_fill_(_exclusions(logits, batch, rules, staging), float("-inf"))

    def _prepare(self, request: Request, vocab_size: int) -> _PreparedRules:
        rules = self._prepared.get(request)
        if rules is None:
            rules = self._prepared[request] = _PreparedRules.of(request, self._eos_token_ids, vocab_size)
        return rules


def _has_rules(item: ScheduledRequest) -> bool:
    params = item.request.sampling_params
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
        or params.min_tokens > item.num_output_tokens
        or params.has_penalties
    )


@dataclass(frozen=True, slots=True)
class _PreparedRules:
    """A request's rules as arrays of token ids. `bad_words` are those of several tokens, by their last but one."""

    bias_ids: np.ndarray
    biases: np.ndarray
    allowed_ids: np.ndarray | None
    bad_ids: np.ndarray
    bad_words: dict[int, list[tuple[int, ...]]]
    end_ids: np.ndarray
    history: TokenHistory | None

    @classmethod
    def of(cls, request: Request, eos_token_ids: frozenset[int], vocab_size: int) -> _PreparedRules:
        params = request.sampling_params
        bad_words: dict[int, list[tuple[int, ...]]] = {}
        for word in params.bad_words_token_ids:
            if len(word) > 1:
                bad_words.setdefault(word[-2], []).append(word)
        end_ids = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        return cls(
            bias_ids=_as_ids(params.logit_bias),
            biases=np.array(list(params.logit_bias.values()), dtype=np.float64),
            allowed_ids=None if params.allowed_token_ids is None else _as_ids(params.allowed_token_ids),
            bad_ids=_as_ids(word[0] for word in params.bad_words_token_ids if len(word) == 1),
            bad_words=bad_words,
            # Nothing keeps a stop token within the vocabulary: one outside it just never comes.
            end_ids=_as_ids(token_id for token_id in end_ids if 0 <= token_id < vocab_size),
            history=TokenHistory(request) if params.has_penalties else None,
        )

    def forbidden_ids(self, item: ScheduledRequest) -> np.ndarray:
        """What may not come next, whatever is allowed."""
        token_ids = item.request.token_ids
        completing = [
            word[-1] for word in self.bad_words.get(token_ids[-1], ()) if token_ids[1 - len(word) :] == list(word[:-1])
        ]
        parts = [self.bad_ids, _as_ids(completing)]
        if item.num_output_tokens < item.request.sampling_params.min_tokens:
            parts.append(self.end_ids)
        return np.concatenate(parts)


def _as_ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.array(list(token_ids), dtype=np.int64)


def _add_biases(logits: torch.Tensor, rules: list[_PreparedRules], staging: Staging) -> None:
    ids = dict(enumerate(rule.bias_ids for rule in rules))
    if not any(len(part) for part in ids.values()):
        return
    places, biases = staging.upload(_places(logits, ids), _column(np.concatenate([rule.biases for rule in rules])))
    logits.view(-1)[places] += biases


def _penalize(logits: torch.Tensor, requests: list[Request], rules: list[_PreparedRules], staging: Staging) -> None:
    """OpenAI's presence and frequency penalty, and the repetition penalty, of all that have one."""
    seen = {row: rule.history.update(requests[row]) for row, rule in enumerate(rules) if rule.history is not None}
    if not seen:
        return
    params = [requests[row].sampling_params for row in seen]
    lengths = [len(ids) for ids, _ in seen.values()]
    ids, counts, starts, rows, *of_rows = staging.upload(
        np.concatenate([ids for ids, _ in seen.values()]),
        np.concatenate([counts for _, counts in seen.values()]),
        np.array([0, *accumulate(lengths)]),
        np.array(list(seen)),
        _column([p.repetition_penalty for p in params]),
        _column([p.frequency_penalty for p in params]),
        _column([p.presence_penalty for p in params]),
    )
    penalize(logits, SeenTokens(ids, counts, starts, max(lengths)), Penalties(rows, *of_rows))


def _exclusions(
    logits: torch.Tensor, batch: Sequence[ScheduledRequest], rules: list[_PreparedRules], staging: Staging
) -> torch.Tensor:
    """Bool, the shape of `logits`: True is impossible."""
    not_allowed = torch.zeros_like(logits, dtype=torch.bool)
    allowed = {row: rule.allowed_ids for row, rule in enumerate(rules) if rule.allowed_ids is not None}
    if allowed:
        rows, places = staging.upload(np.array(list(allowed)), _places(logits, allowed))
        not_allowed.index_fill_(0, rows, True)
        not_allowed.view(-1).index_fill_(0, places, False)
    forbidden = _places(logits, {row: rule.forbidden_ids(batch[row]) for row, rule in enumerate(rules)})
    if not len(forbidden):
        return not_allowed
    excluded = not_allowed.clone()
    excluded.view(-1).index_fill_(0, staging.upload(forbidden)[0], True)
    return torch.where(excluded.all(dim=-1, keepdim=True), not_allowed, excluded)


def _places(logits: torch.Tensor, ids: dict[int, np.ndarray]) -> np.ndarray:
    """Where in the flattened `logits` each row's `ids` lie, in order."""
    vocab_size = logits.shape[-1]
    return np.concatenate([row * vocab_size + part for row, part in ids.items()])


def _column(values: np.ndarray | list[float]) -> np.ndarray:
    """In float32, whose range it stays well within."""
    return np.clip(values, -LARGEST_LOGIT, LARGEST_LOGIT).astype(np.float32)
