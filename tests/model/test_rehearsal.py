"""The heaviest step is computed before anybody asks for it, and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_core import EngineConfig, InvalidConfigError
from engine_core.model import runner as runner_module
from engine_core.model.rehearsal import heaviest_step
from engine_core.model.runner import ModelRunner
from tests.tiny_models import make_tiny_model


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "expected"),
    [
        (4, 100, 4096, [97, 1, 1, 1]),
        (1, 100, 4096, [100]),
        (4, 100, 50, [50, 1, 1, 1]),
        (200, 3, 4096, [1, 1, 1]),
    ],
)
def test_it_fills_the_budget_at_the_end_of_the_longest_context(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, expected: list[int]
) -> None:
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    step = heaviest_step(config, max_model_len, num_groups=2)
    assert [item.num_tokens for item in step] == expected
    assert all(item.start + item.num_tokens == max_model_len and item.samples for item in step)
    num_blocks = -(-max_model_len // config.block_size)
    assert all([len(table) for table in item.block_tables] == [num_blocks] * 2 for item in step)


def make_runner(architecture: str, directory: Path) -> tuple[ModelRunner, EngineConfig]:
    make_tiny_model(architecture, directory)
    config = EngineConfig(
        model=str(directory), dtype="float32", device="cpu", num_blocks=4, max_num_seqs=3, max_num_batched_tokens=40
    )
    return ModelRunner(config), config


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_it_runs_the_whole_way_and_touches_no_block_of_the_pool(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, config = make_runner(architecture, tmp_path)
    for cache in runner.pool.tensors:
        cache.fill_(7.0)
    sampled_from = []

    def watch(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
        sampled_from.append(logits)
        return original(logits, *arguments)

    original = runner_module.sample
    monkeypatch.setattr(runner_module, "sample", watch)
    runner._rehearse(config, 600)

    (logits,) = sampled_from
    assert logits.shape == (3, 512) and logits.isfinite().all()
    for cache in runner.pool.tensors:
        assert cache.unique().tolist() == [7.0]


def test_a_step_that_does_not_fit_is_refused_with_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, config = make_runner("llama", tmp_path)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 70.00 GiB")

    monkeypatch.setattr(runner, "_rehearse", fail)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    with pytest.raises(InvalidConfigError, match=r"max_num_batched_tokens=40, max_num_seqs=3 and max_model_len=600"):
        runner._measure_step(config, 600)
