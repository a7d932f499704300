"""Elementwise work by torch that takes no cores from what is computed meanwhile.

torch gives what is large to a team of threads, of which each thread that calls it has one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

# What torch thinks worth a second thread has at least one more.
_MAX_SIZE = 32_767


def chunks(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Rows of `x` `[num_rows, row_size]`, as many at a time as torch computes on in the calling thread. (A row of more
    than 32,767 it does not.)
    """
    yield from x.split(max(1, _MAX_SIZE // max(1, x.shape[1])))


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)`, both `[num_rows, row_size]` on the host."""
    for into, values in zip(chunks(target), chunks(source), strict=True):
        into.copy_(values)
