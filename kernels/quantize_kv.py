"""Keys and values in 8 bits: what a token's become in the cache, and what they then stand for.

A slot has, for each KV head, `head_dim` codes of one byte and one scale in float32, for keys and for values apart:

    scale = max |x| / L        code = x / scale, rounded to the nearest, ties to even        stands for code · scale

| cache type | code | L |
| --- | --- | --- |
| `int8` | a whole number from −127 to 127 | 127 |
| `fp8_e4m3` | `torch.float8_e4m3fn`: sign, 4 bits of exponent, 3 of mantissa; finite only | 448 |

So a slot depends on its own token alone, never on the chunk it was computed in, on its neighbours in the block, or on
what the block held before; the token's largest value is met exactly but for rounding. Both divisions are correctly
rounded ones in float32 of what the model computed with, whatever its type: who computes (torch, C, Triton) makes no
difference to a bit. Where the scale is 0 (of zeros, or of what is too small to have one) the codes are 0. Where a value
is not finite neither is the scale, and whoever reads the slot gets NaN, as without quantization.

Attention multiplies the product of a query with a key's codes by the key's scale, and a weight by the value's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# By the name of the cache's type, as in `EngineConfig.kv_cache_dtype`.
QUANTIZED_TYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SCALE_DTYPE = torch.float32


class KVScales(NamedTuple):
    """Of a layer's quantized cache: `[num_blocks, block_size, num_kv_heads]` each, float32, contiguous."""

    keys: torch.Tensor
    values: torch.Tensor


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[..., head_dim]` as codes of that shape in `dtype`, one of `LARGEST`, and scales `[...]` in float32."""
    x, largest = x.float(), LARGEST[dtype]
    scales = x.abs().amax(dim=-1) / largest
    # Beyond the largest only where the scale is so small that it has few bits itself.
    codes = (x / torch.where(scales == 0, torch.inf, scales)[..., None]).clamp(-largest, largest)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`codes` `[..., head_dim]` times `scales` `[...]`, rounded once to float32, and to `dtype`."""
    return (codes.float() * scales[..., None]).to(dtype)
