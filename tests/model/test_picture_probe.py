"""A model that does more with pictures than a step can is refused when it is loaded, however it is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from engine_core.model import forward, pictures
from engine_core.model.picture_positions import PicturePositions
from engine_core.model.support import UnsupportedModelError
from tests.tiny_vlm_processors import FAMILIES

from .picture_steps import make_runner

GetDirectory = Callable[[str], Path]
REASON = r"the logits of a prompt with a picture change by \d+\.\d% of their spread"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_served(family: str, vlm_directory: GetDirectory) -> None:
    info = make_runner(vlm_directory(family)).info.multimodal
    assert info is not None
    assert info.joins_touching == (family == "gemma3")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "gemma3"])
def test_rounding_is_no_reason(family: str, dtype: str, vlm_directory: GetDirectory) -> None:
    make_runner(vlm_directory(family), dtype=dtype)


def test_pictures_that_see_themselves_are_noticed(vlm_directory: GetDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "joins_touching", lambda *_: False)
    with pytest.raises(UnsupportedModelError, match=REASON):
        make_runner(vlm_directory("gemma3"))
    monkeypatch.setattr(pictures, "joins_touching", lambda *_: True)
    with pytest.raises(UnsupportedModelError, match=REASON):
        make_runner(vlm_directory("llava"))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_in_three_dimensions_are_noticed(
    family: str, vlm_directory: GetDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PicturePositions, "are_used_by", lambda _: False)
    with pytest.raises(UnsupportedModelError, match=REASON):
        make_runner(vlm_directory(family))


def test_what_layers_add_is_noticed(vlm_directory: GetDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_deepstack", lambda *_: nullcontext())
    with pytest.raises(UnsupportedModelError, match=REASON):
        make_runner(vlm_directory("qwen3_vl"))
