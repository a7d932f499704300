"""`sample_tokens` and `restrict` on CPUs: how `cpu/sampling.c` and `cpu/restrict.c` are called.

Both run in torch's intra-op threads. Several share a row, but for what it is restricted to: that is one thread's.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import numpy as np
import torch


class _CSampling(ctypes.Structure):
    """`Sampling` of cpu/sampling.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("seeds", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
    )


class _CRestricting(ctypes.Structure):
    """`Restricting` of cpu/restrict.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("highest", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("threshold", ctypes.c_void_p),
        ("last_equal", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
    )


def sample(
    library: ctypes.CDLL,
    logits: torch.Tensor,
    randomness: Sequence[torch.Tensor] | None,
    restrictions: Sequence[torch.Tensor] | None,
) -> torch.Tensor:
    """As `sample_tokens`, in the library for the logits' type."""
    logits = _readable(logits)
    num_rows, vocab_size = logits.shape
    num_threads = torch.get_num_threads()
    tokens = torch.empty(num_rows, dtype=torch.int64)
    # Held until the call is over.
    given = [tensor.contiguous() for tensor in (*(randomness or ()), *(restrictions or ()))]
    sampling = _CSampling(logits.data_ptr(), logits.stride(0), num_rows, vocab_size, tokens.data_ptr())
    if randomness is not None:
        sampling.temperature, sampling.seeds, sampling.positions = (tensor.data_ptr() for tensor in given[:3])
        if restrictions is not None:
            sampling.top_k, sampling.top_p, sampling.min_p = (tensor.data_ptr() for tensor in given[3:])
            sampling.tables = _tables(library, logits.dtype, num_threads)
    workspace = torch.empty(library.workspace_bytes(ctypes.byref(sampling)), dtype=torch.uint8)
    sampling.workspace = workspace.data_ptr()
    library.sample(ctypes.byref(sampling), num_threads)
    return tokens


def restrict(
    library: ctypes.CDLL,
    logits: torch.Tensor,
    highest: torch.Tensor,
    temperature: torch.Tensor,
    restrictions: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `restrict`, in the library for the logits' type: threshold and last equal."""
    logits = _readable(logits)
    num_threads = torch.get_num_threads()
    threshold = torch.empty(len(logits), dtype=torch.float32)
    last_equal = torch.empty(len(logits), dtype=torch.int64)
    given = [tensor.contiguous() for tensor in (highest, temperature, *restrictions)]
    restricting = _CRestricting(
        logits.data_ptr(),
        logits.stride(0),
        *logits.shape,
        *(tensor.data_ptr() for tensor in (*given, threshold, last_equal)),
        _tables(library, logits.dtype, num_threads),
    )
    library.restrict_rows(ctypes.byref(restricting), num_threads)
    return threshold, last_equal


def _readable(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


class _KeptTables(threading.local):
    """Tables by type of logits. They are kept, since fresh memory takes longer to get than to use; zeroed, as the
    library leaves them; and each thread that samples has its own, since the library runs without the GIL.
    """

    def __init__(self) -> None:
        self.of: dict[torch.dtype, np.ndarray] = {}


_kept_tables = _KeptTables()


def _tables(library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> int:
    """The address of one for each thread."""
    num_bytes = library.tables_bytes() * num_threads
    tables = _kept_tables.of.get(dtype)
    if tables is None or tables.nbytes < num_bytes:
        # Not torch's zeros, which are written: of these the system provides only what is used.
        tables = _kept_tables.of[dtype] = np.zeros(num_bytes, dtype=np.uint8)
    return tables.ctypes.data
