"""Choose the prompts of the equality tests and write them to tests/data/model/<name>.json.

    python -m tools.choose_prompts [name …]        (default: every tiny architecture and the real models)

A prompt qualifies if the reference's two highest logits are never closer than `CHOSEN_PROMPT_GAP` over all its output
tokens, and if its output has enough distinct tokens to notice a mix-up. Lengths sit around block borders, or around
the end of a sliding window. Real models go on with real texts, others with random tokens.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
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
MAX_TRIES = 5000
DATA = Path(__file__).parent.parent / "tests" / "data"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of the prompts, in tokens. One more of `last` tokens begins with the first `shared_prefix` of the one before."""

    alone: tuple[int, ...]
    shared_prefix: int
    last: int


# Block size −1, exactly, +1 and twice, and two longer prompts that begin alike.
SHORT = Lengths((BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 50), 2 * BLOCK_SIZE + 1, 41)
# A window that is left while decoding, that ends with the prompt, and that has been left twice; the last one's own
# part is longer than a window, and it ends with a block.
BEYOND_512 = Lengths((500, 512, 1200), 600, 1216)

TEXT = """\
The keeper of the lighthouse wrote every ship into a book: the hour, the wind, and a name where the fog allowed one.
Water boils at 100 degrees Celsius at sea level, but at 3000 metres it boils at about 90 degrees. In 1969 the first
people walked on the moon. A prime number has exactly two divisors. Most bread is made from flour, water, salt and
yeast; the dough has to rest before it is baked. Rivers carry sand to the sea, and the sea grinds it finer. My
grandmother kept bees behind the house, and every summer we were given a jar of honey each. The train to the coast
leaves at 7:45 from platform 12 and arrives before noon. Copper conducts electricity better than iron does."""


REAL_MODELS: dict[str, tuple[Callable[[], str], Lengths]] = {
    "smollm2": (lambda: TEXT, SHORT),
    "gemma3-270m": ((DATA / "text" / "engineers_thumb.txt").read_text, BEYOND_512),
}


def main(names: list[str]) -> None:
    (DATA / "model").mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    for name in names or [*TINY_ARCHITECTURES, *REAL_MODELS]:
        with tempfile.TemporaryDirectory() as scratch:
            draw = random.Random(0)
            if name in REAL_MODELS:
                text, lengths = REAL_MODELS[name]
                directory = resolve_model(name).path
                candidate = parts_of_text(directory, text(), draw)
            else:
                directory, lengths = make_tiny_model(name, Path(scratch)), SHORT
                candidate = random_tokens(draw)
            prompts, gaps = choose_prompts(load_reference_model(directory), candidate, lengths)
        (DATA / "model" / f"{name}.json").write_text(json.dumps({"prompts": prompts, "lowest_gaps": gaps}) + "\n")
        print(f"{name}: lowest gaps {[round(gap, 4) for gap in gaps]}")


def parts_of_text(directory: Path, text: str, draw: random.Random) -> Callable[[int], list[int]]:
    """Makes prompts of so many tokens: what the tokenizer puts before a text, and then a part of `text`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    before = tokenizer("").input_ids
    tokens = tokenizer(text, add_special_tokens=False).input_ids

    def part(length: int) -> list[int]:
        start = draw.randrange(len(tokens) - length)
        return [*before, *tokens[start : start + length - len(before)]]

    return part


def random_tokens(draw: random.Random) -> Callable[[int], list[int]]:
    return lambda length: [draw.randrange(3, TINY_VOCAB_SIZE) for _ in range(length)]


def choose_prompts(
    model: transformers.PreTrainedModel, candidate: Callable[[int], list[int]], lengths: Lengths
) -> tuple[list[list[int]], list[float]]:
    """The prompts and their lowest gaps."""
    prompts: list[list[int]] = []
    gaps = []
    for length in (*lengths.alone, lengths.last):
        for _ in range(MAX_TRIES):
            prompt = candidate(length)
            if length == lengths.last:
                prompt[: lengths.shared_prefix] = prompts[-1][: lengths.shared_prefix]
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
