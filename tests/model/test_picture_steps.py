"""What a step computes of a prompt with pictures is what the model itself computes, wherever the steps before ended."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from engine_core.model import attention
from engine_core.model.picture_encoder import EncodedRows
from engine_core.model.runner import ModelRunner
from engine_core.runner import EncodedFeature
from tests.tiny_vlm_processors import FAMILIES

from .equality import LOGPROB_TOLERANCE, load_reference_model
from .picture_prompts import NUMBERS_FILE, PicturePrompt, PromptMaker
from .picture_steps import HandMade, make_runner, prompt_logprobs, reference_logprobs

GetDirectory = Callable[[str], Path]
NUMBERS = json.loads(NUMBERS_FILE.read_text())


class Family:
    """A family's runner and reference, made once."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.runner: ModelRunner = make_runner(directory)
        self.maker = PromptMaker(name, directory)
        self.reference = load_reference_model(directory)

    def prompt(self, kind: str) -> PicturePrompt:
        return self.maker.make(kind, NUMBERS[self.name][kind])

    def differs(self, by_hand: HandMade, prompt: PicturePrompt, borders: list[int]) -> float:
        """By how much log-probabilities are not the reference's."""
        actual = torch.tensor(prompt_logprobs(self.runner, by_hand, borders))
        return (actual - torch.tensor(reference_logprobs(self.reference, prompt))).abs().max().item()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, vlm_directory: GetDirectory) -> Family:
    return Family(request.param, vlm_directory(request.param))


@pytest.mark.parametrize("kind", ["first and last", "twice", "touching"])
def test_wherever_steps_end(family: Family, kind: str) -> None:
    """In one step, in many that part pictures, and around the edges of each token by token."""
    if kind not in family.maker.kinds:
        pytest.skip("positions of pictures that touch cannot be told apart")
    prompt = family.prompt(kind)
    by_hand = HandMade(family.runner, prompt)
    num_tokens = len(prompt.token_ids)
    edges = {edge + near for feature in prompt.features for edge in (feature.start, feature.end) for near in (-1, 0, 1)}
    for wanted in (set(), set(range(7, num_tokens, 7)), edges):
        borders = sorted(wanted & set(range(1, num_tokens)))
        if family.runner.info.multimodal.joins_touching:
            borders = [border for border in borders if not is_inside_a_group(prompt, border)]
        assert family.differs(by_hand, prompt, borders) <= LOGPROB_TOLERANCE


def test_one_wrong_row_is_seen(family: Family) -> None:
    prompt = family.prompt("one")
    by_hand = HandMade(family.runner, prompt)
    assert family.differs(by_hand, prompt, []) <= LOGPROB_TOLERANCE
    (encoded,) = by_hand.encoded
    for wrong in wrong_outputs(encoded.output):
        by_hand.encoded = [EncodedFeature(encoded.feature, wrong)]
        assert family.differs(by_hand, prompt, []) > LOGPROB_TOLERANCE


def test_a_prompt_is_not_changed_by_its_company(family: Family) -> None:
    """Pictures, texts and decodes of others in the same step, with positions and layers of their own."""
    prompts = [family.prompt(kind) for kind in ("one", "text", "first and last")]
    alone = [prompt_logprobs(family.runner, HandMade(family.runner, prompt), []) for prompt in prompts]
    requests = [HandMade(family.runner, prompt, place) for place, prompt in enumerate(prompts)]
    result = family.runner.launch([one.tokens(0, one.request.num_tokens) for one in requests]).wait()
    for index, expected in enumerate(alone):
        together = [entry.logprob for entry in [*result.prompt_logprobs[index], result.logprobs[index]]]
        assert together == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


def test_the_vision_tower_never_attends_through_us(
    family: Family, vlm_directory: GetDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the decoder, where its layers are transformers' own."""
    runner = make_runner(vlm_directory(family.name), fuse_layers=False)
    calls: list[str] = []

    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(module).__name__)
        return attention.attention_forward(module, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, attention.ATTENTION_NAME, forward)
    by_hand = HandMade(runner, family.prompt("one"))
    assert not calls
    runner.launch([by_hand.tokens(0, by_hand.request.num_tokens)]).wait()
    assert calls


def test_a_generated_token_that_spells_a_picture_is_a_token(family: Family) -> None:
    """In a step with a real picture of another request."""
    prompt = family.prompt("one")
    placeholder = prompt.token_ids[prompt.features[0].start]
    text = family.prompt("text")
    by_hand = HandMade(family.runner, text)
    by_hand.request.token_ids.append(placeholder)
    other = HandMade(family.runner, prompt, place=1)
    family.runner.launch([by_hand.tokens(0, len(text.token_ids))]).wait()
    result = family.runner.launch(
        [by_hand.tokens(len(text.token_ids), len(text.token_ids) + 1), other.tokens(0, len(prompt.token_ids))]
    ).wait()
    with torch.inference_mode():
        logits = family.reference(input_ids=torch.tensor([by_hand.request.token_ids])).logits[0, -1]
    assert result.token_ids[0] == int(logits.argmax())
    expected = logits.log_softmax(dim=-1).max().item()
    assert result.logprobs[0].logprob == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


def wrong_outputs(output: EncodedRows) -> list[EncodedRows]:
    """Two rows in each other's place, and the same in what the decoder's layers get."""
    swapped = torch.arange(len(output.rows))
    swapped[:2] = swapped[:2].flip(0)
    wrong = [dataclasses.replace(output, rows=output.rows[swapped])]
    if output.deepstack:
        wrong.append(dataclasses.replace(output, deepstack=tuple(rows[swapped] for rows in output.deepstack)))
        wrong.append(dataclasses.replace(output, deepstack=output.deepstack[::-1]))
    return wrong


def is_inside_a_group(prompt: PicturePrompt, border: int) -> bool:
    """Whether the tokens before and at `border` are both parts of pictures without a gap between."""
    embedded = {
        feature.start + place
        for feature in prompt.features
        for start, end in feature.embed_ranges
        for place in range(start, end)
    }
    return {border - 1, border} <= embedded
