"""A Gemma 3 whose layers see a window or everything, far past its window: outputs are the reference's, and what no
token sees any more is given back.

Free blocks in which nothing is cached are filled with NaN before every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_core import EngineCore, EngineRequest, SamplingParams
from engine_core.kv_cache.prefix_tree import PrefixNode
from engine_core.model.runner import ModelRunner
from tests.simulated_device import SimulatedQueue
from tests.simulated_kernels import simulated_kernels
from tests.tiny_models import make_tiny_model

from .equality import (
    NotEqualError,
    Reference,
    check_equal,
    generate_reference,
    greedy,
    load_reference_model,
    make_engine,
    poison_unowned_slots,
    run_prompts,
)

BLOCK_SIZE, WINDOW, NUM_TOKENS = 16, 24, 48
# Three groups of sliding layers and one of full ones, of two layers each.
LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"] * 2
GROUP_WINDOWS = (WINDOW, WINDOW, WINDOW, None)
# Length and seed of prompts whose references are never undecided. Those of one seed begin alike.
PROMPTS = [(100, 2), (150, 2), (37, 1), (75, 1)]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    return make_tiny_model("gemma3_text", directory, num_hidden_layers=len(LAYERS), layer_types=LAYERS)


@pytest.fixture(scope="module")
def references(hybrid: Path) -> list[Reference]:
    model = load_reference_model(hybrid)
    return [generate_reference(model, prompt_of(*chosen), NUM_TOKENS) for chosen in PROMPTS]


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 512) for _ in range(length)]


def poisoning_engine(directory: Path, queue: SimulatedQueue | None = None, **settings: object) -> EngineCore:
    engine = make_engine(directory, queue, block_size=BLOCK_SIZE, **settings)
    step = engine.step

    def poisoned_step() -> object:
        poison_unowned_slots(engine)
        return step()

    engine.step = poisoned_step  # type: ignore[assignment,method-assign]
    return engine


def run(engine: EngineCore, references: list[Reference]) -> list[int]:
    """Compare all prompts at once; how many tokens of each were cached."""
    runs = run_prompts(engine, [reference.prompt_token_ids for reference in references], NUM_TOKENS)
    check_equal(references, runs)
    return [each.num_cached_tokens for each in runs]


@pytest.mark.parametrize("chunk_size", [5, 64, 2048])
def test_cold_and_cached(hybrid: Path, references: list[Reference], chunk_size: int) -> None:
    engine = poisoning_engine(hybrid, max_num_batched_tokens=chunk_size, max_num_seqs=4)
    assert engine.runner.info.windows == GROUP_WINDOWS
    run(engine, references)
    for _ in range(2):
        assert run(engine, references) == [len(reference.prompt_token_ids) - 1 for reference in references]


def test_without_a_cache_all_that_is_out_of_a_window_is_poisoned(hybrid: Path, references: list[Reference]) -> None:
    run(poisoning_engine(hybrid, enable_prefix_caching=False, max_num_batched_tokens=64), references)


def test_preempted(hybrid: Path, references: list[Reference]) -> None:
    engine = poisoning_engine(hybrid, num_blocks=44, reserve_full_sequence=False, max_num_batched_tokens=64)
    for _ in range(2):
        before = engine.stats().preemptions
        run(engine, references)
        assert engine.stats().preemptions > before


def test_on_a_device_with_a_queue(hybrid: Path, references: list[Reference]) -> None:
    queue = SimulatedQueue()
    shortest = sorted(references, key=lambda reference: len(reference.prompt_token_ids))[:2]
    with simulated_kernels():
        # A graph is captured for every number of requests, and computes over every length there may be.
        settings = {"max_num_seqs": len(shortest), "max_model_len": 128, "max_num_batched_tokens": 64}
        engine = poisoning_engine(hybrid, queue, **settings)
        for _ in range(2):
            run(engine, shortest)
    assert queue.num_replays > NUM_TOKENS


def test_continuations_and_next_turns(hybrid: Path, references: list[Reference]) -> None:
    """A hit goes on into what was generated, in every group, and its continuations share it."""
    engine = poisoning_engine(hybrid)
    reference = references[0]
    run(engine, [reference])
    num_turn = len(reference.prompt_token_ids) + 20
    turn = [*reference.prompt_token_ids, *reference.output_token_ids][:num_turn]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS - 20, ignore_eos=True, n=3)
    engine.add_request(EngineRequest("turn", turn, params))
    outputs: list[list[int]] = [[], [], []]
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            assert output.error is None, output.error
            assert output.num_cached_tokens == num_turn - 1
            outputs[output.index] += output.new_token_ids
    assert outputs == [reference.output_token_ids[20:]] * 3


def test_one_group_for_everything(hybrid: Path, references: list[Reference]) -> None:
    engine = poisoning_engine(hybrid, disable_hybrid_kv_cache_manager=True)
    assert engine.runner.info.windows == (None,)
    for _ in range(2):
        run(engine, references)


@pytest.mark.parametrize("is_seen", [False, True])
def test_a_hit_needs_of_a_window_only_its_end(hybrid: Path, references: list[Reference], is_seen: bool) -> None:
    engine = poisoning_engine(hybrid)
    reference = max(references, key=lambda each: len(each.prompt_token_ids))
    run(engine, [reference])
    first_seen = (len(reference.prompt_token_ids) - WINDOW) // BLOCK_SIZE
    nodes = cached_nodes(engine, reference.prompt_token_ids)
    for node in nodes[first_seen:] if is_seen else nodes[:first_seen]:
        block = node.block(0)
        assert block is not None
        spoil(engine, block.block_id)
    if is_seen:
        with pytest.raises(NotEqualError):
            run(engine, [reference])
    else:
        assert run(engine, [reference]) == [len(reference.prompt_token_ids) - 1]


def cached_nodes(engine: EngineCore, prompt: list[int]) -> list[PrefixNode]:
    request = engine.prepare_request(EngineRequest("probe", prompt))
    return engine._scheduler.kv.pool.tree.walk(request.block_hashes, request.block_contents)


def spoil(engine: EngineCore, block_id: int) -> None:
    assert isinstance(engine.runner, ModelRunner)
    for tensor in engine.runner.pool.tensors:
        tensor[block_id] *= -1


@pytest.mark.parametrize(
    ("architecture", "settings", "most_blocks"),
    [
        # Of each group with a window, what a step of a block sees; of the full one, everything.
        ("gemma3_text", {"layer_types": LAYERS, "num_hidden_layers": len(LAYERS)}, lambda n: 3 * 4 + -(-n // 16)),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 4}, lambda n: 4),
        ("mistral", {}, lambda n: 4),
    ],
    ids=["hybrid", "gemma3, all sliding", "mistral"],
)
def test_beyond_the_window_memory_stays_flat(
    architecture: str, settings: dict[str, object], most_blocks: Callable[[int], int], tmp_path: Path
) -> None:
    make_tiny_model(architecture, tmp_path, **settings)
    engine = make_engine(tmp_path, block_size=BLOCK_SIZE, max_num_batched_tokens=BLOCK_SIZE, max_num_seqs=1)
    pool = engine._scheduler.kv.pool
    for num_tokens in blocks_over_time(engine):
        assert len(pool.blocks) - pool.num_free_blocks <= most_blocks(num_tokens)
    assert pool.num_free_blocks == len(pool.blocks)


def blocks_over_time(engine: EngineCore) -> Iterator[int]:
    """The length of a request, a prompt of 120 tokens in chunks and then 200 more, after each of its steps."""
    prompt = prompt_of(120, 0)
    engine.add_request(EngineRequest("r", prompt, greedy(200)))
    num_tokens = len(prompt)
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            num_tokens += len(output.new_token_ids)
        if engine.has_unfinished_requests():
            yield num_tokens
