"""Greedy outputs are the reference's: cold, cached, partly cached, chunked, preempted, and among strangers.

Every test ends with one cached block spoiled, and then must see it: a comparison that cannot fail proves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_core import EngineCore, EngineRequest
from tests.simulated_device import SimulatedQueue
from tests.simulated_kernels import simulated_kernels
from tests.tiny_models import TINY_ARCHITECTURES

from .equality import (
    MIN_COMPARED_TOKENS,
    MIN_DISTINCT_TOKENS,
    NotEqualError,
    Reference,
    check_equal,
    corrupt_copied_slots,
    corrupt_last_cached_block,
    first_tokens,
    generate_reference,
    load_reference_model,
    make_engine,
    poison_unowned_slots,
    run_prompts,
)

DATA = Path(__file__).parent.parent / "data" / "model"
BLOCK_SIZE = 16
CHUNK_SIZES = (1, 15, 16, 17, 64)
NUM_CONCURRENT = 8
MAX_MODEL_LEN = 256

GetReferences = Callable[[str], list[Reference]]
GetDirectory = Callable[[str], Path]


@pytest.fixture(scope="session")
def references(model_directory: GetDirectory) -> GetReferences:
    """References for `NUM_CONCURRENT` requests: the chosen prompts, the first ones once more."""
    made: dict[str, list[Reference]] = {}

    def get(name: str) -> list[Reference]:
        if name not in made:
            prompts = json.loads((DATA / f"{name}.json").read_text())["prompts"]
            model = load_reference_model(model_directory(name))
            chosen = [generate_reference(model, prompt) for prompt in prompts]
            assert all(len(set(reference.output_token_ids)) >= MIN_DISTINCT_TOKENS for reference in chosen)
            made[name] = (chosen + chosen)[:NUM_CONCURRENT]
        return made[name]

    return get


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_chunked_and_cached(
    name: str, chunk_size: int, model_directory: GetDirectory, references: GetReferences
) -> None:
    check_chunked_and_cached(model_directory(name), references(name), chunk_size)


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_preempted(name: str, model_directory: GetDirectory, references: GetReferences) -> None:
    check_preempted(model_directory(name), references(name))


@pytest.mark.parametrize("chunk_size", [64, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 15, 16, 17))])
def test_smollm2_chunked_and_cached(chunk_size: int, model_directory: GetDirectory, references: GetReferences) -> None:
    check_chunked_and_cached(model_directory("smollm2"), references("smollm2"), chunk_size)


def test_smollm2_preempted(model_directory: GetDirectory, references: GetReferences) -> None:
    check_preempted(model_directory("smollm2"), references("smollm2"))


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_hits_end_inside_blocks(name: str, model_directory: GetDirectory, references: GetReferences) -> None:
    """Of a request that ended anywhere all that was computed is found: the beginning of its last block is copied."""
    engine = make_engine(model_directory(name))
    poison_unowned_slots(engine)
    longest = max(references(name), key=lambda reference: len(reference.prompt_token_ids))
    reference, prompt = first_tokens(longest, MIN_COMPARED_TOKENS), longest.prompt_token_ids
    for num_tokens in (1, 7, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 5, len(prompt) - 1):
        assert engine.reset_prefix_cache().num_blocks_in_use == 0
        run_prompts(engine, [prompt[:num_tokens]], 1)
        runs = run_prompts(engine, [prompt], MIN_COMPARED_TOKENS)
        check_equal([reference], runs)
        assert runs[0].num_cached_tokens == num_tokens

    corrupt_copied_slots(engine, EngineRequest("probe", prompt))
    with pytest.raises(NotEqualError):
        check_equal([reference], run_prompts(engine, [prompt], MIN_COMPARED_TOKENS))


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_other_block_sizes(block_size: int, model_directory: GetDirectory, references: GetReferences) -> None:
    engine = make_engine(model_directory("llama"), block_size=block_size, num_blocks=1024)
    for _ in range(2):
        check_equal(references("llama"), run_prompts(engine, [r.prompt_token_ids for r in references("llama")]))
    check_sees_corruption(engine, references("llama"))


@pytest.fixture
def queue() -> Iterator[SimulatedQueue]:
    """A device that computes by itself, with captured decodes, and must have been used like that."""
    queue = SimulatedQueue()
    with simulated_kernels():
        yield queue
    assert queue.num_replays > NUM_CONCURRENT


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_chunked_and_cached_on_a_device_with_a_queue(
    name: str, queue: SimulatedQueue, model_directory: GetDirectory, references: GetReferences
) -> None:
    check_chunked_and_cached(model_directory(name), references(name), 16, queue)


def test_preempted_on_a_device_with_a_queue(
    queue: SimulatedQueue, model_directory: GetDirectory, references: GetReferences
) -> None:
    check_preempted(model_directory("llama"), references("llama"), queue)


def check_chunked_and_cached(
    directory: Path, references: list[Reference], chunk_size: int, queue: SimulatedQueue | None = None
) -> None:
    """The step's whole budget is `chunk_size`; all requests are there at once, and run at once where it allows."""
    prompts = [reference.prompt_token_ids for reference in references]
    engine = make_engine(
        directory,
        queue,
        max_num_batched_tokens=chunk_size,
        max_num_seqs=min(NUM_CONCURRENT, chunk_size),
        max_model_len=MAX_MODEL_LEN,
    )
    poison_unowned_slots(engine)

    check_equal(references, run_prompts(engine, prompts))

    cached = run_prompts(engine, prompts)
    check_equal(references, cached)
    assert [run.num_cached_tokens for run in cached] == [expected_hit(len(prompt)) for prompt in prompts]
    assert slot_minus_one_is_untouched(engine)

    check_sees_corruption(engine, references)


def check_preempted(directory: Path, references: list[Reference], queue: SimulatedQueue | None = None) -> None:
    """All requests fit together at first and no longer when they have grown."""
    prompts = [reference.prompt_token_ids for reference in references]
    engine = make_engine(
        directory,
        queue,
        num_blocks=14,
        max_num_batched_tokens=64,
        max_num_seqs=NUM_CONCURRENT,
        reserve_full_sequence=False,
    )
    poison_unowned_slots(engine)

    for _ in range(2):
        before = engine.stats().preemptions
        check_equal(references, run_prompts(engine, prompts))
        assert engine.stats().preemptions > before

    check_sees_corruption(engine, references)


def check_sees_corruption(engine: EngineCore, references: list[Reference]) -> None:
    reference = max(references, key=lambda reference: len(reference.prompt_token_ids))
    check_equal([reference], run_prompts(engine, [reference.prompt_token_ids]))
    corrupt_last_cached_block(engine, EngineRequest("probe", reference.prompt_token_ids))
    with pytest.raises(NotEqualError):
        check_equal([reference], run_prompts(engine, [reference.prompt_token_ids]))


def expected_hit(num_prompt_tokens: int) -> int:
    """All but the last token, whose logits are needed."""
    return num_prompt_tokens - 1


def slot_minus_one_is_untouched(engine: EngineCore) -> bool:
    runner = engine.runner
    caches = runner.pool.tensors  # type: ignore[attr-defined]
    return all(bool(cache[-1].isnan().all()) for cache in caches)
