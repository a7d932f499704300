"""From where a picture is to what the engine must know of it; and, when the engine asks, to what the model takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .byte_lru import ByteLRU
from .content_hash import ContentHasher, feature_key
from .errors import MediaError
from .image import ImageLimits, decode_image, image_size
from .known_layouts import KnownLayouts
from .named_pictures import KnownContent, NamedPictures
from .picture import EncodedPicture, Picture, PictureContent, PictureError, PictureSource, errors_at
from .shared_calls import SharedCalls
from .work_threads import WorkThreads

if TYPE_CHECKING:
    from .layout import ImageLayout
    from .media import MediaLoader
    from .options import ImageOptions
    from .processor import PictureProcessor

T = TypeVar("T")

ModelInputs = dict[str, np.ndarray]

# What is remembered of a decoded picture: a digest and two numbers.
_MEMO_ENTRY_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSettings:
    """Bounds of what `Pictures` takes and keeps.

    Args:
        max_images_per_prompt: more are refused.
        processor_cache_bytes: model inputs that are kept for the next time they are wanted.
        pixel_cache_bytes: decoded pixels that are kept until the engine has said whether it wants inputs of them.
        memo_bytes: what is remembered of pictures so that the same file is not decoded again, about 2,000 per MiB.
        named_bytes: contents that clients gave a `uuid`.
        num_threads: threads for all but the largest pictures (`WorkThreads`): so many decode what comes in, as many
            make what an engine wants.
    """

    max_images_per_prompt: int = 16
    processor_cache_bytes: int = 512 << 20
    pixel_cache_bytes: int = 256 << 20
    memo_bytes: int = 16 << 20
    named_bytes: int = 256 << 20
    num_threads: int = 2


@dataclass(slots=True)
class PictureStats:
    """What was done since the start.

    A query of the processor cache hits also where the same inputs are being made for someone else already.
    """

    memo_queries: int = 0
    memo_hits: int = 0
    decodes: int = 0
    processor_cache_queries: int = 0
    processor_cache_hits: int = 0
    processor_calls: int = 0
    input_bytes_made: int = 0


@dataclass(frozen=True, slots=True)
class _Decoded:
    pixels_digest: bytes
    height: int
    width: int


class Pictures:
    """Prepares the pictures of prompts and makes model inputs of them. Use from one event loop; `close()` it at last.

    Nothing that one tenant caused to be kept is used for another: what was decoded, laid out, processed or named counts
    within its tenant.

    Args:
        loader: fetches URLs; closed with this.
        processor: of the model the prompts are for.
        limits: of picture files and of pixels given.
    """

    def __init__(
        self,
        loader: MediaLoader,
        processor: PictureProcessor,
        hasher: ContentHasher,
        limits: ImageLimits,
        settings: PictureSettings | None = None,
    ) -> None:
        self.loader = loader
        self.processor = processor
        self.settings = settings or PictureSettings()
        self.stats = PictureStats()
        self._hasher = hasher
        self._limits = limits
        self._threads = WorkThreads(self.settings.num_threads)
        # An engine waits for it, and not for ever: it must not queue behind all that has only come in.
        self._threads_of_wanted = WorkThreads(self.settings.num_threads)
        self._memo: ByteLRU[bytes, _Decoded] = ByteLRU(self.settings.memo_bytes)
        self._pixels: ByteLRU[bytes, np.ndarray] = ByteLRU(self.settings.pixel_cache_bytes)
        self._inputs: ByteLRU[bytes, ModelInputs] = ByteLRU(self.settings.processor_cache_bytes)
        self._layouts = KnownLayouts(processor, self._threads)
        self._named = NamedPictures(self.settings.named_bytes)
        self._decoding: SharedCalls[_Decoded] = SharedCalls()
        self._processing: SharedCalls[ModelInputs] = SharedCalls()

    async def close(self) -> None:
        """Drop what has not begun. What is being decoded or processed cannot be interrupted; it is not waited for."""
        self._threads.close()
        self._threads_of_wanted.close()
        await self.loader.close()

    async def prepare(self, sources: Sequence[PictureSource], tenant: str) -> list[Picture]:
        """The pictures of one prompt, in order. A file that this tenant sent before is not decoded again.

        `tenant` is the request's `cache_salt`, empty without one.

        Raises:
            PictureError: too many; or one of them cannot be had, is no picture, is over a limit, or is nothing that the
                model's processor takes. The others are given up then.
        """
        self.check_number(sources)
        sent = [source for source in sources if source.url is not None or source.data is not None]
        found = dict(zip(map(id, sent), await _all(self._receive(source, tenant) for source in sent)))
        # Afterwards, so that a picture may be named and referred to in the same prompt.
        known = [found.get(id(source)) or self._recall(source, tenant) for source in sources]
        return await _all(self._place(source, content, len(sources), tenant) for source, content in zip(sources, known))

    async def inputs(self, picture: Picture) -> ModelInputs:
        """What the model takes of one picture, by the names of its arguments. The arrays are shared and read-only.

        Whoever asks for the same at the same time waits for the same computation.

        Raises:
            PictureError: the processor refuses the picture after all.
        """
        self.stats.processor_cache_queries += 1
        cached = self._inputs.get(picture.key)
        if cached is not None or picture.key in self._processing:
            self.stats.processor_cache_hits += 1
        if cached is not None:
            return cached
        with errors_at(picture.where):
            return await self._processing.run(picture.key, lambda: self._process(picture))

    def check_number(self, sources: Sequence[PictureSource]) -> None:
        """What `prepare` checks first, for callers that have work before it. Raises PictureError: too many."""
        most = self.settings.max_images_per_prompt
        if len(sources) > most:
            raise PictureError(
                f"the prompt has {len(sources)} pictures; at most {most} are allowed (--limit-mm-per-prompt)",
                sources[most].where,
            )

    async def _receive(self, source: PictureSource, tenant: str) -> KnownContent:
        """A picture that comes with its content."""
        with errors_at(source.where):
            content = await self._load(source)
            if isinstance(content, EncodedPicture):
                seen = await self._look_at_file(content, tenant)
            else:
                digest = await self._threads.run(lambda: self._hasher.pixels(content), content.size // 3)
                seen = _Decoded(digest, *content.shape[:2])
            known = KnownContent(content, seen.pixels_digest, seen.height, seen.width)
            if source.uuid is not None:
                self._named.bind(source.uuid, tenant, known)
            return known

    def _recall(self, source: PictureSource, tenant: str) -> KnownContent:
        """A picture that comes as a name alone."""
        with errors_at(source.where):
            if source.uuid is None:
                raise MediaError("a picture needs a url, data, or the uuid of one that was sent before")
            return self._named.get(source.uuid, tenant)

    async def _load(self, source: PictureSource) -> PictureContent:
        if source.url is not None and source.data is not None:
            raise MediaError("a picture has either a url or data, not both")
        if source.url is not None:
            if source.url[:5].lower() != "data:":
                return await self.loader.load(source.url)
            # One other character, and all of them take two or four bytes of memory: more than anybody counts.
            if not source.url.isascii():
                raise MediaError("a data: URL has ASCII characters only; what is not is written with %")
            return source.url
        data = source.data
        if not isinstance(data, np.ndarray):
            return bytes(data or b"")
        _check_pixels(data, self._limits)
        # A copy, so that what is hashed now is what the model sees later.
        return await self._threads.run(lambda: _read_only(np.array(data, order="C")), data.size // 3)

    async def _look_at_file(self, encoded: EncodedPicture, tenant: str) -> _Decoded:
        digest = await self._threads.run_quick(lambda: self._hasher.encoded(encoded))
        memo_key = feature_key(digest, tenant)
        self.stats.memo_queries += 1
        seen = self._memo.get(memo_key)
        if seen is not None:
            self.stats.memo_hits += 1
            return seen

        async def look() -> _Decoded:
            pixels, digest = await self._decode(encoded, self._hasher.pixels, self._threads)
            seen = _Decoded(digest, *pixels.shape[:2])
            self._memo.put(memo_key, seen, _MEMO_ENTRY_BYTES)
            self._pixels.put(feature_key(digest, tenant), pixels, pixels.nbytes)
            return seen

        return await self._decoding.run(memo_key, look)

    async def _decode(
        self, encoded: EncodedPicture, use: Callable[[np.ndarray], T], threads: WorkThreads
    ) -> tuple[np.ndarray, T]:
        """The picture, and what `use` makes of it, in a thread."""
        limits = self._limits
        file = await self.loader.load(encoded) if isinstance(encoded, str) else encoded
        height, width = await threads.run_quick(lambda: image_size(file, limits))

        def decode() -> tuple[np.ndarray, T]:
            pixels = _read_only(decode_image(file, limits))
            return pixels, use(pixels)

        self.stats.decodes += 1
        return await threads.run(decode, height * width)

    async def _place(self, source: PictureSource, known: KnownContent, num_images: int, tenant: str) -> Picture:
        height, width, options = known.height, known.width, source.options
        with errors_at(source.where):
            layout = await self._layouts.get(height, width, options, num_images, tenant)
        content_hash = self._content_hash(known.pixels_digest, options, layout)
        return Picture(
            where=source.where,
            content_hash=content_hash,
            key=feature_key(content_hash, tenant),
            height=height,
            width=width,
            layout=layout,
            options=options,
            content=known.content,
            pixels_key=feature_key(known.pixels_digest, tenant),
        )

    def _content_hash(self, pixels_digest: bytes, options: ImageOptions, layout: ImageLayout) -> bytes:
        return self._hasher.content(
            pixels_digest,
            options=options.canonical,
            fingerprint=self.processor.fingerprint,
            stands_alone=layout.stands_alone,
        )

    async def _process(self, picture: Picture) -> ModelInputs:
        def process(pixels: np.ndarray) -> ModelInputs:
            made = self.processor.model_inputs(pixels, picture.options, picture.layout)
            return {name: _read_only(np.ascontiguousarray(array)) for name, array in made.items()}

        self.stats.processor_calls += 1
        content = picture.content
        pixels = self._pixels.get(picture.pixels_key) if isinstance(content, EncodedPicture) else content
        if pixels is None:
            assert isinstance(content, EncodedPicture)
            _, inputs = await self._decode(content, process, self._threads_of_wanted)
        else:
            inputs = await self._threads_of_wanted.run(partial(process, pixels), picture.height * picture.width)
        num_bytes = sum(array.nbytes for array in inputs.values())
        self.stats.input_bytes_made += num_bytes
        self._inputs.put(picture.key, inputs, num_bytes)
        return inputs


def _check_pixels(pixels: np.ndarray, limits: ImageLimits) -> None:
    height, width = pixels.shape[:2] if pixels.ndim == 3 else (0, 0)
    if pixels.dtype != np.uint8 or height * width == 0 or pixels.shape[2] != 3:
        raise MediaError(f"decoded pixels are uint8 [height, width, 3], not {pixels.dtype} {list(pixels.shape)}")
    limits.check_size(height, width)


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first error ends the others, and comes as it is."""
    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        failed = errors.exceptions[0]
    if failed is not None:
        raise failed
    return [task.result() for task in tasks]
