"""Pictures under LoRA adapters: those that change the encoder have outputs of their own, others share the model's."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_core import EngineConfig, EngineCore, EngineRequest, SamplingParams
from engine_core.runner import MultimodalInfo
from tests.checking_runner import CheckingRunner, expected_output
from tests.engine_core.test_engine import assert_idle
from tests.fake_adapters import write_fake_adapter
from tests.feature_prompts import EMBED_BYTES, content_of, inputs_by_key, inputs_of, mm_spans, prompt_of

B = 4
VOCAB = 1000
CAT = 6


class Pictures:
    """An engine with the adapters `text` and `eye`, of which the second changes what is made of pictures, and `eye2`,
    which has the same weights.
    """

    def __init__(self, directory: Path, num_slots: int = 3, **settings) -> None:
        self.runner = CheckingRunner(
            400, B, vocab_size=VOCAB, multimodal=MultimodalInfo(EMBED_BYTES), num_adapter_slots=num_slots
        )
        config = EngineConfig(**{"block_size": B, "enable_lora": True} | settings)
        self.engine = EngineCore(config, self.runner)
        for name, weights in (("text", "text"), ("eye", "eye"), ("eye2", "eye")):
            path = write_fake_adapter(directory / name, weights, targets_encoder=weights == "eye")
            self.engine.load_adapter(name, path)
        self.num_asked = 0

    def add(self, adapter: str, head: list[int], *, at_hand: bool = True, max_tokens: int = 3) -> str:
        self.num_asked += 1
        token_ids, self.features = prompt_of([head, CAT, [50, 51]])
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        spans, features = mm_spans(self.features), tuple(self.features)
        request = EngineRequest(f"r{self.num_asked}", token_ids, params, spans, mm_features=features, adapter=adapter)
        self.prompt = token_ids
        self.engine.add_request(request, inputs_by_key(self.features) if at_hand else None)
        return request.request_id

    def ask(self, adapter: str, head: list[int]) -> int:
        """How often the encoder ran for it; the answer is right."""
        before, tokens = len(self.runner.encoded), []
        self.add(adapter, head)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step().outputs:
                assert output.error is None
                tokens += output.new_token_ids
        weights = {"": None, "eye2": "eye"}.get(adapter, adapter)
        assert tokens == expected_output(self.prompt, 3, VOCAB, weights)
        assert_idle(self.engine)
        return len(self.runner.encoded) - before


def test_an_adapter_that_changes_the_encoder_has_outputs_of_its_own(tmp_path: Path):
    pictures = Pictures(tmp_path)
    # Different heads, so that the prefix cache has nothing.
    assert [pictures.ask(name, [10 + index]) for index, name in enumerate(["", "text", "eye", "eye2"])] == [1, 0, 1, 0]
    assert [pictures.ask(name, [20 + index]) for index, name in enumerate(["", "text", "eye", "eye2"])] == [0, 0, 0, 0]


def test_outputs_of_other_weights_of_the_same_name_are_not_found(tmp_path: Path):
    pictures = Pictures(tmp_path)
    assert pictures.ask("eye", [10]) == 1
    pictures.engine.load_adapter("eye", write_fake_adapter(tmp_path / "new", "w", targets_encoder=True), replaces=True)
    pictures.add("eye", [11])
    while pictures.engine.has_unfinished_requests():
        pictures.engine.step()
    assert pictures.runner.encoded == [CAT, CAT]


@pytest.mark.parametrize("cache_rows", [7, 1000])
def test_both_are_encoded_from_one_supply(tmp_path: Path, cache_rows: int):
    """The inputs are asked for once, whichever adapters want them."""
    pictures = Pictures(tmp_path, encoder_cache_bytes=cache_rows * EMBED_BYTES)
    for index, name in enumerate(["", "eye", "text"]):
        pictures.add(name, [10 + index], at_hand=False)
    wanted = 0
    while pictures.engine.has_unfinished_requests():
        for item in pictures.engine.take_wanted():
            wanted += 1
            pictures.engine.supply_feature(item.request_id, item.key, inputs_of(pictures.features[0]))
        for output in pictures.engine.step().outputs:
            assert output.error is None
    assert wanted <= (1 if cache_rows == 1000 else 3)
    assert {content_of(pictures.features[0])} == set(pictures.runner.encoded)
    assert len(pictures.runner.encoded) >= 2
    assert_idle(pictures.engine)


def test_who_waits_for_a_picture_holds_no_slot(tmp_path: Path):
    pictures = Pictures(tmp_path, num_slots=1)
    slow = pictures.add("eye", [10], at_hand=False)
    pictures.engine.step()
    fast = pictures.add("text", [11])
    ended = [output.request_id for _ in range(6) for output in pictures.engine.step().outputs if output.ends_request]
    assert ended == [fast]
    [item] = pictures.engine.take_wanted()
    pictures.engine.supply_feature(item.request_id, item.key, inputs_of(pictures.features[0]))
    ended = [output.request_id for _ in range(6) for output in pictures.engine.step().outputs if output.ends_request]
    assert ended == [slow]
    assert_idle(pictures.engine)


def test_whose_turn_it_is_while_its_picture_has_not_come_keeps_nobody_waiting(tmp_path: Path):
    pictures = Pictures(tmp_path, num_slots=1)
    pictures.engine.load_adapter("third", write_fake_adapter(tmp_path / "third", "third"))
    first = pictures.add("text", [10], max_tokens=6)
    pictures.engine.step()
    pictures.add("eye", [11], at_hand=False)
    third = pictures.add("third", [12])
    outputs = [output for _ in range(15) for output in pictures.engine.step().outputs]
    assert [output.request_id for output in outputs if output.ends_request] == [first, third]
    pictures.engine.abort_requests(["r2"])
    assert_idle(pictures.engine)


def test_if_the_encoder_fails_the_slot_is_free_again(tmp_path: Path):
    pictures = Pictures(tmp_path, num_slots=1)
    pictures.add("eye", [10])
    pictures.runner.encoder_fails = {pictures.features[0].key: ValueError("odd")}
    outputs = [output for _ in range(3) for output in pictures.engine.step().outputs]
    assert [output.error is not None and output.error.code for output in outputs] == ["invalid"]
    assert_idle(pictures.engine)
    pictures.runner.encoder_fails = {}
    assert pictures.ask("text", [11]) == 1
