"""Write the tables of docs/models.md: `python -m tools.write_models_page` (about two minutes)."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import transformers

from tests.model.models_page import PAGE, everything_table, family_table, text_table, with_tables
from tests.tiny_vlms import make_tiny_vlm


def main() -> None:
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        directory_of = functools.cache(lambda family: make_tiny_vlm(family, Path(scratch) / family))
        tables = {"texts": text_table(), "families": family_table(directory_of), "everything": everything_table()}
    PAGE.write_text(with_tables(PAGE.read_text(), tables))


if __name__ == "__main__":
    main()
