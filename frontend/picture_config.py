"""What the HTTP process is told about pictures. Light enough for the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from multimodal import MediaPolicy

ImageHashAlgo = Literal["sha256", "blake3", "xxhash"]


class PictureConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Settings for the pictures of chats; without effect for models that take none.

    Args:
        allowed_local_media_path: `file://` URLs are read below this directory; None: not at all.
        allowed_media_domains: hosts that pictures are fetched from; `*.example.org` are all below that one.
        allow_any_public_media_host: pictures are fetched from any host, if its address is a public one.
        media_timeout_s: for fetching one picture, redirects included.
        max_images_per_prompt: chats with more are refused; 0: models take no pictures.
        max_image_bytes: of a picture's file.
        max_image_pixels: of its width times its height, looked at before it is decoded.
        max_image_frames: of an animated picture, of which the first is shown.
        mm_processor_kwargs: settings of the model's image processor, for requests that do not say otherwise.
        mm_hash_algo: how pictures are told apart.
        mm_processor_cache_bytes: prepared pictures that are kept.
    """

    allowed_local_media_path: str | None = None
    allowed_media_domains: tuple[str, ...] = ()
    allow_any_public_media_host: bool = False
    media_timeout_s: float = 10.0
    max_images_per_prompt: int = 16
    max_image_bytes: int = 20 << 20
    max_image_pixels: int = 64 << 20
    max_image_frames: int = 1000
    mm_processor_kwargs: dict[str, Any] = {}
    mm_hash_algo: ImageHashAlgo = "sha256"
    mm_processor_cache_bytes: int = 512 << 20

    def media_policy(self) -> MediaPolicy:
        """Where pictures may come from. Raises ValueError: one of the domains is none, or the directory is none."""
        from multimodal import MediaPolicy

        path = self.allowed_local_media_path
        return MediaPolicy(
            max_bytes=self.max_image_bytes,
            timeout_s=self.media_timeout_s,
            allowed_local_path=None if path is None else Path(path),
            allowed_domains=self.allowed_media_domains,
            any_public_host=self.allow_any_public_media_host,
        )

    @property
    def fetches(self) -> bool:
        """Whether pictures come from anywhere but the request itself."""
        return bool(self.allowed_local_media_path or self.allowed_media_domains or self.allow_any_public_media_host)
