"""The tables of docs/models.md, from what models are found to do: `python -m tools.write_models_page` writes them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import transformers

from engine_core.model.support import UnsupportedModelError
from tests.tiny_models import TINY_ARCHITECTURES
from tests.tiny_vlm_processors import FAMILIES

from .any_architecture import CannotBeMadeError
from .any_picture_model import try_to_serve
from .picture_steps import make_runner

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def text_table() -> str:
    """The text models whose outputs are compared token for token."""
    return ", ".join(f"`{name}`" for name in sorted(TINY_ARCHITECTURES))


def family_table(directory_of: Callable[[str], Path]) -> str:
    """The vision-language models whose outputs are compared token for token."""
    return _table(
        ("model type", "class", "positions", "rows a token", "tokens of a picture see"),
        (_family_row(directory_of(family)) for family in FAMILIES),
    )


def _family_row(directory: Path) -> tuple[str, ...]:
    runner = make_runner(directory)
    pictures: Any = runner._pictures
    return (
        f"`{runner._model.config.model_type}`",
        type(runner._model).__name__,
        "place in the prompt" if pictures.positions is None else "time, height, width (M-RoPE)",
        "1" if not pictures.encoder.num_deepstack else f"1, and {pictures.encoder.num_deepstack} for the first layers",
        "all of those they touch" if pictures.joins_touching else "those before",
    )


def everything_table() -> str:
    """What becomes of a random model of every vision-language class of transformers."""
    rows = []
    for config_class in sorted(transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, key=lambda cls: cls.model_type):
        with tempfile.TemporaryDirectory() as scratch:
            rows.append((f"`{config_class.model_type}`", *_outcome(config_class, Path(scratch) / "model")))
    return _table(("model type", "", "reason"), rows)


def _outcome(config_class: Any, directory: Path) -> tuple[str, str]:
    try:
        try_to_serve(config_class, directory)
    except UnsupportedModelError as refusal:
        reason = str(refusal).removeprefix(f"{config_class.model_type}: ")
        # Details are for whoever has such a model; by how much logits change is a matter of the random weights.
        return "refused", re.sub(r" by [\d.]+% of their spread", "", reason.split(" (")[0])
    except CannotBeMadeError:
        return "not tried", "no small model of it could be made"
    return "served", ""


def with_tables(page: str, tables: dict[str, str]) -> str:
    """`page` with what is between `<!-- name -->` and `<!-- end -->` replaced."""
    for name, table in tables.items():
        before, found, rest = page.partition(f"<!-- {name} -->\n")
        assert found, name
        page = before + found + table + "\n" + rest[rest.index("<!-- end -->") :]
    return page


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
