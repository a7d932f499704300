"""The attention kernel computes what a float64 reference computes, as near to it as torch's own does in bfloat16.

How it takes its place in `paged_attention` is in `test_paged_attention.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from kernels import attention as kernel
from kernels.attention import attention, takes

pytestmark = pytest.mark.skipif(not kernel.is_available(), reason="no compiler, or no AVX512-BF16")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@dataclass
class Case:
    """Requests whose keys and values lie in scattered slots of a pool that is NaN everywhere else."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    key_slots: torch.Tensor
    key_counts: torch.Tensor
    num_queries: int
    scaling: float
    query_ends: torch.Tensor | None = None

    def in_kernel(self, window: int | None = None) -> torch.Tensor:
        return attention(
            *(self.query, self.keys, self.values, self.key_slots, self.key_counts),
            scaling=self.scaling,
            sliding_window=window,
            query_ends=self.query_ends,
        )

    def see_each_other(self, *groups: tuple[int, int]) -> None:
        """Of the only request, keys `[start, end)`, as far as they have queries."""
        [count] = self.key_counts.tolist()
        own = torch.arange(count - self.num_queries, count)
        self.query_ends = own + 1
        for start, end in groups:
            self.query_ends[(own >= start) & (own < end)] = end

    def in_torch(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        outputs = []
        for query, slots, count in zip(
            self.query.split(self.num_queries), self.key_slots, self.key_counts.tolist(), strict=True
        ):
            own = torch.arange(count - self.num_queries, count)
            ends = own + 1 if self.query_ends is None else self.query_ends
            seen = (torch.arange(count) < ends[:, None]) & (torch.arange(count) > own[:, None] - (window or count))
            keys, values = (x[slots[:count]].to(dtype).transpose(0, 1)[None] for x in (self.keys, self.values))
            output = F.scaled_dot_product_attention(
                query.to(dtype).transpose(0, 1)[None],
                keys,
                values,
                attn_mask=torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf")),
                scale=self.scaling,
                enable_gqa=True,
            )
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs)


def make_case(
    num_queries: int,
    key_counts: list[int],
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    value_dim: int | None = None,
    spread: float = 1.0,
) -> Case:
    num_heads, num_kv_heads = heads
    num_slots = sum(key_counts) + 5
    scattered = torch.randperm(num_slots)
    pools = [torch.full((num_slots, num_kv_heads, dim), float("nan")) for dim in (head_dim, value_dim or head_dim)]
    key_slots = torch.empty(len(key_counts), max(key_counts), dtype=torch.int64)
    begin = 0
    for row, count in zip(key_slots, key_counts, strict=True):
        row[:] = scattered[-1]  # nobody's
        row[:count] = scattered[begin : begin + count]
        for pool in pools:
            pool[row[:count]] = torch.randn(count, *pool.shape[1:])
        begin += count
    return Case(
        query=(spread * torch.randn(num_queries * len(key_counts), num_heads, head_dim)).bfloat16(),
        keys=pools[0].bfloat16(),
        values=pools[1].bfloat16(),
        key_slots=key_slots,
        key_counts=torch.tensor(key_counts),
        num_queries=num_queries,
        scaling=head_dim**-0.5,
    )


def assert_as_near_as_torch(case: Case, window: int | None = None) -> None:
    exact = case.in_torch(window, torch.float64)
    actual = case.in_kernel(window)
    assert actual.dtype == torch.bfloat16 and actual.shape == exact.shape
    own, torchs = ((x.double() - exact).norm() for x in (actual, case.in_torch(window, torch.bfloat16)))
    # Where there is little to add up, both round but once.
    assert own <= 1.25 * torchs + 1e-3 * exact.norm()


@pytest.mark.parametrize("window", [None, 1, 2, 31, 100, 129, 5000])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"),
    [(1, 1), (2, 2), (5, 33), (30, 300), (33, 33), (48, 129), (129, 129), (150, 1000)],
)
def test_chunks_behind_any_prefix(num_queries: int, num_keys: int, window: int | None) -> None:
    assert_as_near_as_torch(make_case(num_queries, [num_keys]), window)


@pytest.mark.parametrize("key_counts", [[1], [257], [40, 1, 128, 127, 129, 33], [600, 590, 580]])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (10, 1), (32, 2)])
def test_decodes_of_any_lengths(heads: tuple[int, int], key_counts: list[int]) -> None:
    assert_as_near_as_torch(make_case(1, key_counts, heads=heads))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(32, 32), (96, 96), (128, 128), (256, 256), (192, 128), (32, 64)])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (200, 1)])
def test_heads_of_any_size_and_number(heads: tuple[int, int], head_dim: int, value_dim: int) -> None:
    assert_as_near_as_torch(make_case(20, [150], heads=heads, head_dim=head_dim, value_dim=value_dim), 90)


@pytest.mark.parametrize("window", [None, 1, 31, 129, 5000])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "groups"),
    [
        (2, 2, [(0, 2)]),
        (30, 300, [(250, 300)]),
        (48, 129, [(81, 90), (90, 128)]),
        (129, 129, [(1, 128)]),
        (150, 1000, [(700, 860), (861, 870), (990, 1000)]),
    ],
)
def test_groups_of_keys_that_see_each_other(
    num_queries: int, num_keys: int, groups: list[tuple[int, int]], window: int | None
) -> None:
    case = make_case(num_queries, [num_keys])
    case.see_each_other(*groups)
    assert_as_near_as_torch(case, window)


def test_scores_far_apart() -> None:
    """The largest score may come at any time, and make all before it vanish."""
    assert_as_near_as_torch(make_case(40, [700], spread=60.0))


def test_scores_so_large_that_their_rounding_is_larger_than_any_exponent() -> None:
    case = make_case(3, [300])
    case.query *= 1e18
    case.keys *= 1e18
    exact = case.in_torch(None, torch.float64)
    torch.testing.assert_close(case.in_kernel().double(), exact, atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("seed", range(30))
def test_random_batches(seed: int) -> None:
    draw = random.Random(seed)
    num_kv_heads = draw.randint(1, 4)
    num_queries = draw.choice([1, 1, draw.randint(2, 64), draw.randint(65, 200)])
    num_requests = draw.randint(1, 6) if num_queries == 1 else 1
    torch.manual_seed(seed)
    torch.set_num_threads(draw.choice([1, 2, 3]))
    case = make_case(
        num_queries,
        [num_queries + draw.choice([0, draw.randint(0, 40), draw.randint(0, 600)]) for _ in range(num_requests)],
        heads=(num_kv_heads * draw.randint(1, 12), num_kv_heads),
        head_dim=draw.choice([32, 64, 96, 160]),
    )
    if num_requests == 1:
        borders = sorted(draw.sample(range(int(case.key_counts[0]) + 1), k=min(4, num_queries)))
        case.see_each_other(*zip(borders[::2], borders[1::2]))
    assert_as_near_as_torch(case, draw.choice([None, draw.randint(1, 300)]))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_token_is_the_same_alone_and_in_any_chunk_in_any_number_of_threads(num_threads: int) -> None:
    case = make_case(150, [400])
    torch.set_num_threads(num_threads)
    together = case.in_kernel()
    torch.set_num_threads(1)
    for first, end in ((0, 1), (17, 80), (149, 150)):
        count = 250 + end
        part = attention(
            case.query[first:end],
            case.keys,
            case.values,
            case.key_slots[:, :count].contiguous(),
            torch.tensor([count]),
            scaling=case.scaling,
        )
        assert torch.equal(part, together[first:end])


def test_what_is_not_a_number_stays_with_its_token_and_its_head() -> None:
    case = make_case(12, [140])
    expected = case.in_kernel()
    case.query[5, 3, 7] = float("nan")
    actual = case.in_kernel()
    assert actual[5, 3].isnan().all()
    actual[5, 3] = expected[5, 3]
    assert torch.equal(actual, expected)


def test_a_key_that_is_not_a_number_is_seen_by_later_tokens_only() -> None:
    case = make_case(12, [140])
    expected = case.in_kernel()
    case.keys[case.key_slots[0, 133], 1, 7] = float("nan")
    actual = case.in_kernel()
    assert actual[5:, 3:].isnan().all()
    actual[5:, 3:] = expected[5:, 3:]
    assert torch.equal(actual, expected)


def test_nothing_needs_to_be_contiguous_but_a_head() -> None:
    case = make_case(12, [140])
    expected = case.in_kernel()
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    both = torch.stack([case.keys, case.values], dim=2)
    case.keys, case.values = both.unbind(2)
    assert not case.query.is_contiguous() and not case.keys.is_contiguous()
    assert torch.equal(case.in_kernel(), expected)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 2, 64),
        torch.zeros(3, 2, 48, dtype=torch.bfloat16),
        torch.zeros(3, 2, 288, dtype=torch.bfloat16),
        torch.zeros(3, 64, 2, dtype=torch.bfloat16).transpose(1, 2),
        torch.zeros(3, 2, 64, dtype=torch.bfloat16, device="meta"),
    ],
    ids=["float32", "odd size", "too large", "apart", "device"],
)
def test_what_the_kernel_cannot_read_is_refused(tensor: torch.Tensor) -> None:
    one = torch.zeros(1, dtype=torch.int64)
    assert not takes(tensor, tensor, tensor)
    with pytest.raises(ValueError, match="does not take"):
        attention(tensor, tensor, tensor, one[None], one + 1, scaling=1.0)


def test_slots_apart_are_refused() -> None:
    case = make_case(1, [20, 20])
    case.key_slots = case.key_slots.T.contiguous().T
    with pytest.raises(ValueError, match="contiguous slots"):
        case.in_kernel()


def test_ends_apart_are_refused() -> None:
    case = make_case(4, [20])
    case.query_ends = torch.arange(34).view(17, 2)[:, 0]
    with pytest.raises(ValueError, match="contiguous slots, counts and ends"):
        case.in_kernel()
