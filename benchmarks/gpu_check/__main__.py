"""The command line: `benchmarks.gpu_check` says what it does."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmarks.gpu_check as package

_NO_DEVICE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, interpreted, tiny, untimed")
    parser.add_argument("--only", nargs="+", default=[], metavar="KERNEL", help="files of kernels/, or engine")
    parser.add_argument("--limit-s", type=float, default=460.0, help="what would begin later is left out")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where results go as JSON")
    options = parser.parse_args(arguments)

    if options.rehearse:
        # Kernels ask for it when they are imported, so nothing that imports them comes before.
        os.environ["TRITON_INTERPRET"] = "1"
    problem = _what_is_missing(options.rehearse)
    if problem is not None:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return _NO_DEVICE

    from benchmarks.gpu_check.cases import CASES
    from benchmarks.gpu_check.running import run_all

    unknown = [name for name in options.only if name not in CASES]
    if unknown:
        parser.error(f"--only: {unknown[0]} is none of {', '.join(CASES)}")
    names = options.only or list(CASES)
    return run_all(names, is_rehearsal=options.rehearse, limit_s=options.limit_s, json_path=options.json)


def _what_is_missing(is_rehearsal: bool) -> str | None:
    from kernels.triton_language import IS_INSTALLED, IS_INTERPRETED

    if not IS_INSTALLED:
        return "Triton is not installed: pip install triton"
    if is_rehearsal:
        return None
    if IS_INTERPRETED:
        return "TRITON_INTERPRET is set, so kernels would be interpreted; unset it"
    import torch

    return None if torch.cuda.is_available() else "torch finds no GPU; --rehearse runs this on a CPU"


if __name__ == "__main__":
    sys.exit(main())
