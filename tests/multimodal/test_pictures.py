"""Pictures of prompts: what is done once, for whom, and what is refused."""

import asyncio
import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import pytest
from PIL import Image

from multimodal.content_hash import ContentHasher, feature_key
from multimodal.errors import MediaError
from multimodal.image import ImageLimits
from multimodal.layout import ImageLayout
from multimodal.options import ImageOptions
from multimodal.picture import Picture, PictureContent, PictureError, PictureSource
from multimodal.pictures import Pictures, PictureSettings
from multimodal.work_threads import LARGE_PIXELS


@dataclass
class Processor:
    """As many rows as pixels, and a note of who asked for what."""

    fingerprint: str = "stand-in"
    knows_company: bool = False
    refused_width: int | None = None
    layouts_made: list[tuple[int, int]] = field(default_factory=list)
    made: list[tuple[int, int]] = field(default_factory=list)
    may_go_on: threading.Event = field(default_factory=threading.Event)
    may_lay_out: threading.Event = field(default_factory=threading.Event)
    begun: SimpleQueue[tuple[int, int]] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        self.may_go_on.set()
        self.may_lay_out.set()

    def layout(self, height: int, width: int, options: ImageOptions, num_images: int) -> ImageLayout:
        self.layouts_made.append((height, width))
        assert self.may_lay_out.wait(60)
        if width == self.refused_width:
            raise MediaError(f"no picture may be {width} pixels wide")
        stands_alone = num_images == 1 if self.knows_company else None
        num_pixels = height * width
        return ImageLayout("<image>", (num_pixels,), {}, 12 * num_pixels, stands_alone=stands_alone)

    def model_inputs(self, pixels: np.ndarray, options: ImageOptions, layout: ImageLayout) -> dict[str, np.ndarray]:
        self.begun.put(pixels.shape[:2])
        assert self.may_go_on.wait(60)
        self.made.append(pixels.shape[:2])
        if pixels[0, 0, 0] == 13:
            raise MediaError("unlucky pixels")
        return {"pixel_values": pixels.astype(np.float32)[None], "sizes": np.array([pixels.shape[:2]])}


@dataclass
class Loader:
    """URLs are names of files here. Some hosts never answer, and some only once all of them are asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    all_asked: asyncio.Barrier | None = None
    silent: str | None = None
    silent_was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    loaded: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    is_closed: bool = False

    async def load(self, url: str) -> bytes:
        self.loaded.append(url)
        if self.all_asked is not None:
            await self.all_asked.wait()
        if url == self.silent:
            self.silent_was_asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.append(url)
        if url not in self.files:
            raise MediaError("there is no such picture")
        return self.files[url]

    async def close(self) -> None:
        self.is_closed = True


class House:
    """`Pictures` over stand-ins for the network and the model's processor; decoding and hashing are real."""

    def __init__(self, processor: Processor | None = None, **settings: int) -> None:
        self.processor = processor or Processor()
        self.loader = Loader()
        self.pictures = Pictures(
            self.loader,  # type: ignore[arg-type]
            self.processor,  # type: ignore[arg-type]
            ContentHasher(),
            ImageLimits(max_pixels=2 * LARGE_PIXELS),
            PictureSettings(**settings),
        )
        self.stats = self.pictures.stats

    async def one(self, data: PictureContent | None = None, tenant: str = "", **source: object) -> Picture:
        [picture] = await self.pictures.prepare([given(data, **source)], tenant)
        return picture


def given(data: PictureContent | None = None, **source: object) -> PictureSource:
    source = {"where": "picture", "options": ImageOptions()} | source
    return PictureSource(data=data, **source)  # type: ignore[arg-type]


def pixels_of(seed: int, height: int = 6, width: int = 8) -> np.ndarray:
    # 13 is what the stand-in processor does not like.
    return np.random.default_rng(seed).integers(14, 256, (height, width, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray, form: str = "PNG", **how: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **how)
    return file.getvalue()


CAT, DOG = encoded(pixels_of(1)), encoded(pixels_of(2))


@pytest.fixture
async def house():
    house = House()
    yield house
    await house.pictures.close()


class TestIdentity:
    async def test_it_is_what_the_model_sees_that_counts(self, house: House):
        pixels = pixels_of(1)
        files = [CAT, encoded(pixels, "PNG", compress_level=0), encoded(pixels, "BMP"), encoded(pixels, "TIFF")]
        seen = [await house.one(file) for file in files] + [await house.one(pixels)]
        assert len({picture.content_hash for picture in seen}) == 1
        assert len({picture.key for picture in seen}) == 1
        assert house.stats.decodes == 4

    async def test_it_comes_with_size_and_layout(self, house: House):
        cat, dog = await house.pictures.prepare([given(CAT), given(encoded(pixels_of(2, 3, 5)))], "")
        assert (cat.height, cat.width) == (6, 8) and (dog.height, dog.width) == (3, 5)
        assert cat.layout.embed_runs == (48,) and dog.layout.embed_runs == (15,)

    async def test_options_processor_and_company_decide_too(self, house: House):
        low = await house.one(CAT, options=ImageOptions("low"))
        elsewhere = House(Processor(fingerprint="another"))
        company = House(Processor(knows_company=True))
        beside, _ = await company.pictures.prepare([given(CAT), given(DOG)], "")
        hashes = [picture.content_hash for picture in (await house.one(CAT), low, await elsewhere.one(CAT), beside)]
        hashes.append((await company.one(CAT)).content_hash)
        assert len(set(hashes)) == 5

    async def test_the_key_is_the_content_within_the_tenant(self, house: House):
        mine, yours = await house.one(CAT, "mine"), await house.one(CAT, "yours")
        assert mine.content_hash == yours.content_hash
        assert mine.key == feature_key(mine.content_hash, "mine") != yours.key

    async def test_pixels_that_change_afterwards_change_nothing(self, house: House):
        pixels = pixels_of(1)
        picture = await house.one(pixels)
        before = pixels.copy()
        pixels[:] = 0
        inputs = await house.pictures.inputs(picture)
        assert (inputs["pixel_values"][0] == before).all()


class TestOnce:
    async def test_a_picture_sent_again_with_every_turn_is_not_decoded_again(self, house: House):
        for turn in range(5):
            sources = [given(CAT)] * (turn + 1)
            await house.pictures.prepare(sources, "")
        assert house.stats.decodes == 1
        assert (house.stats.memo_queries, house.stats.memo_hits) == (15, 14)

    async def test_a_data_url_that_is_known_is_not_even_read(self, house: House):
        url = "data:image/png;base64,cat"
        house.loader.files = {url: CAT}
        pictures = [await house.one(None, url=url, uuid="cat") for _ in range(3)]
        pictures += [await house.one(None, uuid="cat"), await house.one(CAT)]
        assert len({picture.key for picture in pictures}) == 1
        assert house.loader.loaded == [url]
        house.pictures._pixels.clear()
        assert (await house.pictures.inputs(pictures[0]))["pixel_values"].shape == (1, 6, 8, 3)
        assert house.loader.loaded == [url, url]

    async def test_the_same_picture_twice_in_a_prompt_is_decoded_once(self, house: House):
        first, second = await house.pictures.prepare([given(CAT), given(CAT)], "")
        assert first.key == second.key
        assert house.stats.decodes == 1

    async def test_other_options_decode_nothing_anew(self, house: House):
        await house.one(CAT)
        await house.one(CAT, options=ImageOptions("low"))
        assert house.stats.decodes == 1

    async def test_a_size_is_laid_out_once_however_many_ask_at_once(self, house: House):
        await house.pictures.prepare([given(encoded(pixels_of(number))) for number in range(8)], "")
        await house.one(DOG, "another tenant")
        assert house.processor.layouts_made == [(6, 8), (6, 8)]  # in company, and alone
        await house.one(DOG, options=ImageOptions("low"))
        assert len(house.processor.layouts_made) == 3

    async def test_what_is_wanted_is_decoded_and_processed_once(self, house: House):
        picture = await house.one(CAT)
        first = await house.pictures.inputs(picture)
        again = await house.pictures.inputs(await house.one(encoded(pixels_of(1), "BMP")))
        assert again is first
        assert house.processor.made == [(6, 8)]
        assert house.stats.decodes == 2
        assert (house.stats.processor_cache_queries, house.stats.processor_cache_hits) == (2, 1)
        assert house.stats.processor_calls == 1
        assert house.stats.input_bytes_made == sum(array.nbytes for array in first.values())

    async def test_inputs_are_what_the_processor_makes_and_nobody_can_change_them(self, house: House):
        inputs = await house.pictures.inputs(await house.one(CAT))
        assert (inputs["pixel_values"][0] == pixels_of(1)).all()
        with pytest.raises(ValueError, match="read-only"):
            inputs["pixel_values"][:] = 0

    async def test_pixels_that_were_dropped_meanwhile_are_decoded_again(self):
        house = House(pixel_cache_bytes=0)
        inputs = await house.pictures.inputs(await house.one(CAT))
        assert (inputs["pixel_values"][0] == pixels_of(1)).all()
        assert house.stats.decodes == 2

    async def test_what_does_not_fit_any_more_is_made_again(self):
        house = House(processor_cache_bytes=1_200)
        cat, dog = await house.pictures.prepare([given(CAT), given(DOG)], "")
        for picture in (cat, cat, dog, dog, cat):
            await house.pictures.inputs(picture)
        assert house.stats.processor_calls == 3
        assert house.stats.processor_cache_hits == 2


class TestTenants:
    async def test_the_second_use_hits_everywhere_and_that_of_another_tenant_nowhere(self, house: House):
        async def cost(tenant: str) -> tuple[int, int]:
            before = house.stats.decodes, house.stats.processor_calls
            await house.pictures.inputs(await house.one(CAT, tenant, uuid="cat"))
            return house.stats.decodes - before[0], house.stats.processor_calls - before[1]

        assert await cost("mine") == (1, 1)
        assert await cost("mine") == (0, 0)
        assert await cost("yours") == (1, 1)
        assert await cost("") == (1, 1)
        assert house.stats.memo_hits == 1 and house.stats.processor_cache_hits == 1

    async def test_what_sizes_another_tenant_sent_cannot_be_told(self, house: House):
        for tenant in ("mine", "mine", "yours"):
            await house.one(CAT, tenant)
        assert len(house.processor.layouts_made) == 2

    async def test_pixels_of_another_tenant_are_not_used(self, house: House):
        await house.one(CAT, "mine")
        # The same pixels in another file: only their own tenant's decoding may be spared.
        yours = await house.one(encoded(pixels_of(1), "BMP"), "yours")
        house.pictures._pixels.pop(yours.pixels_key)
        await house.pictures.inputs(yours)
        assert house.stats.decodes == 3

    async def test_who_is_at_work_for_one_tenant_is_not_joined_by_another(self, house: House):
        mine, yours = await house.one(CAT, "mine"), await house.one(CAT, "yours")
        await asyncio.gather(*(house.pictures.inputs(picture) for picture in (mine, mine, yours)))
        assert house.stats.processor_calls == 2
        assert house.stats.processor_cache_hits == 1

    async def test_names_are_a_tenants_own(self, house: House):
        await house.one(CAT, "anna", uuid="pet")
        await house.one(DOG, "otto", uuid="pet")
        assert (await house.one(None, "anna", uuid="pet")).content_hash == (await house.one(CAT)).content_hash
        with pytest.raises(PictureError, match="uuid 'pet' is not known here"):
            await house.one(None, "", uuid="pet")


class TestNames:
    async def test_a_name_alone_brings_the_picture_it_was_sent_with(self, house: House):
        sent = await house.one(CAT, uuid="cat")
        named = await house.one(None, uuid="cat")
        assert named.key == sent.key
        assert (await house.pictures.inputs(named))["pixel_values"].shape == (1, 6, 8, 3)
        assert house.stats.decodes == 1

    async def test_a_name_may_be_given_and_used_in_one_prompt(self, house: House):
        named, sent = await house.pictures.prepare([given(None, uuid="cat"), given(CAT, uuid="cat")], "")
        assert named.key == sent.key

    async def test_the_name_is_no_part_of_the_identity(self, house: House):
        assert (await house.one(CAT, uuid="cat")).content_hash == (await house.one(CAT, uuid="tom")).content_hash

    async def test_the_same_picture_in_another_file_keeps_its_name(self, house: House):
        await house.one(CAT, uuid="cat")
        await house.one(encoded(pixels_of(1), "BMP"), uuid="cat")

    async def test_a_name_is_never_moved_to_another_picture(self, house: House):
        await house.one(CAT, uuid="pet")
        with pytest.raises(PictureError, match="uuid 'pet' names another picture") as caught:
            await house.one(DOG, uuid="pet", where="messages[2].content[0]")
        assert caught.value.where == "messages[2].content[0]"
        assert (await house.one(None, uuid="pet")).content_hash == (await house.one(CAT)).content_hash

    async def test_two_pictures_of_one_prompt_cannot_share_a_name(self, house: House):
        with pytest.raises(PictureError, match="uuid 'pet' names another picture"):
            await house.pictures.prepare([given(CAT, uuid="pet"), given(DOG, uuid="pet")], "")

    async def test_what_had_to_make_room_must_be_sent_again(self):
        house = House(named_bytes=len(CAT) + len(DOG) + 300)
        await house.one(CAT, uuid="cat")
        await house.one(DOG, uuid="dog")
        with pytest.raises(PictureError, match="uuid 'cat' is not known here \\(any more\\); send it again"):
            await house.one(None, uuid="cat")
        await house.one(CAT, uuid="cat")

    async def test_a_long_name_is_cut_in_the_message_and_nowhere_else(self, house: House):
        await house.one(CAT, uuid="x" * 1_000 + "1")
        with pytest.raises(PictureError) as caught:
            await house.one(None, uuid="x" * 1_000 + "2")
        assert len(str(caught.value)) < 200


class TestRefusals:
    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"<html>not here</html>",
            CAT[: len(CAT) // 2],
            np.zeros((0, 4, 3), np.uint8),
            np.zeros((4, 4), np.uint8),
        ],
        ids=["nothing", "html", "truncated", "no rows", "grey"],
    )
    async def test_what_is_no_picture_is_said_of_the_one_that_is_none(self, house: House, content: PictureContent):
        good = given(CAT, where="messages[0].content[0]")
        with pytest.raises(PictureError) as caught:
            await house.pictures.prepare([good, given(content, where="messages[0].content[2]")], "")
        assert caught.value.where == "messages[0].content[2]"
        assert "messages" not in str(caught.value)

    @pytest.mark.parametrize("url", ["data:image/\N{CAT};base64,AAAA", "DATA:,\ud800"])
    async def test_a_data_url_is_ascii_so_that_it_is_as_large_as_it_is_long(self, house: House, url: str):
        with pytest.raises(PictureError, match="ASCII characters only"):
            await house.one(url=url)

    async def test_a_source_needs_exactly_one_content(self, house: House):
        with pytest.raises(PictureError, match="needs a url, data, or the uuid"):
            await house.one()
        with pytest.raises(PictureError, match="either a url or data"):
            await house.one(CAT, url="cat")

    async def test_decoded_pixels_have_the_limit_of_files(self, house: House):
        with pytest.raises(PictureError, match=f"4194305 × 2 = 8388610 pixels, more than {2 * LARGE_PIXELS}"):
            await house.one(np.zeros((2, LARGE_PIXELS + 1, 3), np.uint8))

    async def test_too_many_are_refused_before_anything_is_loaded(self):
        house = House(max_images_per_prompt=2)
        sources = [given(url=f"picture {number}", where=f"content[{number}]") for number in range(3)]
        with pytest.raises(PictureError, match="the prompt has 3 pictures; at most 2") as caught:
            await house.pictures.prepare(sources, "")
        assert caught.value.where == "content[2]"
        assert house.loader.loaded == []

    async def test_what_the_processor_does_not_take_is_the_callers_fault(self):
        house = House(Processor(refused_width=8))
        with pytest.raises(PictureError, match="no picture may be 8 pixels wide") as caught:
            await house.one(CAT, where="here")
        assert caught.value.where == "here"

    async def test_a_failing_call_reaches_all_who_wait_and_is_tried_again(self, house: House):
        picture = await house.one(np.full((2, 2, 3), 13, np.uint8))
        calls = [house.pictures.inputs(picture) for _ in range(3)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(result) for result in results] == ["unlucky pixels"] * 3
        assert house.stats.processor_calls == 1
        with pytest.raises(PictureError, match="unlucky"):
            await house.pictures.inputs(picture)
        assert house.stats.processor_calls == 2


class TestSideBySide:
    async def test_pictures_are_fetched_at_the_same_time(self, house: House):
        house.loader.files = {"cat": CAT, "dog": DOG}
        house.loader.all_asked = asyncio.Barrier(2)
        cat, dog = await house.pictures.prepare([given(url="cat"), given(url="dog")], "")
        assert [cat.content, dog.content] == [CAT, DOG]

    async def test_one_that_fails_ends_the_wait_for_the_others(self, house: House):
        house.loader.silent = "never"
        with pytest.raises(PictureError, match="no such picture"):
            await house.pictures.prepare([given(url="never"), given(url="missing")], "")
        assert house.loader.given_up == ["never"]

    async def test_a_cancelled_prompt_gives_up_its_pictures(self, house: House):
        house.loader.silent = "never"
        prepared = asyncio.create_task(house.pictures.prepare([given(url="never")], ""))
        await house.loader.silent_was_asked.wait()
        prepared.cancel()
        with pytest.raises(asyncio.CancelledError):
            await prepared
        assert house.loader.given_up == ["never"]

    async def test_who_gives_up_does_not_disturb_those_who_wait_for_the_same(self, house: House):
        picture = await house.one(CAT)
        house.processor.may_go_on.clear()
        calls = [asyncio.create_task(house.pictures.inputs(picture)) for _ in range(3)]
        await asyncio.to_thread(house.processor.begun.get)
        calls[0].cancel()
        calls[2].cancel()
        await asyncio.wait([calls[0], calls[2]])
        house.processor.may_go_on.set()
        assert (await calls[1])["pixel_values"].shape == (1, 6, 8, 3)
        assert calls[0].cancelled() and calls[2].cancelled()
        assert house.processor.made == [(6, 8)]

    async def test_when_all_have_given_up_the_next_one_begins_anew(self, house: House):
        picture = await house.one(CAT)
        house.processor.may_go_on.clear()
        call = asyncio.create_task(house.pictures.inputs(picture))
        await asyncio.to_thread(house.processor.begun.get)
        call.cancel()
        next_call = asyncio.create_task(house.pictures.inputs(picture))
        house.processor.may_go_on.set()
        assert (await next_call)["pixel_values"].shape == (1, 6, 8, 3)

    async def test_what_nobody_waits_for_any_more_is_not_begun(self):
        house = House(num_threads=1)
        cat, dog = await house.pictures.prepare([given(CAT), given(encoded(pixels_of(2, 3, 5)))], "")
        house.processor.may_go_on.clear()
        running = asyncio.create_task(house.pictures.inputs(cat))
        await asyncio.to_thread(house.processor.begun.get)
        given_up = asyncio.create_task(house.pictures.inputs(dog))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        house.processor.may_go_on.set()
        await running
        await house.pictures.inputs(await house.one(encoded(pixels_of(3, 4, 4))))
        assert house.processor.made == [(6, 8), (4, 4)]

    async def test_large_pictures_do_not_hold_up_small_ones(self, house: House):
        height = LARGE_PIXELS // 2_048 + 1
        large = [await house.one(np.full((height, 2_048, 3), colour, np.uint8)) for colour in (20, 21, 22)]
        small = await house.one(CAT)
        house.processor.may_go_on.clear()
        held_up = [asyncio.create_task(house.pictures.inputs(picture)) for picture in large]
        assert await asyncio.to_thread(house.processor.begun.get) == (height, 2_048)
        call = asyncio.create_task(house.pictures.inputs(small))
        # It gets its turn while the large one that began still runs, and two more wait.
        assert await asyncio.to_thread(house.processor.begun.get) == (6, 8)
        house.processor.may_go_on.set()
        await asyncio.gather(call, *held_up)

    async def test_neither_a_known_picture_nor_one_that_is_wanted_waits_for_those_that_come_in(self):
        house = House(num_threads=1)
        cat = await house.one(CAT)
        house.processor.may_lay_out.clear()
        coming = [asyncio.create_task(house.one(encoded(pixels_of(3, 4, width)))) for width in (4, 5)]
        async with asyncio.timeout(30):
            while len(house.processor.layouts_made) < 2:  # noqa: ASYNC110 - a thread makes them
                await asyncio.sleep(0.001)
            assert (await house.one(CAT)).key == cat.key
            assert (await house.pictures.inputs(cat))["pixel_values"].shape == (1, 6, 8, 3)
        house.processor.may_lay_out.set()
        await asyncio.gather(*coming)

    async def test_the_event_loop_goes_on_meanwhile(self, house: House):
        house.processor.may_go_on.clear()
        call = asyncio.create_task(house.pictures.inputs(await house.one(CAT)))
        await asyncio.to_thread(house.processor.begun.get)
        await asyncio.sleep(0.01)
        house.processor.may_go_on.set()
        await call


async def test_closing_drops_what_has_not_begun_and_closes_the_loader():
    house = House(num_threads=1)
    pictures = await house.pictures.prepare([given(CAT), given(DOG)], "")
    house.processor.may_go_on.clear()
    running, waiting = (asyncio.create_task(house.pictures.inputs(picture)) for picture in pictures)
    await asyncio.to_thread(house.processor.begun.get)
    await house.pictures.close()
    assert house.loader.is_closed
    with pytest.raises(asyncio.CancelledError):
        await waiting
    house.processor.may_go_on.set()
    assert (await running)["pixel_values"].shape == (1, 6, 8, 3)


async def test_memory_is_bounded_whatever_is_sent():
    house = House(memo_bytes=2_048, pixel_cache_bytes=2_048, processor_cache_bytes=4_096, named_bytes=2_048)

    async def send(numbers: Sequence[int]) -> None:
        for number in numbers:
            picture = await house.one(encoded(pixels_of(number)), str(number), uuid=str(number))
            await house.pictures.inputs(picture)

    await send(range(30))
    pictures = house.pictures
    for cache in (pictures._memo, pictures._pixels, pictures._inputs, pictures._named._known):
        assert 0 < cache.num_bytes <= cache.max_bytes
    assert house.stats.processor_calls == 30
