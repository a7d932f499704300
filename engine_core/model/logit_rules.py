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
from kernels.penalties import LARGEST_LOGIT, Penalties, SeenTokens, penalize

from .token_history import TokenHistory


class LogitRules:
    """Applies the rules of a batch's requests; keeps what it worked out about a request as long as that lives.

    Args:
        eos_token_ids: impossible during `min_tokens` unless the request ignores them.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._prepared: WeakKeyDictionary[Request, _PreparedRules] = WeakKeyDictionary()

    def apply(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """`logits` `[len(requests), vocab_size]` as their requests want them, in float32.

        The same tensor if no request has a rule, else a new one. Every row keeps a possible token: where the
        exclusions together would leave none, the row obeys `allowed_token_ids` alone.
        """
        rows = [row for row, request in enumerate(requests) if _has_rules(request)]
        if not rows:
            return logits
        ruled = logits.to(torch.float32, copy=True)
        ruled[rows] = self._apply_to_all(ruled[rows], [requests[row] for row in rows])
        return ruled

    def _apply_to_all(self, logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
        rules = [self._prepare(request, logits.shape[-1]) for request in requests]
        _add_biases(logits, rules)
        _penalize(logits, requests, rules)
        logits.clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)
        return logits.masked_fill_(_exclusions(logits, requests, rules), float("-inf"))

    def _prepare(self, request: Request, vocab_size: int) -> _PreparedRules:
        rules = self._prepared.get(request)
        if rules is None:
            rules = self._prepared[request] = _PreparedRules.of(request, self._eos_token_ids, vocab_size)
        return rules


def _has_rules(request: Request) -> bool:
    params = request.sampling_params
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
        or params.min_tokens > request.num_output_tokens
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

    def forbidden_ids(self, request: Request) -> np.ndarray:
        """What may not come next, whatever is allowed."""
        token_ids = request.token_ids
        completing = [
            word[-1] for word in self.bad_words.get(token_ids[-1], ()) if token_ids[1 - len(word) :] == list(word[:-1])
        ]
        parts = [self.bad_ids, _as_ids(completing)]
        if request.num_output_tokens < request.sampling_params.min_tokens:
            parts.append(self.end_ids)
        return np.concatenate(parts)


def _as_ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.array(list(token_ids), dtype=np.int64)


def _add_biases(logits: torch.Tensor, rules: list[_PreparedRules]) -> None:
    places = _places(logits, dict(enumerate(rule.bias_ids for rule in rules)))
    if len(places):
        biases = np.concatenate([rule.biases for rule in rules])
        logits.view(-1)[places] += _column(biases, logits.device)


def _penalize(logits: torch.Tensor, requests: list[Request], rules: list[_PreparedRules]) -> None:
    """OpenAI's presence and frequency penalty, and the repetition penalty, of all that have one."""
    seen = {row: rule.history.update(requests[row]) for row, rule in enumerate(rules) if rule.history is not None}
    if not seen:
        return
    params = [requests[row].sampling_params for row in seen]
    lengths = [len(ids) for ids, _ in seen.values()]
    ids, counts = torch.from_numpy(np.concatenate(list(seen.values()), axis=1)).to(logits.device)
    starts, rows = (torch.tensor(values).to(logits.device) for values in ([0, *accumulate(lengths)], list(seen)))
    of_rows = np.array([[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params])
    penalties = Penalties(rows, *_column(of_rows.T, logits.device))
    penalize(logits, SeenTokens(ids, counts, starts, max(lengths)), penalties)


def _exclusions(logits: torch.Tensor, requests: list[Request], rules: list[_PreparedRules]) -> torch.Tensor:
    """Bool, the shape of `logits`: True is impossible."""
    not_allowed = torch.zeros_like(logits, dtype=torch.bool)
    allowed = {row: rule.allowed_ids for row, rule in enumerate(rules) if rule.allowed_ids is not None}
    if allowed:
        not_allowed[list(allowed)] = True
        not_allowed.view(-1)[_places(logits, allowed)] = False
    forbidden = _places(logits, {row: rule.forbidden_ids(requests[row]) for row, rule in enumerate(rules)})
    if not len(forbidden):
        return not_allowed
    excluded = not_allowed.clone()
    excluded.view(-1)[forbidden] = True
    return torch.where(excluded.all(dim=-1, keepdim=True), not_allowed, excluded)


def _places(logits: torch.Tensor, ids: dict[int, np.ndarray]) -> torch.Tensor:
    """Where in the flattened `logits` each row's `ids` lie, in order."""
    vocab_size = logits.shape[-1]
    return torch.from_numpy(np.concatenate([row * vocab_size + part for row, part in ids.items()])).to(logits.device)


def _column(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """In float32, whose range it stays well within."""
    return torch.from_numpy(values.clip(-LARGEST_LOGIT, LARGEST_LOGIT).astype(np.float32)).to(device)
