"""From logits to tokens: penalties, restrictions, draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu_check.case import Case, Setting, Work, from_torch, in_torch, tensor_bytes
from kernels.dispatch import computed_by
from kernels.penalties import Penalties, SeenTokens, penalize
from kernels.restrict import Kept, Restrictions, restrict
from kernels.sample_tokens import Randomness, sample_tokens

# Where top-p ends is a matter of rounding; more of the probability than this is not.
_UNDECIDED_SHARE = 1e-3


def _small_shapes(setting: Setting) -> list[tuple[int, int]]:
    return [(3, 300)] if setting.is_rehearsal else [(1, 1), (5, 7), (33, 1025), (40, 50_257)]


def _large_shape(setting: Setting) -> tuple[int, int]:
    return (3, 300) if setting.is_rehearsal else (64, 128_256)


def _randomness(setting: Setting, num_rows: int, temperature: float | None = None) -> Randomness:
    """Every third row is greedy, unless all have one temperature."""
    temperatures = torch.rand(num_rows, device=setting.device) + 0.5
    if temperature is None:
        temperatures[::3] = 0.0
    else:
        temperatures.fill_(temperature)
    numbers = torch.randint(-(1 << 62), 1 << 62, (2, num_rows), device=setting.device)
    return Randomness(temperatures, numbers[0], numbers[1].abs() % 100_000)


def _restrictions(setting: Setting, num_rows: int, top_k: int, top_p: float, min_p: float) -> Restrictions:
    def each(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=setting.device)

    return Restrictions(each(top_k, torch.int64), each(top_p, torch.float64), each(min_p, torch.float64))


_KINDS = ((0, 0.9, 0.0), (40, 1.0, 0.0), (0, 1.0, 0.05), (200, 0.7, 0.01), (1, 1.0, 0.0))


def restrict_cases(setting: Setting) -> Iterator[Case]:
    def check() -> float:
        worst = 0.0
        for shape in _small_shapes(setting):
            for dtype, kind in ((dtype, kind) for dtype in setting.dtypes for kind in _KINDS):
                logits = setting.normal(*shape, dtype=dtype, scale=4)
                restrictions = _restrictions(setting, len(logits), *kind)
                worst = max(worst, _kept_apart(logits, _randomness(setting, len(logits), 0.8), restrictions))
        return worst

    yield Case("odd sizes, every kind, all types", lambda: Work(check))
    num_rows, vocab_size = _large_shape(setting)
    for name, kind in (("top-p 0.9", (0, 0.9, 0.0)), ("top-k 50", (50, 1.0, 0.0)), ("both", (50, 0.9, 0.0))):
        yield Case(f"{num_rows} × {vocab_size}, {name}", partial(_restrict, setting, kind))


def _kept_apart(logits: torch.Tensor, randomness: Randomness, restrictions: Restrictions) -> float:
    highest, temperature = logits.amax(dim=-1).float(), randomness.temperature
    actual = _mask(logits, restrict(logits, highest, temperature, restrictions))
    with computed_by("torch"):
        expected = _mask(logits, restrict(logits, highest, temperature, restrictions))
    shares = ((logits.double() - highest[:, None]) / temperature[:, None]).softmax(dim=-1)
    return ((actual != expected) * shares).sum(dim=-1).max().item() / _UNDECIDED_SHARE


def _mask(logits: torch.Tensor, kept: Kept) -> torch.Tensor:
    tokens = torch.arange(logits.shape[1], device=logits.device)
    threshold, last_equal = kept.threshold[:, None], kept.last_equal[:, None]
    return (logits > threshold) | ((logits == threshold) & (tokens <= last_equal))


def _restrict(setting: Setting, kind: tuple[int, float, float]) -> Work:
    logits = setting.normal(*_large_shape(setting), scale=4)
    highest, randomness = logits.amax(dim=-1).float(), _randomness(setting, len(logits), 0.8)
    restrictions = _restrictions(setting, len(logits), *kind)
    return Work(
        lambda: _kept_apart(logits, randomness, restrictions),
        run=lambda: restrict(logits, highest, randomness.temperature, restrictions),
        # What is done where there is no such kernel begins with this.
        beside=lambda: logits.sort(dim=-1, descending=True),
        moved_bytes=tensor_bytes(logits),
    )


def sample_tokens_cases(setting: Setting) -> Iterator[Case]:
    def check() -> float:
        worst = 0.0
        for shape in _small_shapes(setting):
            for dtype in setting.dtypes:
                logits, randomness = setting.normal(*shape, dtype=dtype, scale=2), _randomness(setting, shape[0])
                restrictions = _restrictions(setting, shape[0], 40, 0.95, 0.01)
                worst = max(worst, from_torch(lambda x=logits: [sample_tokens(x)]))
                for those in (None, restrictions):
                    worst = max(
                        worst, from_torch(lambda x=logits, r=randomness, those=those: [sample_tokens(x, r, those)])
                    )
        return worst

    yield Case("same tokens as torch, all types", lambda: Work(check))
    num_rows, vocab_size = _large_shape(setting)
    for name, draws, restricts in (("greedy", False, False), ("random", True, False), ("top-k 50, top-p", True, True)):
        yield Case(
            f"{num_rows} × {vocab_size}, {name}",
            partial(_sample, setting, draws, restricts),
        )


def _sample(setting: Setting, draws: bool, restricts: bool) -> Work:
    logits = setting.normal(*_large_shape(setting), scale=2)
    randomness = _randomness(setting, len(logits), 0.8) if draws else None
    restrictions = _restrictions(setting, len(logits), 50, 0.9, 0.0) if restricts else None
    return Work(
        lambda: from_torch(lambda: [sample_tokens(logits, randomness, restrictions)]),
        run=lambda: sample_tokens(logits, randomness, restrictions),
        beside=_in_plain_torch(logits, draws, restricts),
        moved_bytes=tensor_bytes(logits),
    )


def _in_plain_torch(logits: torch.Tensor, draws: bool, restricts: bool) -> Callable[[], torch.Tensor]:
    """As one would write it: sorted, where it is restricted."""
    if not draws:
        return lambda: logits.argmax(dim=-1)

    def draw() -> torch.Tensor:
        shares = (logits.float() / 0.8).softmax(dim=-1)
        if not restricts:
            return shares.multinomial(1)
        ordered, tokens = shares.sort(dim=-1, descending=True)
        ordered[:, 50:] = 0.0
        before = ordered.cumsum(dim=-1) - ordered
        ordered[before >= 0.9 * ordered.sum(dim=-1, keepdim=True)] = 0.0
        return tokens.gather(1, ordered.multinomial(1))

    return draw


def penalties_cases(setting: Setting) -> Iterator[Case]:
    yield Case("odd lengths, lists of nothing", lambda: Work(lambda: _check_penalties(setting)))
    num_rows, vocab_size = _large_shape(setting)
    num_seen = 5 if setting.is_rehearsal else 4096
    yield Case(f"{num_seen} seen in each of {num_rows}", partial(_penalize, setting, [num_seen] * num_rows, vocab_size))


def _check_penalties(setting: Setting) -> float:
    vocab_size = 700
    logits = setting.normal(6, vocab_size, dtype=torch.float32, scale=4)
    seen, penalties = _seen(setting, [0, 1, 511, 513, 7], vocab_size)
    return _penalized_apart(logits, seen, penalties)


def _seen(setting: Setting, lengths: list[int], vocab_size: int) -> tuple[SeenTokens, Penalties]:
    ids = torch.cat([torch.randperm(vocab_size, device=setting.device)[:length] for length in lengths])
    starts = torch.tensor([0, *lengths], device=setting.device).cumsum(dim=0)
    factors = torch.rand(3, len(lengths), device=setting.device) + 0.5
    counts = torch.randint(0, 5, (len(ids),), device=setting.device)
    rows = torch.arange(len(lengths), device=setting.device)
    return SeenTokens(ids, counts, starts, max(lengths)), Penalties(rows, *factors)


def _penalized_apart(logits: torch.Tensor, seen: SeenTokens, penalties: Penalties) -> float:
    def compute() -> list[torch.Tensor]:
        result = logits.clone()
        penalize(result, seen, penalties)
        return [result]

    return from_torch(compute)


def _penalize(setting: Setting, lengths: list[int], vocab_size: int) -> Work:
    logits = setting.normal(len(lengths), vocab_size, dtype=torch.float32, scale=4)
    seen, penalties = _seen(setting, lengths, vocab_size)

    def run() -> None:
        penalize(logits, seen, penalties)

    # Of a logit a whole sector is moved, in and out.
    return Work(
        lambda: _penalized_apart(logits, seen, penalties),
        run=run,
        beside=in_torch(run),
        moved_bytes=len(seen.ids) * (8 + 8 + 2 * 32),
    )
