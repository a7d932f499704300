"""docs/models.md says what is so. `python -m tools.write_models_page` brings it up to date."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .models_page import PAGE, everything_table, family_table, text_table, with_tables

# A refusal of one of these is a mistake.
MUST_BE_SERVED = frozenset(
    """
    aria aya_vision cohere2_vision gemma3 glm4v glm4v_moe got_ocr2 idefics2 idefics3 internvl lighton_ocr llava
    llava_next llava_onevision mistral3 paddleocr_vl qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe smolvlm vipllava
    """.split()
)


def test_the_families_of_the_equality_tests_are_told_right(vlm_directory: Callable[[str], Path]) -> None:
    page = PAGE.read_text()
    assert with_tables(page, {"texts": text_table(), "families": family_table(vlm_directory)}) == page


@pytest.mark.slow
def test_every_vision_language_class_is_told_right() -> None:
    """None fails to load but with a reason."""
    page, table = PAGE.read_text(), everything_table()
    assert with_tables(page, {"everything": table}) == page
    served = {line.split("`")[1] for line in table.splitlines() if "| served |" in line}
    assert served >= MUST_BE_SERVED
