"""`benchmarks.bookkeeping` works: our half measures every row of the table, on a workload that takes a moment."""

from __future__ import annotations

import pytest

from benchmarks.bookkeeping import ROWS, WORKLOAD, Row
from benchmarks.bookkeeping_foreword import Foreword

SMALL = WORKLOAD | {"prompt_tokens": 256, "num_running": 4, "running_tokens": 32, "spare_blocks_per_request": 4}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_every_row_is_measured(row: Row):
    assert getattr(Foreword(SMALL), row.method)(*row.arguments)[row.key] > 0
