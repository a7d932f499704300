from __future__ import annotations

from kernels.sample_tokens import (
    chunk_maxima_kernel,
    decide_kernel,
    deciding_options,
    launch_options,
    rough_scores_kernel,
)
from tests.kernels.specimens import Specimen

_OF_ROWS = {
    "highest": "*fp32",
    "temperature": "*fp32",
    "seeds": "*i64",
    "positions": "*i64",
    "threshold": "*fp32",
    "last_equal": "*i64",
    **dict.fromkeys(("logits_stride", "vocab_size", "num_chunks"), "i32"),
}

SPECIMENS = [
    specimen
    for dtype in ("bf16", "fp32")
    for vocab_size in (262_144, 300)
    for specimen in (
        Specimen(
            f"{vocab_size} {dtype} random",
            decide_kernel,
            {"output": "*i64", "scores": "*fp32", "logits": f"*{dtype}", **_OF_ROWS},
            {"IS_RANDOM": True, **deciding_options(vocab_size)},
        ),
        Specimen(
            f"{vocab_size} {dtype} greedy",
            decide_kernel,
            {
                "output": "*i64",
                "scores": "*fp32",
                "logits": f"*{dtype}",
                **{name: f"*{dtype}" if kind.startswith("*") else kind for name, kind in _OF_ROWS.items()},
            },
            {"IS_RANDOM": False, **deciding_options(vocab_size)},
        ),
        Specimen(
            f"{vocab_size} {dtype}",
            rough_scores_kernel,
            {"scores": "*fp32", "maxima": "*fp32", "logits": f"*{dtype}", **_OF_ROWS},
            launch_options(vocab_size),
        ),
        Specimen(
            f"{vocab_size} {dtype}",
            chunk_maxima_kernel,
            {"maxima": "*fp32", "logits": f"*{dtype}", "logits_stride": "i32", "vocab_size": "i32"},
            launch_options(vocab_size),
        ),
    )
]
