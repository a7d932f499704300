"""Choose the prompts with pictures of the equality tests and write them to tests/data/model/pictures.json.

    python -m tools.choose_picture_prompts

For every family and kind of prompt (`tests.model.picture_prompts.TEMPLATES`) this finds the first number in it with
which it qualifies: the reference's two highest logits are never closer than `CHOSEN_PROMPT_GAP`, and its output has
enough distinct tokens to notice a mix-up. Prompts that are to differ in their picture alone have the same number, and
their outputs are not the same.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import transformers

from tests.model.equality import (
    CHOSEN_PROMPT_GAP,
    MIN_DISTINCT_TOKENS,
    Reference,
    generate_reference_from,
    load_reference_model,
)
from tests.model.picture_prompts import NUMBERS_FILE, PromptMaker
from tests.tiny_vlm_processors import FAMILIES
from tests.tiny_vlms import make_tiny_vlm

MAX_TRIES = 300
ALIKE_BUT_FOR_A_PICTURE = ("one", "one spot changed")


def main() -> None:
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    numbers = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as scratch:
            directory = make_tiny_vlm(family, Path(scratch))
            maker, model = PromptMaker(family, directory), load_reference_model(directory)
            others = [(kind,) for kind in maker.kinds if kind not in ALIKE_BUT_FOR_A_PICTURE]
            numbers[family] = {}
            for kinds in (ALIKE_BUT_FOR_A_PICTURE, *others):
                number = first_number(model, maker, kinds)
                numbers[family] |= dict.fromkeys(kinds, number)
        print(family, numbers[family])
    NUMBERS_FILE.write_text(json.dumps(numbers, indent=1) + "\n")


def first_number(model: transformers.PreTrainedModel, maker: PromptMaker, kinds: tuple[str, ...]) -> int:
    for number in range(MAX_TRIES):
        references = [generate_reference_from(model, maker.make(kind, number).reference_inputs) for kind in kinds]
        outputs = {tuple(reference.output_token_ids) for reference in references}
        if all(map(qualifies, references)) and len(outputs) == len(kinds):
            return number
    raise SystemExit(f"no number below {MAX_TRIES} qualifies for {kinds}")


def qualifies(reference: Reference) -> bool:
    return min(reference.gaps) > CHOSEN_PROMPT_GAP and len(set(reference.output_token_ids)) >= MIN_DISTINCT_TOKENS


if __name__ == "__main__":
    main()
