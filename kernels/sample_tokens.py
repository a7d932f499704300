"""Logits → token ids: greedy rows and random ones in one batch, without a look from the host.

A greedy row takes its highest logit. A random one takes the highest sum of a logit, shifted by the row's highest and
divided by its temperature, and Gumbel noise (`gumbel`), among the tokens that `restrict` leaves.

On a CPU `cpu/sampling.c` does this, for bfloat16 and float32. On a GPU it is four launches, the last two of which read
only what they need:

1. the highest logit of every chunk of CHUNK tokens of every row;
2. `restrict`, if a row restricts anything, one program per row;
3. for random rows the highest score of every chunk, roughly: float32 logarithms. Chunks of which nothing is kept,
   nearly all of them after a top-k or top-p, are known by their highest logit and not read;
4. one program per row looks up those chunks that may hold its winner, usually one, and decides there in float64.

So float32 never decides. A chunk is looked up if its rough score is within twice `ROUGH_ERROR` of the best, which holds
for the winner's whatever the errors are; greedy rows need no margin. Among equals the lowest id wins. What may differ
from torch is the last bit of a float64 logarithm, which matters once in some 2⁴⁰ draws, and what `restrict` says of its
sums. Bytes moved per row of n values of b bytes: 2·n·b for random rows, n·b for greedy ones, besides `restrict`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import sampling_in_c
from .dispatch import library_for, uses_triton
from .gumbel import ROUGH_ERROR, exact_noise, gumbel_noise, random_bits, rough_noise
from .restrict import Kept, Restrictions, restrict, rows_at_once, scale
from .triton_language import compile_options, constant, jit, next_power_of_2, tl

_MARGIN = constant(2 * ROUGH_ERROR)


class Randomness(NamedTuple):
    """One of each per row: float32 `temperature`, 0 for greedy; int64 `seeds` and `positions`, for the noise."""

    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


def sample_tokens(
    logits: torch.Tensor, randomness: Randomness | None = None, restrictions: Restrictions | None = None
) -> torch.Tensor:
    """A token for each row of `logits` `[num_rows, vocab_size]`, int64 `[num_rows]`.

    Args:
        randomness: None where all rows are greedy.
        restrictions: None where no row has any; greedy rows are not concerned.

    Temperature 0 takes the highest logit, the lowest id among equals. Otherwise temperature comes first, then min-p,
    which keeps the tokens at least `min_p` times as likely as the likeliest, then top-k, then top-p, which keeps the
    fewest tokens whose probabilities reach `top_p`. Which of two tokens is likelier their logits say, before
    temperature; among equals the lower id is kept first. A logit of −inf is never drawn; every row has one that is not.

    A row's token depends on the row alone: its logits, its numbers and the size of the vocabulary.
    """
    library = library_for(logits)
    if library is not None:
        return sampling_in_c.sample(library, logits, randomness, restrictions)
    compute = _launch if uses_triton(logits) else reference
    return compute(logits, randomness, restrictions)


def reference(logits: torch.Tensor, randomness: Randomness | None, restrictions: Restrictions | None) -> torch.Tensor:
    """As `sample_tokens`, in torch."""
    # Not `argmax`, which takes four times as long over a bfloat16 row; both give the first of equals.
    highest, tokens = logits.max(dim=-1)
    if randomness is None:
        return tokens
    kept = None
    if restrictions is not None:
        kept = restrict(logits, highest.float(), randomness.temperature, restrictions)
    for rows in (randomness.temperature > 0).nonzero().flatten().split(rows_at_once(logits.shape[-1])):
        tokens[rows] = _draw(
            logits[rows].float(),
            highest[rows].float(),
            Randomness(*(values[rows] for values in randomness)),
            None if kept is None else Kept(*(values[rows] for values in kept)),
        )
    return tokens


def _draw(logits: torch.Tensor, highest: torch.Tensor, randomness: Randomness, kept: Kept | None) -> torch.Tensor:
    temperature, seeds, positions = randomness
    if kept is None:
        tokens = torch.arange(logits.shape[-1], device=logits.device)
        noise = gumbel_noise(seeds[:, None], positions[:, None], tokens)
        return noise.add_(scale(logits, highest[:, None], temperature[:, None])).argmax(dim=-1)
    # Noise costs more than all the rest, and nearly always only a few tokens need it.
    rows, tokens = (logits >= kept.threshold[:, None]).nonzero(as_tuple=True)
    is_kept = (logits[rows, tokens] > kept.threshold[rows]) | (tokens <= kept.last_equal[rows])
    rows, tokens = rows[is_kept], tokens[is_kept]
    scores = torch.full(logits.shape, float("-inf"), dtype=torch.float64, device=logits.device)
    noise = gumbel_noise(seeds[rows], positions[rows], tokens)
    scores[rows, tokens] = noise.add_(scale(logits[rows, tokens], highest[rows], temperature[rows]))
    return scores.argmax(dim=-1)


def launch_options(vocab_size: int) -> dict[str, Any]:
    """Constants and compile options of the kernels over chunks: `chunk_maxima` and `rough_scores`."""
    chunk = min(1024, next_power_of_2(vocab_size))
    return {"CHUNK": chunk, **compile_options(num_warps=max(1, min(4, chunk // 128)))}


def deciding_options(vocab_size: int) -> dict[str, Any]:
    """Those of `decide_kernel`."""
    options = launch_options(vocab_size)
    return {"CHUNKS": next_power_of_2(-(-vocab_size // options["CHUNK"])), **options}


def _launch(logits: torch.Tensor, randomness: Randomness | None, restrictions: Restrictions | None) -> torch.Tensor:
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return tokens
    chunked = launch_options(vocab_size)
    num_chunks = -(-vocab_size // chunked["CHUNK"])
    maxima = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    chunk_maxima_kernel[(num_rows, num_chunks)](maxima, logits, logits.stride(0), vocab_size, **chunked)
    deciding = {"IS_RANDOM": randomness is not None, **deciding_options(vocab_size)}
    if randomness is None:
        # Where nothing is random the others are not read.
        unread = (logits, *(logits,) * 5)
        decide_kernel[(num_rows,)](
            tokens, maxima, logits, *unread, logits.stride(0), vocab_size, num_chunks, **deciding
        )
        return tokens
    highest = maxima.amax(dim=-1)
    kept = Kept(torch.full_like(highest, float("-inf")), torch.full_like(tokens, -1))
    if restrictions is not None:
        kept = restrict(logits, highest, randomness.temperature, restrictions)
    of_rows = (highest, *randomness, *kept)
    scores = torch.empty_like(maxima)
    rough_scores_kernel[(num_rows, num_chunks)](
        scores, maxima, logits, *of_rows, logits.stride(0), vocab_size, num_chunks, **chunked
    )
    decide_kernel[(num_rows,)](tokens, scores, logits, *of_rows, logits.stride(0), vocab_size, num_chunks, **deciding)
    return tokens


@jit
def chunk_maxima_kernel(maxima, logits, logits_stride, vocab_size, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * logits_stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
    tl.store(maxima + row * tl.num_programs(1) + chunk, tl.max(values.to(tl.float32)))


@jit
def rough_scores_kernel(  # type: ignore[no-untyped-def]
    scores,
    maxima,
    logits,
    highest,
    temperature,
    seeds,
    positions,
    threshold,
    last_equal,
    logits_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = row * num_chunks + chunk
    maximum = tl.load(maxima + place)
    warmth = tl.load(temperature + row)
    # A greedy row's scores are its logits.
    score = tl.where(warmth > 0, float("-inf"), maximum)
    if (warmth > 0) & (maximum >= tl.load(threshold + row)):
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        scaled = _scaled_and_kept(
            logits + row * logits_stride,
            tokens,
            vocab_size,
            tl.load(highest + row),
            warmth,
            tl.load(threshold + row),
            tl.load(last_equal + row),
        )
        noise = rough_noise(random_bits(tl.load(seeds + row), tl.load(positions + row), tokens))
        score = tl.max(scaled + noise)
    tl.store(scores + place, score)


@jit
def decide_kernel(  # type: ignore[no-untyped-def]
    output,
    scores,
    logits,
    highest,
    temperature,
    seeds,
    positions,
    threshold,
    last_equal,
    logits_stride,
    vocab_size,
    num_chunks,
    IS_RANDOM: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    chunks = tl.arange(0, CHUNKS)
    of_chunks = tl.load(scores + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
    warmth = tl.zeros((), tl.float32)
    if IS_RANDOM:
        warmth = tl.load(temperature + row)
    # No chunk but the first of those with a greedy row's highest logit has its lowest id.
    margin = tl.where(warmth > 0, _MARGIN, 0.0)
    is_contender = (of_chunks >= tl.max(of_chunks) - margin) & (chunks < num_chunks)
    best = tl.full((), float("-inf"), tl.float64)
    token = tl.zeros((), tl.int32)
    chunk = tl.min(tl.where(is_contender, chunks, CHUNKS))
    while chunk < num_chunks:
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        exact = tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float64)
        if IS_RANDOM:  # noqa: SIM102 - what is no constant must not be compiled where there is nothing to read
            if warmth > 0:
                scaled = _scaled_and_kept(
                    logits,
                    tokens,
                    vocab_size,
                    tl.load(highest + row),
                    warmth,
                    tl.load(threshold + row),
                    tl.load(last_equal + row),
                )
                bits = random_bits(tl.load(seeds + row), tl.load(positions + row), tokens)
                exact = scaled.to(tl.float64) + exact_noise(bits)
        chunk_best = tl.max(exact)
        first = tl.min(tl.where(exact == chunk_best, tokens, vocab_size))
        token = tl.where(chunk_best > best, first, token)
        best = tl.maximum(best, chunk_best)
        following = tl.min(tl.where(is_contender & (chunks > chunk), chunks, CHUNKS))
        chunk = tl.where(warmth > 0, following, CHUNKS)
    tl.store(output + row, token.to(tl.int64))


@jit
def _scaled_and_kept(row, tokens, vocab_size, highest, temperature, threshold, last_equal):  # type: ignore[no-untyped-def]
    """The logits of `tokens`, shifted and divided; −inf where they are not kept."""
    values = tl.load(row + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    is_kept = (values > threshold) | ((values == threshold) & (tokens <= last_equal))
    return tl.where(is_kept, tl.div_rn(values - highest, temperature), float("-inf"))
