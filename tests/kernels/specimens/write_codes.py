"""What writes into quantized caches."""

from __future__ import annotations

from itertools import product

from tests.kernels.specimens import rotary_write_kv, write_kv

CODES = ("u8", "i8")
SPECIMENS = [
    *(
        rotary_write_kv.specimen(*types, *heads, interleaved, codes)
        for codes, types, heads, interleaved in product(
            CODES, (("bf16", "fp32"), ("fp32", "fp32")), rotary_write_kv.HEADS, (True, False)
        )
    ),
    *(
        write_kv.specimen(dtype, codes, *heads)
        for codes, dtype, heads in product(
            CODES, ("bf16", "fp32"), ((32, 256, 256), (8, 128, 128), (3, 80, 64), (1, 32, 32))
        )
    ),
]
