"""Make the built-in LoRA adapter: the model `shapes` with a pirate's tongue.

    python -m tools.train_demo_lora --out DIRECTORY

Some minutes on two free CPU cores. Prints how many answers are right, word for word, with the adapter and without
(`--evaluate-only`: with that in `--out`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn
from transformers import AutoModelForImageTextToText, AutoTokenizer

from engine_core import DEFAULT_MODEL, resolve_model
from tools.demo_vlm.card import ADAPTER_HEAD, adapter_rows, write_adapter_into_card
from tools.demo_vlm.evaluation import Case, Score, evaluate, held_out_cases, unseen_pair_cases
from tools.demo_vlm.pirate import pirate
from tools.demo_vlm.rows import RowMaker
from tools.demo_vlm.training import (
    Pictures,
    answers_loss,
    draw_pictures,
    features_of,
    pictures_of,
    rows_of,
    use_plain_attention,
)

# The vision tower's layers have names like these, too. The head is there because a pirate needs tokens that the model
# has never said, and that it holds for all but impossible: without it they take many times as long to learn.
TARGETS = r"lm_head|model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
RANK, ALPHA = 8, 16
# Neither what the model has learnt from nor what its accuracy is measured with.
_TRAIN_SEED, _HELD_OUT_SEED, _UNSEEN_SEED = 3, 9001, 9002
_RATE = 3e-3
_ROWS_BATCH = 4


def main(
    out: Annotated[Path, typer.Option(help="Where the adapter goes.")],
    num_pictures: Annotated[int, typer.Option(min=64, help="Scenes to learn from.")] = 5_000,
    num_steps: Annotated[int, typer.Option(min=1)] = 600,
    card: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A model card to write the accuracy into, too.")
    ] = None,
    held_out: Annotated[int, typer.Option(min=1, help="Questions of each kind to measure accuracy with.")] = 500,
    seed: int = 0,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    evaluate_only: bool = False,
) -> None:
    torch.set_num_threads(threads)
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
            _train(progress, out, num_pictures, num_steps, seed)
        plain, piratical = _evaluate(progress, out, held_out)
    table = Table(*ADAPTER_HEAD, title="exact match of the whole answer")
    for row in adapter_rows(plain, piratical):
        table.add_row(*row)
    console.print(table)
    if card is not None:
        write_adapter_into_card(card, plain, piratical)


def load_base() -> tuple[Any, Any]:
    """The built-in model in float32, and what makes token ids of a text without special tokens."""
    directory = resolve_model(DEFAULT_MODEL).path
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return model, lambda text: tokenizer.encode(text, add_special_tokens=False)


def _train(progress: Progress, out: Path, num_pictures: int, num_steps: int, seed: int) -> None:
    task = progress.add_task("drawing", total=num_pictures, note="")
    pictures = draw_pictures(num_pictures, _TRAIN_SEED + seed, lambda: progress.advance(task))
    model, tokenize = load_base()
    use_plain_attention(model)
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS))
    task = progress.add_task("answers", total=num_steps, note="")
    smooth: float | None = None
    for loss in train(model, pictures, RowMaker(pictures.scenes, tokenize, pirate), num_steps):
        smooth = loss if smooth is None else 0.98 * smooth + 0.02 * loss
        progress.update(task, advance=1, note=f"loss {smooth:.3f}")
    save(adapted, out)


def train(model: Any, pictures: Pictures, rows: RowMaker, num_steps: int) -> Iterator[float]:
    """Let what of `model` can be learnt learn the answers of `rows`. Yields the loss of each step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0, betas=(0.9, 0.98))
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / 20, max(0.01, (num_steps - step) / (0.6 * num_steps)))
        batch = rows_of(step, rows, _ROWS_BATCH)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                features = features_of(model, pictures, pictures_of(batch))
            loss = answers_loss(model, features, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def save(adapted: PeftModel, out: Path) -> None:
    """In bfloat16, as the model itself is, and without saying where on this machine that lies."""
    adapted.peft_config["default"].base_model_name_or_path = DEFAULT_MODEL
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    # The head itself stays where it is, in the model.
    adapted.save_pretrained(out, save_embedding_layers=False)
    # A form for a model card, not filled in; docs/demo_model.md is the card.
    (out / "README.md").unlink()


def _evaluate(progress: Progress, adapter: Path, per_kind: int) -> tuple[dict[str, Score], dict[str, Score]]:
    """Scores of the model by itself, and with the adapter, whose answers are right if a pirate's would be."""
    model, tokenize = load_base()
    held_out = draw_pictures(4 * per_kind, _HELD_OUT_SEED, lambda: None)
    unseen = draw_pictures(4 * per_kind, _UNSEEN_SEED, lambda: None, with_unseen_pair=True)
    asked = [(held_out, held_out_cases(held_out, per_kind)), (unseen, unseen_pair_cases(unseen, per_kind))]

    def scores_of(name: str, *, is_pirate: bool) -> dict[str, Score]:
        scores: dict[str, Score] = {}
        task = progress.add_task("accuracy", total=sum(len(cases) for _, cases in asked), note=name)
        for pictures, cases in asked:
            said = [as_pirate(case) for case in cases] if is_pirate else cases
            for done in evaluate(model, tokenize, pictures, said, scores):
                progress.advance(task, done)
        return scores

    plain = scores_of("plain", is_pirate=False)
    PeftModel.from_pretrained(model, adapter).eval()
    return plain, scores_of("pirate", is_pirate=True)


def as_pirate(case: Case) -> Case:
    """With all answers, those of earlier turns as well, as a pirate gives them."""
    history = tuple(replace(turn, answer=pirate(turn.answer)) for turn in case.history)
    return replace(case, history=history, question=replace(case.question, answer=pirate(case.question.answer)))


if __name__ == "__main__":
    typer.run(main)
