"""Gemma 3 270M as its wheels hold it: what comes out of the file, and that windows are right in a real model.

Skipped where the wheels are not installed. The converted model is shared with whoever serves it: making it takes half a
minute.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from engine_core import EngineCore, EngineRequest

from .equality import (
    NotEqualError,
    Reference,
    check_equal,
    corrupt_last_cached_block,
    generate_reference,
    greedy,
    load_reference_model,
    make_engine,
    poison_unowned_slots,
    run_prompts,
)

PROMPTS = Path(__file__).parent.parent / "data" / "model" / "gemma3-270m.json"
BLOCK_SIZE, WINDOW = 16, 512
# 15 of the 18 layers see a window.
GROUP_WINDOWS = (*[WINDOW] * 5, None)
# Enough for the shortest prompt to leave its window.
NUM_TOKENS = 16

GetReference = Callable[[int], Reference]


@pytest.fixture(scope="module")
def model(gemma3: Path) -> transformers.PreTrainedModel:
    return load_reference_model(gemma3)


@pytest.fixture(scope="module")
def reference(model: transformers.PreTrainedModel) -> GetReference:
    """Number of a prompt → its reference."""
    prompts = json.loads(PROMPTS.read_text())["prompts"]
    return functools.cache(lambda number: generate_reference(model, prompts[number], NUM_TOKENS))


@pytest.fixture(scope="module")
def references(reference: GetReference) -> list[Reference]:
    """Of the shortest prompt and of one that is more than twice as long as the window."""
    return [reference(0), reference(2)]


@pytest.fixture(scope="module")
def all_references(reference: GetReference) -> list[Reference]:
    return [reference(number) for number in range(4)]


@pytest.fixture(scope="module")
def tokenizer(gemma3: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(gemma3, local_files_only=True)


def test_its_settings_are_the_published_ones(gemma3: Path) -> None:
    config = json.loads((gemma3 / "config.json").read_text())
    sliding = ["sliding_attention"] * 5
    expected = {
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": WINDOW,
        "layer_types": [*sliding, "full_attention"] * 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "max_position_embeddings": 32768,
        "vocab_size": 262144,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    assert {name: config[name] for name in expected} == expected
    assert config["rms_norm_eps"] == pytest.approx(1e-6, rel=1e-6)
    generation = json.loads((gemma3 / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (2, [1])


def test_one_bos_is_put_before_a_text(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    assert tokenizer("").input_ids == [2]
    assert tokenizer("Hello world").input_ids == [2, 9259, 1902]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == ("<bos>", "<eos>", None)


@pytest.mark.parametrize(
    "pieces",
    [
        ["\n\n", "New", "\t", "line", "\t\t", "x"],
        ["<html>", "<body>", "hi", "</body>"],
        ["a", "   ", "b"],
        ["<start_of_turn>", "user", "\n", "hi", "<end_of_turn>"],
        ["1", "2", "3"],
    ],
)
def test_pieces_of_its_own_stay_whole(tokenizer: transformers.PreTrainedTokenizerFast, pieces: list[str]) -> None:
    """As llama.cpp cuts these texts with the same file."""
    assert [tokenizer.decode([token]) for token in tokenizer("".join(pieces)).input_ids[1:]] == pieces


def test_text_survives_the_round_trip(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    text = "Zwölf Boxkämpfer 👩‍👩‍👧 jagen 12 Viktor; 日本語\n\n\tdef f(x): return x**2\r\n  ½ \U0010ffff"
    assert tokenizer.decode(tokenizer(text).input_ids[1:]) == text


def test_it_foretells_a_text(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerFast
) -> None:
    """The one check that sees weights read into the wrong places. (Over contexts of 1,024 tokens, of which the second
    halves count, perplexity is 22.3; llama.cpp says 22.5 of the same file.)
    """
    text = (PROMPTS.parents[1] / "text" / "engineers_thumb.txt").read_text()
    token_ids = torch.tensor([tokenizer(text).input_ids[:512]])
    with torch.inference_mode():
        loss = model(token_ids, labels=token_ids).loss
    assert loss.exp() < 40


def test_cold_and_cached(gemma3: Path, references: list[Reference]) -> None:
    check_cold_and_cached(gemma3, references, 256)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [17, 256, 4096])
def test_all_prompts_cold_and_cached(gemma3: Path, all_references: list[Reference], chunk_size: int) -> None:
    check_cold_and_cached(gemma3, all_references, chunk_size)


def check_cold_and_cached(gemma3: Path, references: list[Reference], chunk_size: int) -> None:
    engine = poisoned_engine(gemma3, max_num_batched_tokens=chunk_size, max_num_seqs=len(references))
    assert engine.runner.info.windows == GROUP_WINDOWS
    run(engine, references)
    assert run(engine, references) == [len(reference.prompt_token_ids) - 1 for reference in references]

    longest = max(references, key=lambda reference: len(reference.prompt_token_ids))
    request = EngineRequest("probe", longest.prompt_token_ids)
    corrupt_last_cached_block(engine, request)
    with pytest.raises(NotEqualError):
        run(engine, [longest])


@pytest.mark.slow
def test_preempted(gemma3: Path, all_references: list[Reference]) -> None:
    settings = {"num_blocks": 480, "reserve_full_sequence": False, "max_num_batched_tokens": 256}
    engine = poisoned_engine(gemma3, **settings)
    for _ in range(2):
        before = engine.stats().preemptions
        run(engine, all_references)
        assert engine.stats().preemptions > before


def test_beyond_the_window_memory_stays_flat(gemma3: Path) -> None:
    chunk_size, num_tokens = 100, 100
    settings = {"dtype": "bfloat16", "block_size": BLOCK_SIZE, "num_blocks": 400, "max_model_len": 2048}
    engine = make_engine(gemma3, max_num_batched_tokens=chunk_size, **settings)
    prompt = max(json.loads(PROMPTS.read_text())["prompts"], key=len)
    engine.add_request(EngineRequest("r", prompt, greedy(num_tokens)))
    tables = engine._scheduler.kv.tables
    most_held = [0] * len(GROUP_WINDOWS)
    while engine.has_unfinished_requests():
        engine.step()
        for table in tables.values():
            held = [sum(block is not None for block in blocks) for blocks in table.blocks]
            most_held = list(map(max, most_held, held))
    # The last token has no slot. A window and a chunk begin and end anywhere in a block.
    assert most_held[-1] == -(-(len(prompt) + num_tokens - 1) // BLOCK_SIZE)
    assert max(most_held[:-1]) <= (WINDOW + chunk_size) // BLOCK_SIZE + 2 < most_held[-1] / 2


def poisoned_engine(directory: Path, **settings: object) -> EngineCore:
    """Before every step, free blocks in which nothing is cached are filled with NaN."""
    engine = make_engine(
        directory, **({"block_size": BLOCK_SIZE, "num_blocks": 1200, "max_model_len": 2048} | settings)
    )
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
