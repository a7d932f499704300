"""Two directories have the same tokenizer digest where text becomes the same token ids."""

from __future__ import annotations

from pathlib import Path

from engine_core import tokenizer_digest


def make(directory: Path, **files: str) -> Path:
    directory.mkdir()
    for name, text in files.items():
        (directory / name.replace("_json", ".json").replace("_txt", ".txt")).write_text(text)
    return directory


def test_it_is_that_of_the_tokenizer_and_of_nothing_else(tmp_path: Path) -> None:
    first = make(tmp_path / "a", tokenizer_json="{1}", config_json="{}")
    same = make(tmp_path / "b", tokenizer_json="{1}", config_json="{other}", vocab_json="{}")
    other = make(tmp_path / "c", tokenizer_json="{2}", config_json="{}")
    assert tokenizer_digest(first) == tokenizer_digest(same) != tokenizer_digest(other)


def test_older_forms_count_where_there_is_no_newer_one(tmp_path: Path) -> None:
    first = make(tmp_path / "a", vocab_json="{}", merges_txt="a b")
    other = make(tmp_path / "b", vocab_json="{}", merges_txt="b a")
    assert tokenizer_digest(first) != tokenizer_digest(other)


def test_a_directory_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert tokenizer_digest(make(tmp_path / "a", config_json="{}")) == ""
