"""What tokenizing a chat costs that grows turn by turn, whole and in pieces: `python -m benchmarks.growing_chats`.

Each turn's prompt is rendered by the model's chat template, which is not timed, and tokenized twice, alternating: as
the tokenizer does it, and as `PiecewiseTokenizer` does it, which has seen the turns before. In one thread, in ms, the
fastest of all rounds for each turn: the median over the turns after the first, and the last turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine_core import resolve_model
from frontend.bench.texts import TextMaker
from frontend.prompt.chat import Chat, ChatMessage
from frontend.prompt.piecewise import PiecewiseTokenizer
from frontend.prompt.tokenizer import ModelTokenizer, load_tokenizer

# As in the HTTP process.
sys.modules["torch"] = None  # type: ignore[assignment]
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Turns, and tokens of the last prompt, about.
CHATS = [(6, 2_048), (6, 8_192), (50, 8_192), (20, 32_768), (50, 32_768)]


def texts_of(tokenizer: ModelTokenizer, num_turns: int, num_tokens: int) -> list[str]:
    """The prompts of the turns."""
    template = tokenizer.chat_template
    assert template is not None
    texts = TextMaker(0, tokenizer=tokenizer.backend)
    size = max(1, num_tokens // (2 * num_turns) - 8)
    messages: list[ChatMessage] = []
    prompts = []
    for turn in range(num_turns):
        messages.append(ChatMessage("user", texts.text(f"user/{turn}", size)))
        prompts.append(template.render(Chat(messages)))
        messages.append(ChatMessage("assistant", texts.text(f"assistant/{turn}", size)))
    return prompts


def milliseconds_of(work: Callable[[], list[int]]) -> tuple[float, list[int]]:
    started_s = time.perf_counter()
    ids = work()
    return (time.perf_counter() - started_s) * 1e3, ids


def measure(tokenizer: ModelTokenizer, prompts: list[str], rounds: int) -> tuple[list[float], list[float], float]:
    """Of each turn: ms whole, ms in pieces; and the share of tokens that was remembered. Raises if they differ."""
    whole_ms, pieces_ms = ([float("inf")] * len(prompts) for _ in range(2))
    for _ in range(rounds):
        piecewise = PiecewiseTokenizer(tokenizer.backend)

        def whole(text: str) -> list[int]:
            (encoding,) = tokenizer.backend.encode_batch_fast([text], add_special_tokens=False)
            return list(encoding.ids)

        def pieces(text: str, piecewise: PiecewiseTokenizer = piecewise) -> list[int]:
            split = piecewise.split(text, "")
            return piecewise.tokenize(split, add_special_tokens=False, check_number=lambda number: None).ids

        for turn, text in enumerate(prompts):
            took_ms, expected = milliseconds_of(lambda text=text: whole(text))  # type: ignore[misc]
            whole_ms[turn] = min(whole_ms[turn], took_ms)
            took_ms, ids = milliseconds_of(lambda text=text: pieces(text))  # type: ignore[misc]
            pieces_ms[turn] = min(pieces_ms[turn], took_ms)
            if ids != expected:
                raise RuntimeError(f"turn {turn} has other tokens in pieces")
    stats = piecewise.stats
    return whole_ms, pieces_ms, stats.num_remembered_tokens / stats.num_tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, help="with tokenizer and chat template (default: SmolLM2's)")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.model_dir or resolve_model("smollm2").path)
    print("| turns | tokens at the end | remembered | whole, ms | pieces, ms | ratio | last: whole | pieces | ratio |")
    print("| --- " * 9 + "|")
    for num_turns, num_tokens in CHATS:
        prompts = texts_of(tokenizer, num_turns, num_tokens)
        whole_ms, pieces_ms, share = measure(tokenizer, prompts, arguments.rounds)
        whole, pieces = statistics.median(whole_ms[1:]), statistics.median(pieces_ms[1:])
        print(
            f"| {num_turns} | {len(tokenizer.backend.encode(prompts[-1]).ids):,} | {share:.0%} "
            f"| {whole:.2f} | {pieces:.2f} | {pieces / whole:.2f} "
            f"| {whole_ms[-1]:.2f} | {pieces_ms[-1]:.2f} | {pieces_ms[-1] / whole_ms[-1]:.2f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
