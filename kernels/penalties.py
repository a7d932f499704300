"""OpenAI's frequency and presence penalty and CTRL's repetition penalty, on the few logits they concern.

For a token that a row has seen, c times in its output (0: in its prompt only):

    l ← l / repetition if l > 0 else l · repetition
    l ← l − frequency · c − presence · [c > 0]

(Keskar et al., "CTRL", 2019, for the first.) A row has seen at most some thousands of tokens of a vocabulary of a
hundred thousand, so it comes with a list of them, each once, and nothing else is read: 20 bytes in and 4 out for each.
Lists of a batch lie one after the other; a program takes BLOCK tokens of one of them, and those beyond the end of a
shorter list have nothing to do.

Products and differences may be fused, so a result differs from torch's by a rounding or two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .dispatch import uses_triton
from .triton_language import compile_options, constant, jit, tl

# Far beyond any logit, and far enough from float32's end that no difference of two of them is infinite.
LARGEST_LOGIT = 1e30
_LARGEST_LOGIT = constant(LARGEST_LOGIT)


class SeenTokens(NamedTuple):
    """The tokens of each list: int64 `ids` and `counts` `[num_tokens]`, int64 `starts` `[num_lists + 1]` in them.

    No id comes twice in a list. `longest` is at least the length of each: a number, for the host to size its grid.
    """

    ids: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    longest: int


class Penalties(NamedTuple):
    """Of each list: int64 `rows`, all different, and float32 `repetition` > 0, `frequency` and `presence`."""

    rows: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


def penalize(logits: torch.Tensor, seen: SeenTokens, penalties: Penalties) -> None:
    """Penalize what was seen, in float32 `logits` `[num_rows, vocab_size]` themselves.

    Results are within ±`LARGEST_LOGIT` before frequency and presence come, and infinities do not get past them.
    """
    compute = _launch if uses_triton(logits) else reference
    compute(logits, seen, penalties)


def reference(logits: torch.Tensor, seen: SeenTokens, penalties: Penalties) -> None:
    """As `penalize`, in torch."""
    num_tokens = len(seen.ids)
    lengths = seen.starts.diff()
    rows, repetition, frequency, presence = (
        values.repeat_interleave(lengths, output_size=num_tokens) for values in penalties
    )
    # Clamped first: a zero from an underflow would make NaN of an infinity.
    values = logits[rows, seen.ids].clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * seen.counts
    values -= presence * (seen.counts > 0)
    logits[rows, seen.ids] = values


def launch_options() -> dict[str, Any]:
    """Constants and compile options: a list of any length will do."""
    return {"BLOCK": 512, **compile_options(num_warps=4)}


def _launch(logits: torch.Tensor, seen: SeenTokens, penalties: Penalties) -> None:
    options = launch_options()
    if len(seen.ids):
        penalize_kernel[(len(penalties.rows), -(-seen.longest // options["BLOCK"]))](
            logits, seen.ids, seen.counts, seen.starts, *penalties, logits.stride(0), **options
        )


@jit
def penalize_kernel(  # type: ignore[no-untyped-def]
    logits, ids, counts, starts, rows, repetition, frequency, presence, logits_stride, BLOCK: tl.constexpr
):
    index = tl.program_id(0)
    places = tl.load(starts + index) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = places < tl.load(starts + index + 1)
    row = logits + tl.load(rows + index) * logits_stride
    tokens = tl.load(ids + places, mask=is_inside, other=0)
    count = tl.load(counts + places, mask=is_inside, other=0).to(tl.float32)
    factor = tl.load(repetition + index)
    values = tl.load(row + tokens, mask=is_inside, other=0.0)
    values = tl.minimum(tl.maximum(values, -_LARGEST_LOGIT), _LARGEST_LOGIT)
    values = tl.where(values > 0, tl.div_rn(values, factor), values * factor)
    values -= tl.load(frequency + index) * count
    values -= tl.where(count > 0, tl.load(presence + index), 0.0)
    tl.store(row + tokens, values, mask=is_inside)
