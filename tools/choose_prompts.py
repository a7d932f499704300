"""Choose the prompts of the equality tests and write them to tests/data/model/<name>.json.

    python -m tools.choose_prompts [name …]        (default: every tiny architecture and smollm2)

A prompt qualifies if the reference's two highest logits are never closer than `CHOSEN_PROMPT_GAP` over all its output
tokens, and if its output has enough distinct tokens to notice a mix-up. Lengths sit around block borders.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from engine_core import resolve_model
from tests.model.equality import (
    CHOSEN_PROMPT_GAP,
    MIN_DISTINCT_TOKENS,
    generate_reference,
    load_reference_model,
)
from tests.tiny_models import TINY_ARCHITECTURES, TINY_VOCAB_SIZE, make_tiny_model

BLOCK_SIZE = 16
# Block size −1, exactly, +1 and twice, and two longer prompts that begin alike.
LENGTHS = (BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 50)
SHARED_PREFIX_TOKENS = 2 * BLOCK_SIZE + 1
SHARED_PREFIX_LENGTH = 41
MAX_TRIES = 5000
DATA = Path(__file__).parent.parent / "tests" / "data" / "model"

TEXT = """\
The keeper of the lighthouse wrote every ship into a book: the hour, the wind, and a name where the fog allowed one.
Water boils at 100 degrees Celsius at sea level, but at 3000 metres it boils at about 90 degrees. In 1969 the first
people walked on the moon. A prime number has exactly two divisors. Most bread is made from flour, water, salt and
yeast; the dough has to rest before it is baked. Rivers carry sand to the sea, and the sea grinds it finer. My
grandmother kept bees behind the house, and every summer we were given a jar of honey each. The train to the coast
leaves at 7:45 from platform 12 and arrives before noon. Copper conducts electricity better than iron does."""


def main(names: list[str]) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    for name in names or [*TINY_ARCHITECTURES, "smollm2"]:
        with tempfile.TemporaryDirectory() as scratch:
            if name == "smollm2":
                directory = resolve_model(name).path
                tokens = transformers.AutoTokenizer.from_pretrained(directory)(TEXT).input_ids
            else:
                directory = make_tiny_model(name, Path(scratch))
                tokens = None
            prompts, gaps = choose_prompts(load_reference_model(directory), tokens)
        (DATA / f"{name}.json").write_text(json.dumps({"prompts": prompts, "lowest_gaps": gaps}) + "\n")
        print(f"{name}: lowest gaps {[round(gap, 4) for gap in gaps]}")


def choose_prompts(
    model: transformers.PreTrainedModel, tokens: list[int] | None
) -> tuple[list[list[int]], list[float]]:
    """Six prompts and their lowest gaps: windows of `tokens`, or random token ids."""
    draw = random.Random(0)

    def candidate(length: int) -> list[int]:
        if tokens is None:
            return [draw.randrange(3, TINY_VOCAB_SIZE) for _ in range(length)]
        start = draw.randrange(len(tokens) - length)
        return tokens[start : start + length]

    prompts, gaps = [], []
    for length in (*LENGTHS, SHARED_PREFIX_LENGTH):
        for _ in range(MAX_TRIES):
            prompt = candidate(length)
            if length == SHARED_PREFIX_LENGTH:
                prompt[:SHARED_PREFIX_TOKENS] = prompts[-1][:SHARED_PREFIX_TOKENS]
            reference = generate_reference(model, prompt)
            if (
                min(reference.gaps) > CHOSEN_PROMPT_GAP
                and len(set(reference.output_token_ids)) >= MIN_DISTINCT_TOKENS
                and prompt not in prompts
            ):
                prompts.append(prompt)
                gaps.append(min(reference.gaps))
                break
        else:
            raise SystemExit(f"no prompt of {length} tokens qualifies in {MAX_TRIES} tries")
    return prompts, gaps


if __name__ == "__main__":
    main(sys.argv[1:])
