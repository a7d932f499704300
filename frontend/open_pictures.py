"""What the HTTP process needs for pictures, from its settings."""

from __future__ import annotations

from pathlib import Path

from ipc.threads import WORKER_THREADS
from multimodal import (
    ContentHasher,
    ImageLimits,
    MediaLoader,
    OptionError,
    Pictures,
    PictureSettings,
    ProcessorLoadError,
    load_picture_processor,
)

from .picture_config import PictureConfig
from .prompt.pictures import ChatPictures


def open_pictures(model_dir: Path, config: PictureConfig) -> ChatPictures | None:
    """None if the model, or its server, takes no pictures.

    Raises ValueError: the model's processor cannot be used, or the settings cannot be.
    """
    processor = None
    if config.max_images_per_prompt:
        try:
            processor = load_picture_processor(model_dir, config.mm_processor_kwargs)
        except ProcessorLoadError as error:
            raise ValueError(f"{error} (--limit-mm-per-prompt image=0 serves it without pictures)") from error
        except OptionError as error:
            raise ValueError(f"--mm-processor-kwargs: {error}") from error
    if processor is None:
        return None
    pictures = Pictures(
        MediaLoader(config.media_policy()),
        processor,
        ContentHasher(config.mm_hash_algo),
        ImageLimits(max_pixels=config.max_image_pixels, max_frames=config.max_image_frames),
        PictureSettings(
            max_images_per_prompt=config.max_images_per_prompt,
            processor_cache_bytes=config.mm_processor_cache_bytes,
            num_threads=WORKER_THREADS,
        ),
    )
    return ChatPictures(pictures)
