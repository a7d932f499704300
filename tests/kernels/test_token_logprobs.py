"""Log-probabilities computed in C are torch's; what they mean is `tests/model/test_logprobs.py`."""

from __future__ import annotations

import pytest
import torch

from kernels import dispatch
from kernels.dispatch import computed_by
from kernels.token_logprobs import TokenLogprobs, reference, token_logprobs

from .libraries import each_library
from .tensors import strided

dtype = each_library(dispatch)
pytestmark = pytest.mark.usefixtures("two_threads")


def assert_as_torch(logits: torch.Tensor, token_ids: torch.Tensor, num_top_tokens: int) -> TokenLogprobs:
    with computed_by("torch"):
        expected = token_logprobs(logits.double(), token_ids, num_top_tokens)
    result = token_logprobs(logits, token_ids, num_top_tokens)
    for name, value, other in zip(TokenLogprobs._fields, result, expected, strict=True):
        assert value.dtype == other.dtype, name
        if "logprobs" in name:
            torch.testing.assert_close(value, other, rtol=1e-6, atol=2e-6)
        else:
            assert torch.equal(value, other), name
    return result


@pytest.mark.parametrize("vocab_size", [1, 3, 16, 47, 1023, 1024, 1025, 9001])
def test_they_are_those_of_torch(dtype: torch.dtype, vocab_size: int) -> None:
    token_ids = torch.randint(vocab_size, (6,))
    for values in (
        torch.randn(6, vocab_size) * 4,
        torch.randn(6, vocab_size).round(),  # equals, of both zeros too
        torch.where(torch.rand(6, vocab_size) < 0.7, float("-inf"), torch.randn(6, vocab_size)),
        torch.randn(6, vocab_size) * 1e4,
        torch.randn(6, vocab_size).sort(dim=-1).values,  # each likelier than all before it
    ):
        logits = strided(values.to(dtype))
        logits[torch.arange(6), torch.randint(vocab_size, (6,))] = 5
        for num_top_tokens in (0, 1, 5, 20, 64, 65):
            assert_as_torch(logits, token_ids, num_top_tokens)


def test_columns_need_not_be_contiguous(dtype: torch.dtype) -> None:
    logits = torch.randn(300, 4).to(dtype).T
    assert_as_torch(logits, torch.arange(8)[::2], 7)
    assert_as_torch(logits[:1].expand(4, -1), torch.arange(4), 7)


def test_a_row_that_is_no_number_spoils_no_other(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 5000).to(dtype)
    logits[1] = float("nan")
    result = token_logprobs(logits, torch.tensor([5, 6, 7]), 10)
    expected = reference(logits[::2], torch.tensor([5, 7]), 10)
    assert torch.equal(result.top_ids[::2], expected.top_ids)
    assert result.logprobs[1].isnan()
    assert ((result.top_ids >= 0) & (result.top_ids < 5000)).all()


def test_no_rows(dtype: torch.dtype) -> None:
    assert token_logprobs(torch.empty(0, 30, dtype=dtype), torch.empty(0, dtype=torch.int64), 4).top_ids.shape == (0, 4)
