"""The model: transformers' own definitions with our attention, one flattened batch per step.

`resolve` finds it, `gguf` unpacks it, `loader` loads it, `support` and `probe` say what is refused and why, `passes`
make it faster, `attention` connects it to the paged KV cache, `input_batch` lays a step out, `forward` computes it,
`sampler` picks tokens, `memory` and `rehearsal` size the pool. `pictures` has what a model needs for them: encoder,
positions, groups of tokens that see each other; `picture_probe` looks whether that is all. `runner` is all of this
behind `engine_core.runner.Runner`. This package itself loads no torch.
"""

from __future__ import annotations

from ipc.threads import limit_spinning

# Here, because everything that may import transformers comes through here: it would trip over a foreign package first.
try:
    from kernels import check_installation
except ImportError as error:
    raise ImportError(
        "the package `kernels` is not Foreword's: a distribution named 'kernels' has installed its files over it;"
        " run: pip uninstall kernels, then install foreword again"
    ) from error

check_installation()

limit_spinning()
