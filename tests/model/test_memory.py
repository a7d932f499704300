"""How many KV blocks a GPU is given, beside what else needs its memory. No GPU is needed to count."""

from __future__ import annotations

import pytest
import torch

from engine_core.config import EngineConfig
from engine_core.encoder_cache import encoder_cache_bytes
from engine_core.errors import InvalidConfigError
from engine_core.model.memory import choose_num_blocks

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def gpu_of_1000_bytes_of_which_100_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900, 1000))


def blocks(reserved_bytes: int, *, num_groups: int = 1, num_blocks: int | None = None) -> int:
    config = EngineConfig(gpu_memory_utilization=0.9, num_blocks=num_blocks)
    return choose_num_blocks(config, block_bytes=10, num_groups=num_groups, device=GPU, reserved_bytes=reserved_bytes)


def test_the_kv_pool_gets_what_the_step_and_the_encoder_cache_leave() -> None:
    assert (blocks(0), blocks(300)) == (80, 50)


def test_what_leaves_no_room_is_said_with_the_numbers() -> None:
    with pytest.raises(InvalidConfigError, match=r"100 of them in use and 800 needed by a step .* encoder cache"):
        blocks(800)


def test_there_must_be_a_block_of_each_group() -> None:
    assert (blocks(750, num_groups=5), blocks(0, num_groups=5, num_blocks=5)) == (5, 5)
    with pytest.raises(InvalidConfigError, match=r"needs 10 bytes, and there must be one of each of the 6 KV cache"):
        blocks(750, num_groups=6)
    with pytest.raises(InvalidConfigError, match=r"num_blocks: .* each of the model's 6 KV cache groups, .* have 5"):
        blocks(0, num_groups=6, num_blocks=5)


def test_the_encoder_cache_holds_a_good_many_rows_and_those_of_any_step() -> None:
    assert encoder_cache_bytes(EngineConfig(max_num_batched_tokens=512), 10) == 163_840
    assert encoder_cache_bytes(EngineConfig(max_num_batched_tokens=20_000), 10) == 200_000
    assert encoder_cache_bytes(EngineConfig(encoder_cache_bytes=7), 10) == 7
