"""The options of `foreword serve` for pictures: what they become, and what is said of those that cannot be."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import typer

from frontend.cli import USER_ERROR_EXIT_CODE
from frontend.cli.options import takes_settings
from frontend.cli.picture_options import picture_config, takes_picture_options
from frontend.http_config import DEFAULT_MAX_BODY_BYTES, EngineAddress, HttpConfig, child_argv
from frontend.open_pictures import open_pictures
from frontend.picture_config import ImageHashAlgo, PictureConfig
from ipc.process import STARTUP_FAILURE_EXIT_CODE
from multimodal.content_hash import MMHashAlgo
from tests.frontend.picture_app import model_directory


def parsed(*arguments: str, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES) -> PictureConfig:
    """What `foreword serve` would make of `arguments`. Raises typer.BadParameter, and typer.Exit."""
    found: list[dict[str, Any]] = []

    @takes_picture_options
    def command(*, picture_settings: dict[str, Any]) -> None:
        found.append(picture_settings)

    app = typer.Typer()
    app.command()(command)
    typer.main.get_command(app).main(list(arguments), standalone_mode=False)
    return picture_config(found[0], max_body_bytes=max_body_bytes)


def test_without_options_nothing_is_fetched() -> None:
    assert parsed() == PictureConfig()
    assert not parsed().fetches


def test_all_of_them(tmp_path: Path) -> None:
    config = parsed(
        *("--allowed-local-media-path", str(tmp_path)),
        *("--allowed-media-domains", "example.org", "--allowed-media-domains", "*.example.com"),
        "--allow-any-public-media-host",
        *("--media-timeout-s", "2.5", "--limit-mm-per-prompt", "image=4", "--max-image-bytes", "1MiB"),
        *("--max-image-pixels", "4096", "--max-image-frames", "7", "--mm-processor-kwargs", '{"max_pixels": 3136}'),
        *("--mm-hash-algo", "blake3", "--mm-processor-cache-gb", "1.5"),
    )
    assert config == PictureConfig(
        allowed_local_media_path=str(tmp_path),
        allowed_media_domains=("example.org", "*.example.com"),
        allow_any_public_media_host=True,
        media_timeout_s=2.5,
        max_images_per_prompt=4,
        max_image_bytes=1 << 20,
        max_image_pixels=4096,
        max_image_frames=7,
        mm_processor_kwargs={"max_pixels": 3136},
        mm_hash_algo="blake3",
        mm_processor_cache_bytes=3 << 29,
    )
    assert config.fetches
    http = HttpConfig(engines=(), model_dir="m", model_names=("m",), pictures=config)
    assert msgspec.json.decode(msgspec.json.encode(http), type=HttpConfig) == http


@pytest.mark.parametrize(
    ("text", "limit"),
    [("image=4", 4), ('{"image": 4}', 4), (' {"image":0}', 0), ("image = 2", 2), ("{}", 16)],
)
def test_the_limit_is_spelled_in_two_ways(text: str, limit: int) -> None:
    assert parsed("--limit-mm-per-prompt", text).max_images_per_prompt == limit


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--limit-mm-per-prompt", "video=1"), "'video' is nothing"),
        (("--limit-mm-per-prompt", '{"image": 1, "audio": 2}'), "'audio' is nothing"),
        (("--limit-mm-per-prompt", "image=-1"), "at least 0"),
        (("--limit-mm-per-prompt", "4"), "neither like image=4"),
        (("--limit-mm-per-prompt", '{"image": "4"}'), "neither like image=4"),
        (("--mm-processor-kwargs", "[1]"), "not a JSON object"),
        (("--mm-processor-kwargs", "{"), "not a JSON object"),
        (("--mm-hash-algo", "md5"), "md5"),
        (("--max-image-bytes", "big"), "is not a size"),
        (("--max-image-bytes", "0"), "out of range; 1 byte to"),
        (("--max-image-bytes", "9" * 400), "is not a size"),
        (("--max-image-bytes", "9999999TiB"), "out of range"),
        (("--media-timeout-s", "inf"), "less than or equal to 86400"),
        (("--mm-processor-cache-gb", "inf"), "less than or equal to"),
    ],
)
def test_values_that_cannot_be(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said):
        parsed(*arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--allowed-local-media-path", "/gone/away"), "--allowed-local-media-path: /gone/away is not a folder"),
        (("--allowed-media-domains", "https://example.org/"), "https://example.org/"),
    ],
)
def test_places_that_are_none(arguments: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        parsed(*arguments)
    assert ended.value.exit_code == USER_ERROR_EXIT_CODE
    assert said in capsys.readouterr().err


def test_the_algorithms_are_those_there_are() -> None:
    assert get_args(ImageHashAlgo) == get_args(MMHashAlgo)


def test_pictures_larger_than_any_request(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        parsed("--max-image-bytes", "100", max_body_bytes=100)
    assert "room for more than 75 bytes" in capsys.readouterr().err
    # They may come from elsewhere; and a small body alone is no contradiction.
    assert parsed("--max-image-bytes", "100", "--allow-any-public-media-host", max_body_bytes=100).fetches
    assert parsed(max_body_bytes=100) == PictureConfig()


def test_options_are_added_to_those_a_command_has() -> None:
    def more(*, size: int = 3, name: str = "x") -> None:
        pass

    @takes_settings(more, "settings")
    def command(*, own: bool = False, settings: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        return own, settings

    assert command(own=True, size=4, name="y") == (True, {"size": 4, "name": "y"})


def test_what_the_models_processor_does_not_take_is_a_start_up_failure(tmp_path: Path) -> None:
    config = HttpConfig(
        engines=(EngineAddress("ipc:///tmp/unused"),),
        model_dir=str(model_directory("llava", tmp_path)),
        model_names=("x",),
        port=0,
        pictures=PictureConfig(mm_processor_kwargs={"colour": "blue"}),
    )
    result = subprocess.run(child_argv(config), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == STARTUP_FAILURE_EXIT_CODE
    assert "http_start_failed" in result.stderr
    assert "--mm-processor-kwargs: this model's image processor takes no 'colour'" in result.stderr


def test_a_processor_that_cannot_be_used(tmp_path: Path) -> None:
    directory = model_directory("llava", tmp_path)
    (directory / "config.json").write_text('{"image_token_id": 1}')
    with pytest.raises(ValueError, match="--limit-mm-per-prompt image=0 serves it without pictures"):
        open_pictures(directory, PictureConfig())
    assert open_pictures(directory, PictureConfig(max_images_per_prompt=0)) is None
