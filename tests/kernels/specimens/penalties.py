from __future__ import annotations

from kernels.penalties import launch_options, penalize_kernel
from tests.kernels.specimens import Specimen

SPECIMENS = [
    Specimen(
        "any",
        penalize_kernel,
        {
            "logits": "*fp32",
            **dict.fromkeys(("ids", "counts", "starts", "rows"), "*i64"),
            **dict.fromkeys(("repetition", "frequency", "presence"), "*fp32"),
            "logits_stride": "i32",
        },
        launch_options(),
    )
]
