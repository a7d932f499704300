"""Greedy outputs of prompts with pictures are the reference's: cold, cached, partly cached, chunked, and preempted.

Always in company. As with texts, every check can fail: with a spoiled block, and with rows in each other's place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine_core import EngineCore, InvalidRequestError, SamplingParams
from engine_core.model.picture_encoder import EncodedRows
from ipc.vocabulary import MultimodalFeature
from tests.tiny_vlm_processors import FAMILIES

from .equality import (
    MIN_COMPARED_TOKENS,
    MIN_DISTINCT_TOKENS,
    NUM_OUTPUT_TOKENS,
    EngineRun,
    NotEqualError,
    check_equal,
    corrupt_last_cached_block,
    first_tokens,
    generate_reference_from,
    greedy,
    load_reference_model,
    make_engine,
    num_alike,
    poison_unowned_slots,
    run_requests,
)
from .picture_prompts import NUMBERS_FILE, PicturePrompt, PromptMaker

GetDirectory = Callable[[str], Path]
# Smaller than any picture but Gemma 3's, so that block borders are inside of pictures everywhere.
BLOCK_SIZE = 4
NUMBERS = json.loads(NUMBERS_FILE.read_text())


class Family:
    """A family's prompts by kind, with what transformers makes of them."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.directory = name, directory
        maker, model = PromptMaker(name, directory), load_reference_model(directory)
        self.prompts = {kind: maker.make(kind, NUMBERS[name][kind]) for kind in maker.kinds}
        self.references = {
            kind: generate_reference_from(model, prompt.reference_inputs) for kind, prompt in self.prompts.items()
        }
        for reference in self.references.values():
            assert len(set(reference.output_token_ids)) >= MIN_DISTINCT_TOKENS

    def engine(self, **settings: object) -> EngineCore:
        engine = make_engine(self.directory, **({"block_size": BLOCK_SIZE, "num_blocks": 512} | settings))
        poison_unowned_slots(engine)
        return engine

    def run(self, engine: EngineCore, *kinds: str, num_tokens: int = NUM_OUTPUT_TOKENS) -> list[EngineRun]:
        """All prompts, or those of `kinds`, handed to the engine at once, and compared with the reference."""
        kinds = kinds or tuple(self.prompts)
        prompts = [self.prompts[kind] for kind in kinds]
        runs = run_requests(
            engine, [(prompt.request(str(i), greedy(num_tokens)), prompt.inputs) for i, prompt in enumerate(prompts)]
        )
        check_equal([first_tokens(self.references[kind], num_tokens) for kind in kinds], runs)
        return runs


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, vlm_directory: GetDirectory) -> Family:
    return Family(request.param, vlm_directory(request.param))


def test_all_at_once_then_cached(family: Family) -> None:
    """The second time nothing is encoded but what the last token of a prompt needs."""
    engine = family.engine()
    with encoded_keys(engine) as keys:
        family.run(engine)
        assert sorted(keys) == sorted({feature.key for p in family.prompts.values() for feature in p.features})
        keys.clear()
        for run, prompt in zip(family.run(engine), family.prompts.values(), strict=True):
            assert run.num_cached_tokens == expected_hit(len(prompt.token_ids))
        assert not keys
    check_sees_corruption(family, engine)


def test_chunks_end_inside_pictures(family: Family) -> None:
    """Unless its tokens see each other."""
    engine = family.engine(max_num_batched_tokens=16, max_num_seqs=5)
    for _ in range(2):
        family.run(engine)


def test_hits_end_inside_pictures(family: Family) -> None:
    """Wherever the cache has lost what followed, the rest is computed; the picture comes from the encoder cache or is
    encoded once more.
    """
    engine = family.engine()
    for kind in ("one", "first and last", "touching"):
        if kind not in family.prompts:
            continue
        prompt = family.prompts[kind]
        family.run(engine, kind, num_tokens=MIN_COMPARED_TOKENS)
        for feature in prompt.features:
            for num_blocks in {feature.start // BLOCK_SIZE + 1, (feature.end - 1) // BLOCK_SIZE}:
                forget_cached(engine, prompt, num_blocks)
                (run,) = family.run(engine, kind, num_tokens=MIN_COMPARED_TOKENS)
                assert run.num_cached_tokens == num_blocks * BLOCK_SIZE


def test_hits_end_anywhere_inside_pictures(family: Family) -> None:
    """A request that was broken off leaves what it had computed, be it in the middle of a picture and of a block."""
    engine = family.engine(max_num_batched_tokens=17, max_num_seqs=5)
    prompt = family.prompts["first and last"]
    inside = 0
    for num_steps in range(1, (len(prompt.token_ids) - 1) // 17 + 1):
        assert engine.reset_prefix_cache().num_blocks_in_use == 0
        engine.add_request(prompt.request("broken off", greedy()), prompt.inputs)
        for _ in range(num_steps):
            assert not engine.step().outputs
        num_computed = engine._scheduler.kv.tables["broken off"].request.num_computed_tokens
        inside += any(feature.start < num_computed < feature.end for feature in prompt.features)
        engine.abort_requests(["broken off"])
        (run,) = family.run(engine, "first and last", num_tokens=MIN_COMPARED_TOKENS)
        assert run.num_cached_tokens == num_computed
    assert inside > 0 or family.name == "gemma3"  # whose pictures are computed whole


def test_another_picture_shares_nothing_behind_its_first_token(family: Family) -> None:
    engine = family.engine()
    family.run(engine, "one")
    (changed,) = family.run(engine, "one spot changed")
    feature = family.prompts["one"].features[0]
    assert changed.num_cached_tokens == feature.start
    (again,) = family.run(engine, "another question")
    one, another = (family.prompts[kind].token_ids for kind in ("one", "another question"))
    assert feature.end <= again.num_cached_tokens == num_alike(one, another)


def test_preempted_and_resumed(family: Family) -> None:
    """Everything fits at first and no longer when it has grown; outputs of the encoder do not stay long, either."""
    longest = max(len(prompt.token_ids) for prompt in family.prompts.values())
    total = sum(len(prompt.token_ids) for prompt in family.prompts.values())
    num_blocks = max(longest + 40, total + 16) // BLOCK_SIZE
    embed_bytes = family.engine().runner.info.multimodal.embed_bytes
    rows = max(feature.num_embeds for p in family.prompts.values() for feature in p.features)
    engine = family.engine(
        num_blocks=num_blocks, reserve_full_sequence=False, encoder_cache_bytes=2 * rows * embed_bytes
    )
    family.run(engine)
    assert engine.stats().preemptions > 0


def test_rows_in_each_others_place_are_seen(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = family.engine()
    encode = engine.runner.encode

    def swapped(feature: MultimodalFeature, inputs: dict[str, np.ndarray]) -> EncodedRows:
        encoded = encode(feature, inputs)
        return EncodedRows(encoded.rows.flip(0), encoded.deepstack)

    monkeypatch.setattr(engine._features, "_encode", swapped)
    with pytest.raises(NotEqualError):
        family.run(engine, "one")


def test_continuations_of_one_prompt(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share its pictures and its positions. Greedily, both say what one would say."""
    engine = family.engine()
    worked_out = []
    if (positions := engine.runner._pictures.positions) is not None:
        table = positions._table
        monkeypatch.setattr(positions, "_table", lambda features: worked_out.append(features) or table(features))
    prompt, params = (
        family.prompts["first and last"],
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, n=2),
    )
    engine.add_request(prompt.request("two", params), prompt.inputs)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            assert output.error is None
            tokens[output.index] += output.new_token_ids
    assert tokens[0] == tokens[1] == family.references["first and last"].output_token_ids[:8]
    assert len(worked_out) == (positions is not None)


def test_inputs_that_are_not_the_pictures_end_that_request_alone(vlm_directory: GetDirectory) -> None:
    family = Family("qwen2_vl", vlm_directory("qwen2_vl"))
    engine = family.engine()
    good, bad = family.prompts["text"], family.prompts["one"]
    key = bad.features[0].key
    engine.add_request(bad.request("bad", greedy()), {key: bad.inputs[key] | {"pixel_values": np.zeros((3, 3))}})
    engine.add_request(good.request("good", greedy()))
    ends: dict[str, Any] = {}
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            tokens += output.new_token_ids
            if output.finish_reason is not None:
                ends[output.request_id] = output.error
    assert ends["good"] is None and tokens == family.references["text"].output_token_ids
    assert (
        ends["bad"].code == "invalid" and "the vision tower cannot compute pixel_values (3, 3)" in ends["bad"].message
    )
    family.run(engine)


def test_a_layout_that_is_not_the_pictures_is_refused(vlm_directory: GetDirectory) -> None:
    family = Family("qwen2_vl", vlm_directory("qwen2_vl"))
    prompt = family.prompts["one"]
    request = prompt.request("r", greedy())
    (feature,) = prompt.features
    for layout in ({}, {"image_grid_thw": (1, 2, 2)}):
        wrong = msgspec.structs.replace(request, mm_features=(msgspec.structs.replace(feature, layout=layout),))
        with pytest.raises(InvalidRequestError, match="image_grid_thw"):
            family.engine().add_request(wrong)


@contextmanager
def encoded_keys(engine: EngineCore) -> Iterator[list[bytes]]:
    """Keys of the features encoded within it."""
    keys: list[bytes] = []
    features: Any = engine._features
    encode = features._encode

    def counted(feature: MultimodalFeature, inputs: dict[str, np.ndarray], adapter_slot: int | None) -> Any:
        keys.append(feature.key)
        return encode(feature, inputs, adapter_slot)

    features._encode = counted
    try:
        yield keys
    finally:
        features._encode = encode


def forget_cached(engine: EngineCore, prompt: PicturePrompt, num_blocks: int) -> None:
    """Of a cached prompt only the first `num_blocks` stay, as if all others had been evicted."""
    pool, probe = engine._scheduler.kv.pool, engine.prepare_request(prompt.request("probe", greedy()))
    kept = pool.tree.walk(probe.block_hashes, probe.block_contents)[:num_blocks]
    pool.unregister([block for block in pool.blocks if block.node not in kept])


def check_sees_corruption(family: Family, engine: EngineCore) -> None:
    corrupt_last_cached_block(engine, family.prompts["twice"].request("probe", greedy()))
    with pytest.raises(NotEqualError):
        family.run(engine, "twice")


def expected_hit(num_prompt_tokens: int) -> int:
    """All but the last token, whose logits are needed."""
    return num_prompt_tokens - 1
