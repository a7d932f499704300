"""Gumbel noise that belongs to a request: a hash of its seed, the position and the token.

If every logit of a row gets noise −log(−log u) of its own, u uniform in (0, 1), the argmax is a draw from the row's
softmax (Gumbel 1954): no sum over the vocabulary, and no generator with a state that batch mates could disturb.

    key  = mix(mix(seed + γ) ⊕ position + γ)
    bits = mix(key + (token + 1)·γ) >> 11          53 of them
    u    = (bits + ½) · 2⁻⁵³

`mix` is SplitMix64's finalizer and γ its increment (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014); all is modulo 2⁶⁴. The same integers come out everywhere, and the noise is theirs in float64: a seed
means the same on every device but for the last bits of two logarithms.

Two logarithms in float64 are slow on a GPU, and a draw needs them only where the argmax can be. So there is a rough
form, in float32, to find those places. With E = −log u the noise is −log E, so an error in it is E's relative one.
Near u = 1, where the large noise is, E comes from r = 1 − u, which the bits give exactly: E = r + r²/2 + r³/3 for
r < 2⁻⁶ leaves out less than 2⁻²⁰ of it. Elsewhere E ≥ 2⁻⁶, and log u is off by 2⁻²², the most a GPU's logarithm may be
near 1, and by 2⁻²⁴ of rounding u: 2⁻¹⁵ of E. Adding a scaled logit between −64 and 0, where every contender is, and
rounding add less than 2⁻¹⁷; `ROUGH_ERROR` is 2⁻¹².
"""

from __future__ import annotations

import torch

from .triton_language import constant, jit, tl

ROUGH_ERROR = 2.0**-12

_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_GAMMA_IN_KERNEL = constant(_GAMMA)
_MULTIPLIER_1_IN_KERNEL = constant(_MULTIPLIER_1)
_MULTIPLIER_2_IN_KERNEL = constant(_MULTIPLIER_2)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Float64, finite; each entry depends on its seed, its position and its token only.

    Args:
        seeds, positions, tokens: int64 of shapes that broadcast to the result's.
    """
    keys = _mix((_mix(seeds + _as_int64(_GAMMA)) ^ positions) + _as_int64(_GAMMA))
    bits = _mix(keys + (tokens + 1) * _as_int64(_GAMMA))
    # The very last of the 2⁵³ would be rounded to 1.
    uniform = _shift_right(bits, 11).double().add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-53)
    return uniform.log_().neg_().log_().neg_()


def _mix(z: torch.Tensor) -> torch.Tensor:
    """On int64 bit patterns: the products wrap around."""
    z = (z ^ _shift_right(z, 30)) * _as_int64(_MULTIPLIER_1)
    z = (z ^ _shift_right(z, 27)) * _as_int64(_MULTIPLIER_2)
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Without copies of the sign bit, which int64 shifts bring in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _as_int64(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


@jit
def mix(z):  # type: ignore[no-untyped-def]
    """SplitMix64's finalizer of uint64."""
    z = (z ^ (z >> 30)) * _MULTIPLIER_1_IN_KERNEL
    z = (z ^ (z >> 27)) * _MULTIPLIER_2_IN_KERNEL
    return z ^ (z >> 31)


@jit
def random_bits(seed, position, tokens):  # type: ignore[no-untyped-def]
    """The 53 bits of each of `tokens`, as int64; `seed` and `position` are int64."""
    key = mix(seed.to(tl.uint64, bitcast=True) + _GAMMA_IN_KERNEL) ^ position.to(tl.uint64, bitcast=True)
    key = mix(key + _GAMMA_IN_KERNEL)
    bits = mix(key + (tokens.to(tl.uint64) + 1) * _GAMMA_IN_KERNEL) >> 11
    return bits.to(tl.int64, bitcast=True)


@jit
def exact_noise(bits):  # type: ignore[no-untyped-def]
    """`gumbel_noise` of these bits, in float64."""
    uniform = tl.minimum((bits.to(tl.float64) + 0.5) * 2.0**-53, 1 - 2.0**-53)
    return -tl.log(-tl.log(uniform))


@jit
def rough_noise(bits):  # type: ignore[no-untyped-def]
    """The same in float32, within `ROUGH_ERROR` less what is left for adding a logit."""
    uniform = (2 * bits + 1).to(tl.float32) * 2.0**-54
    # 1 − u as float64 has it, where near 1 the half is rounded to even.
    rest = tl.maximum((1 << 53) - bits - (bits & 1), 1).to(tl.float32) * 2.0**-53
    near_one = rest * (1 + rest * (0.5 + rest * 0.3333333))
    return -tl.log(tl.where(rest < 2.0**-6, near_one, -tl.log(uniform)))
