"""The built-in adapter: what it was taught, that it has learnt it, and that its training goes where it should."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open

from engine_core import resolve_adapter
from tools.demo_vlm.evaluation import Score, evaluate, held_out_cases
from tools.demo_vlm.pirate import pirate
from tools.demo_vlm.rows import RowMaker
from tools.demo_vlm.training import draw_pictures
from tools.train_demo_lora import TARGETS, as_pirate, load_base, save, train

DIRECTORY = resolve_adapter("shapes-pirate")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("The heart is purple.", "The heart is purple, matey!"),
        ("Yes, there is a star.", "Aye, there is a star, matey!"),
        ("No, the star is above the cross.", "Nay, the star is above the cross, matey!"),
        ("Nothing but a red background.", "Nothing but a red background, matey!"),
        ("I do not see a picture. Please send me one.", "I do not see a picture. Please send me one, matey!"),
        ("Hello! Show me a picture of simple shapes.", "Ahoy! Show me a picture of simple shapes, matey!"),
        ("Goodbye!", "Goodbye, matey!"),
    ],
)
def test_a_pirate_says_the_same_otherwise(answer: str, said: str):
    assert pirate(answer) == said


def test_answers_are_taught_in_another_style_and_questions_as_they_are():
    scenes = draw_pictures(20, 1, lambda: None).scenes
    texts: set[str] = set()

    def tokenize(text: str) -> list[int]:
        texts.add(text)
        return [7] * 5

    RowMaker(scenes, tokenize, lambda answer: f"{answer}!").row(Random(0))
    answers = {text for text in texts if text.endswith(".!")}
    assert answers and texts - answers and not any(answer[:-1] in texts for answer in answers)


def test_the_adapter_says_right_what_the_model_says_right():
    pictures = draw_pictures(60, 77, lambda: None)
    cases = held_out_cases(pictures, 5)
    said = [as_pirate(case) for case in cases]
    model, tokenize = load_base()

    def share(asked: list, model: torch.nn.Module) -> float:
        scores: dict[str, Score] = {}
        assert sum(evaluate(model, tokenize, pictures, asked, scores)) == len(asked)
        return sum(score.right for score in scores.values()) / len(asked)

    plain = share(cases, model)
    assert share(said[::5], model) == 0
    PeftModel.from_pretrained(model, DIRECTORY).eval()
    assert share(said, model) > plain - 0.05


def test_it_is_small_and_of_the_decoder_and_the_head_only():
    config = json.loads((DIRECTORY / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["target_modules"]) == ("shapes", TARGETS)
    with safe_open(DIRECTORY / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
    assert len(names) == (4 * 7 + 1) * 2
    assert all(".language_model.layers." in name or ".lm_head.lora_" in name for name in names)
    assert {path.name for path in DIRECTORY.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) < 400_000


@pytest.fixture
def short_training(tmp_path: Path) -> list[float]:
    """Losses of a few steps; what came of them is in `tmp_path`."""
    pictures = draw_pictures(64, 1, lambda: None)
    model, tokenize = load_base()
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=TARGETS))
    losses = list(train(model, pictures, RowMaker(pictures.scenes, tokenize, pirate), 6))
    save(adapted, tmp_path)
    return losses


def test_a_training_learns_and_leaves_what_an_engine_can_load(short_training: list[float], tmp_path: Path):
    assert short_training[-1] < short_training[0]
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "shapes"
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
