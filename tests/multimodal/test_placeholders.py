"""Pictures in text and in tokens: counted, found, told apart; and never mistaken."""

from __future__ import annotations

import pytest

from multimodal.layout import ImageLayout
from multimodal.options import ImageOptions
from multimodal.placeholders import Placeholder, PlaceholderError, content_spans, expand, find_placeholders
from tests.multimodal.families import processor_of, real_processor_of
from tests.tiny_vlm_processors import FAMILIES

PICTURE, BREAK = 10, 12


def layout_of(*embed_runs: int) -> ImageLayout:
    return ImageLayout("<image>" * sum(embed_runs), embed_runs, {}, 0)


def test_the_published_example():
    token_ids = [1, 3, 7493, 1681, 1294, 1593, 3937, 9551, *[PICTURE] * 41, 4]
    (found,) = find_placeholders(token_ids, PICTURE, [layout_of(41)])
    assert (found.start, found.num_tokens, found.embed_ranges) == (8, 41, ((0, 41),))
    assert content_spans([found], joins_touching=False) == [(8, 49)]


def test_touching_pictures_are_told_apart_by_their_counts():
    found = find_placeholders([7, *[PICTURE] * 9, 8], PICTURE, [layout_of(2), layout_of(4), layout_of(3)])
    assert [(place.start, place.end) for place in found] == [(1, 3), (3, 7), (7, 10)]


def test_what_lies_between_the_rows_belongs_to_the_picture_and_what_follows_the_last_does_not():
    row = [PICTURE, PICTURE, BREAK]
    found = find_placeholders([5, *row * 3, *row * 2], PICTURE, [layout_of(2, 2, 2), layout_of(2, 2)])
    assert found[0] == Placeholder(1, 8, ((0, 2), (3, 5), (6, 8)))
    assert found[1] == Placeholder(10, 5, ((0, 2), (3, 5)))


@pytest.mark.parametrize("missing", [-1, 1])
def test_another_number_of_image_tokens_is_an_error_not_a_shift(missing: int):
    with pytest.raises(PlaceholderError, match=f"has {5 + missing} image tokens; its 2 pictures fill 5"):
        find_placeholders([1, *[PICTURE] * (5 + missing), 2], PICTURE, [layout_of(2), layout_of(3)])


def test_the_right_number_of_image_tokens_in_the_wrong_places_is_an_error():
    with pytest.raises(PlaceholderError, match="picture 2 are not laid out"):
        find_placeholders([PICTURE, PICTURE, 3, PICTURE, 4, PICTURE, PICTURE], PICTURE, [layout_of(2), layout_of(3)])
    with pytest.raises(PlaceholderError, match="picture 1 are not laid out"):
        find_placeholders([PICTURE] * 4, PICTURE, [layout_of(2, 2)])


def test_no_pictures_no_places():
    assert find_placeholders([1, 2], PICTURE, []) == []
    with pytest.raises(PlaceholderError, match="has 1 image tokens; its 0 pictures fill 0"):
        find_placeholders([1, PICTURE], PICTURE, [])


def test_replacements_come_in_order_and_are_not_replaced_again():
    layouts = [ImageLayout("[<i><i>]", (2,), {}, 0), ImageLayout("(<i>)", (1,), {}, 0)]
    assert expand("a<i>b<i>", "<i>", layouts) == "a[<i><i>]b(<i>)"
    assert expand("no picture", "<i>", []) == "no picture"


@pytest.mark.parametrize("text", ["<i>", "<i> and <i> and <i>"])
def test_as_many_image_tokens_as_pictures(text: str):
    with pytest.raises(PlaceholderError, match=f"has {text.count('<i>')} times '<i>' for 2 pictures"):
        expand(text, "<i>", [layout_of(1), layout_of(1)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_user_who_spells_an_image_token_gets_no_picture(family: str):
    processor, backend = processor_of(family), real_processor_of(family).tokenizer.backend_tokenizer
    layouts = [processor.layout(40, 60, ImageOptions(), 1)]
    for spelling in processor.spellings:
        text = f"{processor.image_token} The user writes {spelling}."
        if spelling == processor.image_token:
            with pytest.raises(PlaceholderError):
                processor.expand(text, layouts)
        elif backend.token_to_id(spelling) == processor.embed_token_id:
            token_ids = backend.encode(processor.expand(text, layouts), add_special_tokens=False).ids
            with pytest.raises(PlaceholderError):
                processor.placeholders(token_ids, layouts)


def test_where_touching_pictures_see_each_other_each_ones_content_decides_the_whole_group():
    touching = [Placeholder(2, 3, ((0, 3),)), Placeholder(5, 4, ((0, 4),)), Placeholder(10, 2, ((0, 2),))]
    assert content_spans(touching, joins_touching=False) == [(2, 5), (5, 9), (10, 12)]
    assert content_spans(touching, joins_touching=True) == [(2, 9), (2, 9), (10, 12)]
    assert content_spans([], joins_touching=True) == []
    for family in FAMILIES:
        assert processor_of(family).joins_touching == (family == "gemma3")
        assert processor_of(family).mm_spans(touching)[0] == ((2, 9) if family == "gemma3" else (2, 5))
