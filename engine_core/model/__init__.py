"""The model: transformers' own definitions with our attention, one flattened batch per step.

`resolve` finds it, `gguf` unpacks it, `loader` loads it, `support` says what is refused and why, `attention` connects
it to the paged KV cache, `input_batch` lays a step out, `sampler` picks tokens, `runner` is all of that behind
`engine_core.runner.Runner`. This package itself loads no torch.
"""

from __future__ import annotations

# Here, because everything that may import transformers comes through here: it would trip over a foreign package first.
try:
    from kernels import check_installation
except ImportError as error:
    raise ImportError(
        "the package `kernels` is not Foreword's: a distribution named 'kernels' has installed its files over it;"
        " run: pip uninstall kernels, then install foreword again"
    ) from error

check_installation()
