"""Make the built-in vision-language model from nothing: pictures, tokenizer, weights, accuracy.

    python -m tools.train_demo_vlm --out DIRECTORY

About two hours on two free CPU cores. Whatever is stopped goes on where it was when it is called again with
the same `--work-dir`. Prints the accuracy by kind of question as the model card has it (`--evaluate-only`: of `--out`).
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerBase

from tools.demo_vlm.card import HEAD, table_rows, write_into_card
from tools.demo_vlm.chats import SYSTEM_PROMPTS, ask_about_two, talk
from tools.demo_vlm.evaluation import Score, evaluate, held_out_cases, unseen_pair_cases
from tools.demo_vlm.model import new_model, save, train_tokenizer
from tools.demo_vlm.questions import ask
from tools.demo_vlm.rows import RowMaker
from tools.demo_vlm.scenes import COLOUR_NAMES, SHAPES, sample_scene
from tools.demo_vlm.training import Training, draw_pictures

_TRAIN_SEED, _HELD_OUT_SEED, _UNSEEN_SEED = 1, 9001, 9002


def main(
    out: Annotated[Path, typer.Option(help="Where the finished model goes.")],
    work_dir: Annotated[Path, typer.Option(help="Checkpoints of an unfinished run.")] = Path("build/demo_vlm"),
    num_pictures: Annotated[int, typer.Option(min=64, help="Scenes to learn from.")] = 60_000,
    tower_steps: Annotated[int, typer.Option(min=0)] = 2_000,
    answer_steps: Annotated[int, typer.Option(min=0)] = 6_000,
    card: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A model card to write the accuracy into, too.")
    ] = None,
    held_out: Annotated[int, typer.Option(min=1, help="Questions of each kind to measure accuracy with.")] = 500,
    seed: int = 0,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    evaluate_only: bool = False,
) -> None:
    torch.set_num_threads(threads)
    work_dir.mkdir(parents=True, exist_ok=True)
    console = Console()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    ) as progress:
        if not evaluate_only:
            _train(progress, out, work_dir, num_pictures, tower_steps, answer_steps, seed)
        scores = _evaluate(progress, out, held_out)
    console.print(_table(scores))
    if card is not None:
        write_into_card(card, scores)


def _train(
    progress: Progress, out: Path, work_dir: Path, num_pictures: int, tower_steps: int, answer_steps: int, seed: int
) -> None:
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(_texts())
    task = progress.add_task("drawing", total=num_pictures, note="")
    pictures = draw_pictures(num_pictures, _TRAIN_SEED + seed, lambda: progress.advance(task))
    training = Training(new_model(), work_dir / "checkpoint.pt")
    _follow(progress, "tower", training.train_tower(pictures, tower_steps), training.done["tower"], tower_steps)
    rows = RowMaker(pictures.scenes, _tokenize(tokenizer))
    steps = training.train_answers(pictures, rows, answer_steps)
    _follow(progress, "answers", steps, training.done["answers"], answer_steps)
    save(training.model, tokenizer, out)


def _follow(progress: Progress, name: str, losses: Any, done: int, total: int) -> None:
    task = progress.add_task(name, total=total, completed=done, note="")
    smooth: float | None = None
    for loss in losses:
        smooth = loss if smooth is None else 0.98 * smooth + 0.02 * loss
        progress.update(task, advance=1, note=f"loss {smooth:.3f}")


def _evaluate(progress: Progress, directory: Path, per_kind: int) -> dict[str, Score]:
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    tokenize = _tokenize(AutoTokenizer.from_pretrained(directory, local_files_only=True))
    scores: dict[str, Score] = {}
    for seed, unseen in ((_HELD_OUT_SEED, False), (_UNSEEN_SEED, True)):
        pictures = draw_pictures(4 * per_kind, seed, lambda: None, with_unseen_pair=unseen)
        cases = (unseen_pair_cases if unseen else held_out_cases)(pictures, per_kind)
        task = progress.add_task("accuracy", total=len(cases), note="unseen pairs" if unseen else "held out")
        for done in evaluate(model, tokenize, pictures, cases, scores):
            progress.advance(task, done)
    return scores


def _tokenize(tokenizer: PreTrainedTokenizerBase) -> Any:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def _texts() -> list[str]:
    """What the tokenizer learns from: every kind of text in about the shares in which it occurs."""
    random = Random(5)
    texts = [*SYSTEM_PROMPTS] * 30 + [f"The {shape} is {colour}." for shape in SHAPES for colour in COLOUR_NAMES] * 5
    for index in range(30_000):
        scene = sample_scene(random)
        question = ask(random, scene) if index % 3 else talk(random, scene)
        if index % 7 == 0:
            question = ask_about_two(random, (scene, sample_scene(random)))
        texts += [question.text, question.answer]
    return [*texts, "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789"]


def _table(scores: dict[str, Score]) -> Table:
    table = Table(*HEAD, title="exact match of the whole answer")
    for row in table_rows(scores):
        table.add_row(*(cell.replace("**", "") for cell in row))
    return table


if __name__ == "__main__":
    typer.run(main)
