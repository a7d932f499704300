from __future__ import annotations

import torch

from kernels.restrict import launch_options, restrict_kernel
from tests.kernels.specimens import Specimen

SPECIMENS = [
    Specimen(
        f"{vocab_size} {name}",
        restrict_kernel,
        {
            "threshold": "*fp32",
            "last_equal": "*i64",
            "logits": f"*{name}",
            "highest": "*fp32",
            "temperature": "*fp32",
            "top_k": "*i64",
            "top_p": "*fp64",
            "min_p": "*fp64",
            **dict.fromkeys(("logits_stride", "vocab_size"), "i32"),
        },
        launch_options(vocab_size, dtype),
    )
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16"))
    for vocab_size in (151_936, 2000, 300)
]
