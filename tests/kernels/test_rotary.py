"""Rotary embedding in Triton's interpreter and in torch, beside what transformers' models do themselves."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import pytest
import torch

from kernels.dispatch import computed_by
from kernels.rotary import rotary
from tests.kernels.interpreted import DTYPES, UNIT, fresh, poisoned, strided


@dataclass(frozen=True)
class Family:
    """How a model of transformers spells angles, and what it does with them."""

    model: str
    turned: float = 1.0
    interleaved: bool = False
    angles_twice: str | None = "one after the other"
    angles_dtype: torch.dtype | None = None

    def spell(self, angles: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, num_pairs]` as the model's rotary embedding returns them."""
        if self.angles_twice is None:
            return angles
        if self.angles_twice == "side by side":
            return angles.repeat_interleave(2, dim=-1)
        return torch.cat((angles, angles), dim=-1)

    def cut(self, spelled: torch.Tensor) -> torch.Tensor:
        """One column for each pair, as `rotary` wants them: a view."""
        if self.angles_twice is None:
            return spelled
        return spelled[:, ::2] if self.angles_twice == "side by side" else spelled[:, : spelled.shape[1] // 2]


FAMILIES = {
    "llama": Family("llama"),
    "gpt_neox": Family("gpt_neox", turned=0.25),
    "glm": Family("glm", turned=0.5, interleaved=True),
    "cohere": Family("cohere", interleaved=True, angles_twice="side by side", angles_dtype=torch.float32),
    "gpt_oss": Family("gpt_oss", angles_twice=None),
    "olmo2": Family("olmo2", angles_dtype=torch.float32),
}


@dataclass
class Case:
    query: torch.Tensor
    key: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, family: Family, num_tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> Case:
        num_pairs = int(head_dim * family.turned) // 2
        angles = fresh(num_tokens, num_pairs, scale=100)
        angles_dtype = family.angles_dtype or dtype
        return cls(
            query=fresh(num_tokens, heads[0], head_dim, dtype=dtype),
            key=fresh(num_tokens, heads[1], head_dim, dtype=dtype),
            cos=family.spell(angles.cos().to(angles_dtype)),
            sin=family.spell(angles.sin().to(angles_dtype)),
        )

    def by_transformers(self, family: Family) -> tuple[torch.Tensor, torch.Tensor]:
        module = importlib.import_module(f"transformers.models.{family.model}.modeling_{family.model}")
        rotated = module.apply_rotary_pos_emb(
            self.query.transpose(0, 1)[None], self.key.transpose(0, 1)[None], self.cos[None], self.sin[None]
        )
        return tuple(x[0].transpose(0, 1) for x in rotated)

    def by_us(self, family: Family, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = family.cut(self.cos), family.cut(self.sin)
        return rotary(self.query, self.key, cos, sin, interleaved=family.interleaved, **options)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, source: torch.Tensor) -> None:
    """Bit for bit, except that the interpreter truncates bfloat16: two products and their sum, not rounded."""
    assert actual.dtype == expected.dtype == source.dtype
    if source.dtype != torch.bfloat16:
        assert torch.equal(actual, expected)
        return
    # No value is longer than the largest pair in its head.
    longest = source.float().abs().amax(dim=-1, keepdim=True) * 2**0.5
    assert ((actual.float() - expected.float()).abs() <= 4 * UNIT[torch.bfloat16] * longest).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_rotates_as_transformers_does(backend: str, family: Family, dtype: torch.dtype) -> None:
    case = Case.of(family, 3, (6, 2), 32, dtype)
    with computed_by(backend):
        actual = case.by_us(family)
    for rotated, expected, x in zip(actual, case.by_transformers(family), (case.query, case.key), strict=True):
        if backend == "torch":
            assert torch.equal(rotated, expected)
        assert_same(rotated, expected, x)


@pytest.mark.parametrize("family", [FAMILIES["llama"], FAMILIES["glm"]], ids=["whole", "partial interleaved"])
@pytest.mark.parametrize(
    ("num_tokens", "heads", "head_dim"),
    [(1, (1, 1), 2), (1, (3, 1), 80), (2, (8, 8), 96), (5, (24, 3), 12), (1, (130, 66), 256), (0, (4, 2), 16)],
    ids=str,
)
def test_any_heads(family: Family, num_tokens: int, heads: tuple[int, int], head_dim: int) -> None:
    case = Case.of(family, num_tokens, heads, head_dim, torch.float32)
    with computed_by("triton"):
        actual = case.by_us(family)
    for rotated, expected, x in zip(actual, case.by_transformers(family), (case.query, case.key), strict=True):
        assert rotated.shape == x.shape
        assert_same(rotated, expected, x)


@pytest.mark.parametrize("in_place", [False, True], ids=["into new tensors", "in place"])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_tensors_that_are_parts_of_others(backend: str, in_place: bool) -> None:
    """As a merged projection makes them, and with heads before tokens. What lies between is not touched."""
    family = FAMILIES["gpt_neox"]
    case = Case.of(family, 5, (4, 2), 32, torch.float32)
    expected = case.by_transformers(family)
    merged = torch.cat((case.query, fresh(5, 1, 32), case.key), dim=1)
    heads_first = poisoned(3, 5, 40)
    case.query, case.key = merged[:, :4], heads_first.transpose(0, 1)[:, :2, 4:36]
    case.key.copy_(merged[:, 5:])
    case.cos, case.sin = strided(case.cos), strided(case.sin)
    before = merged.clone(), heads_first.clone()
    with computed_by(backend):
        actual = case.by_us(family, in_place=in_place)
    assert all(torch.equal(rotated, wanted) for rotated, wanted in zip(actual, expected, strict=True))
    if in_place:
        assert actual[0] is case.query and actual[1] is case.key
        before[0][:, :4], before[1].transpose(0, 1)[:, :2, 4:36] = expected
    for now, then in zip((merged, heads_first), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_values_of_a_head_that_lie_apart(backend: str) -> None:
    family = FAMILIES["llama"]
    case = Case.of(family, 2, (2, 1), 16, torch.float32)
    expected = case.by_transformers(family)
    case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    with computed_by(backend):
        assert torch.equal(case.by_us(family)[0], expected[0])
        with pytest.raises(ValueError, match="in_place"):
            case.by_us(family, in_place=True)
