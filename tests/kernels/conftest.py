"""What tests of kernels can ask for by name."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch computes in two threads, and random numbers are the same each time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    random.seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def inference(two_threads: None) -> Iterator[None]:
    """As `two_threads`, and no gradients are recorded."""
    with torch.inference_mode():
        yield
