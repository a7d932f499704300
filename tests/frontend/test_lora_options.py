"""The options for LoRA adapters: what they become, and what is said of those that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from engine_core import EngineConfig
from engine_core.config import LoraModule
from frontend.cli import USER_ERROR_EXIT_CODE
from frontend.cli.engine_options import takes_engine_options
from frontend.cli.help import PanelledCommand
from frontend.cli.lora_options import with_lora


def parsed(*arguments: str) -> tuple[str, EngineConfig]:
    """The model, and the engine's settings, that `foreword serve` would make of `arguments`.

    Raises typer.BadParameter, and typer.Exit.
    """
    found: list[tuple[str, dict[str, Any]]] = []

    @takes_engine_options
    def command(*, model: str = typer.Argument("default"), engine_settings: dict[str, Any]) -> None:
        found.append((model, engine_settings))

    app = typer.Typer()
    app.command(cls=PanelledCommand)(command)
    typer.main.get_command(app).main(list(arguments), standalone_mode=False)
    ((model, settings),) = found
    return model, EngineConfig(**with_lora(settings, ["tiny", "alias"]))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is, with adapters `a` and `b`."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_them_there_is_no_lora() -> None:
    assert parsed() == ("default", EngineConfig())


def test_all_of_them(directory: Path) -> None:
    """Paths are those of who types them, wherever the engine will be started."""
    _, config = parsed(
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "64", "--max-cpu-loras", "3"),
        *("--lora-modules", "one=a", "--lora-root", "."),
    )
    assert config == EngineConfig(
        enable_lora=True,
        max_loras=2,
        max_lora_rank=64,
        max_cpu_loras=3,
        lora_modules=(LoraModule("one", str(directory / "a")),),
        lora_root=str(directory),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--lora-modules", "one=a", "--lora-modules", "two=b", "model"),
        ("--lora-modules", "one=a", "two=b", "model"),
        ("model", "--lora-modules=one=a", "two=b"),
        (
            "model",
            "--lora-modules",
            '{"name": "one", "path": "a", "base_model_name": "tiny"}',
            '{"name":"two","path":"b"}',
        ),
        ("--lora-modules", "one=a", "./mo=del", "--lora-modules", "two=b"),
    ],
)
def test_several_are_named_in_turn_or_one_by_one(directory: Path, arguments: tuple[str, ...]) -> None:
    model, config = parsed("--enable-lora", *arguments)
    assert model == ("./mo=del" if "./mo=del" in arguments else "model")
    expected = (LoraModule("one", str(directory / "a")), LoraModule("two", str(directory / "b")))
    assert config.lora_modules == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--lora-modules", "one"), "is not like NAME=PATH"),
        (("--lora-modules", "=a"), "is not like NAME=PATH"),
        (("--lora-modules", "one="), "is not like NAME=PATH"),
        (("--lora-modules", '{"name": "one"}'), "missing required field `path`"),
        (("--lora-modules", '{"name": "one", "path": "a", "rank": 3}'), "unknown field `rank`"),
        (
            ("--lora-modules", "one=c"),
            "adapter 'one': there is no adapter_config.json in .*/c, and those that are built in are shapes-pirate",
        ),
        (("--lora-root", "c"), "'c' does not exist"),
        (("--max-loras", "0"), "greater than or equal to 1"),
        (("--max-lora-rank", "0"), "greater than or equal to 1"),
        (("--max-cpu-loras", "0"), "greater than or equal to 1"),
    ],
)
@pytest.mark.usefixtures("directory")
def test_values_that_cannot_be(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said):
        parsed("--enable-lora", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--lora-modules", "one=a"), "--lora-modules needs --enable-lora"),
        (("--lora-root", "a"), "--lora-root needs --enable-lora"),
        (("--enable-lora", "--lora-modules", "one=a", "one=b"), "--lora-modules names 2 adapters 'one'"),
        (("--enable-lora", "--lora-modules", "alias=a"), "'alias' is a name of the model itself"),
        (
            ("--enable-lora", "--lora-modules", "one=a", "two=b", "--max-cpu-loras", "1"),
            "--lora-modules names 2 adapters, but --max-cpu-loras is 1",
        ),
    ],
)
@pytest.mark.usefixtures("directory")
def test_what_does_not_fit_together(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        parsed(*arguments)
    assert ended.value.exit_code == USER_ERROR_EXIT_CODE
    assert said in capsys.readouterr().err
