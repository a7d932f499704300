"""The settings for pictures as options of `foreword serve`, and what they mean together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from frontend.picture_config import ImageHashAlgo, PictureConfig

from .options import A_DAY_S, fail, option, size, takes_settings

_PANEL = "Pictures"
_DEFAULTS = PictureConfig()
_GIB = 1 << 30
_MOST_GIB = 1 << 20


def _limits(text: str | int) -> int:
    """`image=4`, or vLLM's `{"image": 4}` → 4."""
    if isinstance(text, int):
        return text
    try:
        if text.lstrip().startswith("{"):
            limits = msgspec.json.decode(text, type=dict[str, int])
        else:
            limits = {name.strip(): int(number) for name, _, number in (one.partition("=") for one in text.split(","))}
    except (msgspec.DecodeError, ValueError) as error:
        raise typer.BadParameter(f'{text!r} is neither like image=4 nor like {{"image": 4}}') from error
    if others := sorted(limits.keys() - {"image"}):
        raise typer.BadParameter(f"'{others[0]}' is nothing that models are given here; only 'image' is")
    number = limits.get("image", _DEFAULTS.max_images_per_prompt)
    if number < 0:
        raise typer.BadParameter(f"image = {number}; at least 0 is needed")
    return number


def _json_object(text: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(text, dict):
        return text
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise typer.BadParameter(f"{text!r} is not a JSON object: {error}") from error


def _picture_options(
    *,
    allowed_local_media_path: Annotated[
        Path | None, option(_PANEL, "Read pictures at file:// URLs below this directory.", metavar="DIR")
    ] = None,
    allowed_media_domains: Annotated[
        list[str] | None,
        option(
            _PANEL,
            "Fetch pictures from this host (*.HOST: from all below it); repeat for several. Default: from none.",
            metavar="HOST",
        ),
    ] = None,
    allow_any_public_media_host: Annotated[
        bool,
        option(
            _PANEL,
            "Fetch pictures from any host with a public address. Clients can then make this server ask anybody.",
            "--allow-any-public-media-host",
        ),
    ] = False,
    media_timeout_s: Annotated[
        float, option(_PANEL, "Seconds to fetch one picture, redirects included.", min=0.1, max=A_DAY_S)
    ] = _DEFAULTS.media_timeout_s,
    max_images_per_prompt: Annotated[
        int,
        option(
            _PANEL,
            'Most pictures in one prompt, as image=4 or {"image": 4}; with 0 there may be none.',
            "--limit-mm-per-prompt",
            parser=_limits,
            metavar="LIMIT",
        ),
    ] = _DEFAULTS.max_images_per_prompt,
    max_image_bytes: Annotated[
        int, option(_PANEL, "Largest file of a picture, for instance 20MiB.", parser=size, metavar="SIZE")
    ] = _DEFAULTS.max_image_bytes,
    max_image_pixels: Annotated[
        int, option(_PANEL, "Most pixels of a picture (width × height), checked before it is decoded.", min=1)
    ] = _DEFAULTS.max_image_pixels,
    max_image_frames: Annotated[
        int, option(_PANEL, "Most frames of an animated picture; the model sees the first.", min=1)
    ] = _DEFAULTS.max_image_frames,
    mm_processor_kwargs: Annotated[
        Any,
        option(
            _PANEL,
            "Settings of the model's image processor as a JSON object. A request's own go before.",
            parser=_json_object,
            metavar="JSON",
        ),
    ] = None,
    mm_hash_algo: Annotated[
        ImageHashAlgo, option(_PANEL, "How pictures are told apart; xxhash is not collision proof.")
    ] = _DEFAULTS.mm_hash_algo,
    mm_processor_cache_gb: Annotated[
        float, option(_PANEL, "GiB of prepared pictures that are kept.", min=0, max=_MOST_GIB)
    ] = _DEFAULTS.mm_processor_cache_bytes / _GIB,
) -> None:
    """Only its signature is used. Each name but that of the cache is a field of `PictureConfig`."""


# Adds them to a command, which gets their values as the keyword argument `picture_settings`.
takes_picture_options = takes_settings(_picture_options, "picture_settings")


def picture_config(settings: dict[str, Any], *, max_body_bytes: int) -> PictureConfig:
    """What does not fit together ends the command."""
    directory: Path | None = settings["allowed_local_media_path"]
    config = PictureConfig(
        **{name: value for name, value in settings.items() if name != "mm_processor_cache_gb"}
        | {
            "allowed_local_media_path": None if directory is None else str(directory.absolute()),
            "allowed_media_domains": tuple(settings["allowed_media_domains"] or ()),
            "mm_processor_kwargs": settings["mm_processor_kwargs"] or {},
            "mm_processor_cache_bytes": round(settings["mm_processor_cache_gb"] * _GIB),
        }
    )
    if directory is not None and not directory.is_dir():
        fail(f"--allowed-local-media-path: {directory.absolute()} is not a folder")
    if config.fetches:
        try:
            config.media_policy()
        except ValueError as error:
            fail(f"--allowed-media-domains: {error}")
    # What base64 leaves of a body; pictures then come in no other way.
    most_bytes = max_body_bytes * 3 // 4
    if not config.fetches and most_bytes < config.max_image_bytes != _DEFAULTS.max_image_bytes:
        fail(
            f"--max-image-bytes is {config.max_image_bytes}, but a request of --max-body-bytes ({max_body_bytes}) has"
            f" no room for more than {most_bytes} bytes in a data URL, and nothing is fetched from elsewhere"
        )
    return config
