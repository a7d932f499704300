"""Adapters on a decoder, on what turns pictures into rows, and on both: log-probabilities are PEFT's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_core import EngineConfig, EngineCore
from engine_core.model.runner import ModelRunner
from tests.adapters import make_adapter

from .adapted import with_adapters
from .equality import LOGPROB_TOLERANCE, greedy, load_reference_model, run_requests
from .picture_prompts import PicturePrompt, PromptMaker
from .picture_steps import BLOCK_SIZE, HandMade, prompt_logprobs, reference_logprobs
from .test_picture_equality import encoded_keys

_DECODER = r".*language_model.*\.(q_proj|v_proj|o_proj|up_proj|down_proj)"
_TOWERS = {
    "llava": r".*(vision_tower|multi_modal_projector).*(q_proj|out_proj|fc1|fc2|linear_1|linear_2)",
    "qwen3_vl": r".*visual.*(qkv|attn\.proj|linear_fc1|linear_fc2)",
    # Its tower hands rows on that lie in memory column by column.
    "llava_onevision": r".*(vision_tower|multi_modal_projector).*(q_proj|out_proj|fc1|fc2|linear_1|linear_2)",
    "gemma3": r".*vision_tower.*(q_proj|k_proj|out_proj|fc1)",
}


@dataclass(frozen=True)
class PictureAdapters:
    """A runner with adapters in its first slots, and PEFT's model of all of them."""

    config: EngineConfig
    runner: ModelRunner
    paths: dict[str, Path]
    slots: dict[str, int]
    adapters: dict[str, Any]
    peft_model: Any
    prompt: PicturePrompt

    def logprobs(self, name: str | None, borders: tuple[int, ...] = ()) -> list[float]:
        return prompt_logprobs(self.runner, self.by_hand(name), borders)

    def by_hand(self, name: str | None, place: int = 0) -> HandMade:
        adapter_slot = None if name is None else self.slots[name]
        return HandMade(self.runner, self.prompt, place, adapter_slot)

    def reference(self, name: str | None) -> list[float]:
        if name is None:
            with self.peft_model.disable_adapter():
                return reference_logprobs(self.peft_model, self.prompt)
        self.peft_model.set_adapter(name)
        return reference_logprobs(self.peft_model, self.prompt)


@pytest.fixture(scope="module", params=_TOWERS)
def those(
    request: pytest.FixtureRequest,
    vlm_directory: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> PictureAdapters:
    family = request.param
    directory, root = vlm_directory(family), tmp_path_factory.mktemp(f"adapted-{family}")
    targets = {"decoder": _DECODER, "tower": _TOWERS[family], "both": f"{_DECODER}|{_TOWERS[family]}"}
    paths = {
        name: make_adapter(directory, root / name, targets=regex, seed=seed)
        for seed, (name, regex) in enumerate(targets.items())
    }
    config = EngineConfig(
        model=str(directory),
        dtype="float32",
        device="cpu",
        num_blocks=128,
        block_size=BLOCK_SIZE,
        enable_lora=True,
        max_loras=4,
    )
    runner = ModelRunner(config)
    adapters = {name: runner.read_adapter(path) for name, path in paths.items()}
    slots = {name: slot for slot, name in enumerate(paths)}
    for name, adapter in adapters.items():
        runner.place_adapter(slots[name], adapter)
    peft_model = with_adapters(load_reference_model(directory), paths)
    prompt = PromptMaker(family, directory).make("first and last", 0)
    return PictureAdapters(config, runner, paths, slots, adapters, peft_model, prompt)


@pytest.mark.parametrize("name", [None, "decoder", "tower", "both"])
def test_log_probabilities_are_pefts(name: str | None, those: PictureAdapters) -> None:
    expected = those.reference(name)
    assert those.logprobs(name) == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
    features = those.prompt.features
    # Text alone is in the second step.
    assert those.logprobs(name, (features[0].end, features[1].start)) == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
    other = "both" if name != "both" else "tower"
    assert those.logprobs(other) != pytest.approx(expected, abs=10 * LOGPROB_TOLERANCE)


def test_requests_of_one_step_have_adapters_of_their_own(those: PictureAdapters) -> None:
    names = ["both", None, "decoder", "tower"]
    by_hand = [those.by_hand(name, place) for place, name in enumerate(names)]
    result = those.runner.launch([each.tokens(0, each.request.num_tokens) for each in by_hand]).wait()
    for place, name in enumerate(names):
        found = [entry.logprob for entry in (*result.prompt_logprobs[place], result.logprobs[place])]
        assert found == pytest.approx(those.reference(name), abs=LOGPROB_TOLERANCE)


def test_rows_of_a_picture_change_where_its_tower_does(those: PictureAdapters) -> None:
    runner, feature = those.runner, those.prompt.features[0]
    inputs = those.prompt.inputs[feature.key]
    plain = runner.encode(feature, inputs)
    for name, adapter in those.adapters.items():
        rows = runner.encode(feature, inputs, those.slots[name]).rows
        assert adapter.targets_encoder == (name != "decoder")
        assert torch.equal(rows, plain.rows) == (name == "decoder")
    assert torch.equal(runner.encode(feature, inputs).rows, plain.rows)


def test_a_picture_is_encoded_once_for_all_who_see_the_same_of_it(those: PictureAdapters) -> None:
    """At once, then cached; the decoder's adapter does not change what is seen."""
    engine = EngineCore(those.config, those.runner)
    for name, path in those.paths.items():
        engine.load_adapter(name, path)
    names = ["both", "", "decoder", "tower"]
    requests = [
        (those.prompt.request(str(i), greedy(1), adapter=name), those.prompt.inputs) for i, name in enumerate(names)
    ]
    with encoded_keys(engine) as keys:
        for is_cached in (False, True):
            for name, run in zip(names, run_requests(engine, requests), strict=True):
                assert run.num_cached_tokens == (len(those.prompt.token_ids) - 1 if is_cached else 0)
                assert run.logprobs[0].max().item() == pytest.approx(
                    those.reference(name or None)[-1], abs=LOGPROB_TOLERANCE
                )
    assert len(keys) == 3 * len(those.prompt.features)
