"""Bytes → image → content hash → model inputs, with limits; placeholder ranges and their extra keys.

Imports nothing of Foreword's: an embedder without HTTP needs it as much as the frontend does. Names are loaded when
they are first used, so importing this package loads neither Pillow nor transformers; nothing of it loads torch.

    processor = load_picture_processor(model_dir)
    pictures = Pictures(MediaLoader(MediaPolicy()), processor, ContentHasher(), ImageLimits())

    source = PictureSource(where="the cat", options=processor.options(), data=Path("cat.png").read_bytes())
    [cat] = await pictures.prepare([source], tenant="")

    text = processor.expand(rendered_prompt, [cat.layout])     # one `processor.image_token` in it → its placeholders
    token_ids = tokenizer.encode(text)
    [place] = processor.placeholders(token_ids, [cat.layout])
    [(start, end)] = processor.mm_spans([place])

An engine is told of it with a `MultimodalFeature` of `cat.key`, `place` and `cat.layout`, and with an `ExtraKeySpan`
over `[start, end)` of the kind `mm`, whose key is `cat.content_hash.hex()`. Only if it asks for the feature:

    inputs = await pictures.inputs(cat)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .content_hash import ContentHasher, MMHashAlgo, feature_key
    from .errors import MediaError
    from .image import ImageLimits, decode_image, image_size
    from .layout import ImageLayout
    from .media import MediaLoader, MediaPolicy
    from .options import ImageOptions, OptionError
    from .picture import Picture, PictureError, PictureSource
    from .pictures import Pictures, PictureSettings, PictureStats
    from .placeholders import Placeholder, PlaceholderError
    from .processor import PictureProcessor, load_picture_processor
    from .processor_loading import ProcessorLoadError

_HOMES = {
    "ContentHasher": "content_hash",
    "ImageLayout": "layout",
    "ImageLimits": "image",
    "ImageOptions": "options",
    "MMHashAlgo": "content_hash",
    "MediaError": "errors",
    "MediaLoader": "media",
    "MediaPolicy": "media",
    "OptionError": "options",
    "Picture": "picture",
    "PictureError": "picture",
    "PictureProcessor": "processor",
    "PictureSettings": "pictures",
    "PictureSource": "picture",
    "PictureStats": "pictures",
    "Pictures": "pictures",
    "Placeholder": "placeholders",
    "PlaceholderError": "placeholders",
    "ProcessorLoadError": "processor_loading",
    "decode_image": "image",
    "feature_key": "content_hash",
    "image_size": "image",
    "load_picture_processor": "processor",
}

__all__ = [
    "ContentHasher",
    "ImageLayout",
    "ImageLimits",
    "ImageOptions",
    "MMHashAlgo",
    "MediaError",
    "MediaLoader",
    "MediaPolicy",
    "OptionError",
    "Picture",
    "PictureError",
    "PictureProcessor",
    "PictureSettings",
    "PictureSource",
    "PictureStats",
    "Pictures",
    "Placeholder",
    "PlaceholderError",
    "ProcessorLoadError",
    "decode_image",
    "feature_key",
    "image_size",
    "load_picture_processor",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
