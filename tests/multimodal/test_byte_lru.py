"""A cache bounded in bytes."""

from hypothesis import given
from hypothesis import strategies as st

from multimodal.byte_lru import ENTRY_BYTES, ByteLRU


def cache_of(num_entries: int, value_bytes: int = 100) -> ByteLRU[str, str]:
    return ByteLRU(num_entries * (value_bytes + ENTRY_BYTES))


def test_the_least_recently_used_make_room():
    cache = cache_of(2)
    cache.put("a", "A", 100)
    cache.put("b", "B", 100)
    assert cache.get("a") == "A"
    cache.put("c", "C", 100)
    assert cache.get("b") is None
    assert cache.get("a") == "A" and cache.get("c") == "C"


def test_a_large_value_takes_the_place_of_several():
    cache = cache_of(3)
    for key in "abc":
        cache.put(key, key, 100)
    cache.put("large", "L", 200 + ENTRY_BYTES)
    assert [cache.get(key) for key in ("a", "b", "c", "large")] == [None, None, "c", "L"]


def test_what_is_larger_than_all_is_not_kept_and_evicts_nothing():
    cache = cache_of(2)
    cache.put("a", "A", 100)
    cache.put("giant", "G", cache.max_bytes)
    assert cache.get("giant") is None
    assert cache.get("a") == "A"


def test_a_new_value_replaces_the_old_one_and_its_weight():
    cache = cache_of(2)
    cache.put("a", "A", 100)
    cache.put("a", "A2", 50)
    assert cache.get("a") == "A2"
    assert cache.num_bytes == 50 + ENTRY_BYTES


def test_empty_values_cannot_pile_up():
    cache: ByteLRU[int, bytes] = ByteLRU(10 * ENTRY_BYTES)
    for number in range(1_000):
        cache.put(number, b"", 0)
    assert len(cache) == 10


def test_without_room_nothing_is_kept():
    cache: ByteLRU[int, bytes] = ByteLRU(0)
    cache.put(1, b"", 0)
    assert len(cache) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 1_000))), max_size=60))
def test_it_agrees_with_a_list_that_is_kept_in_order(operations: list[tuple[int, int | None]]):
    """An operation is a look-up (None) or a value of that many bytes."""
    max_bytes = 1_500
    cache: ByteLRU[int, int] = ByteLRU(max_bytes)
    model: list[tuple[int, int]] = []
    for key, num_bytes in operations:
        kept = next((entry for entry in model if entry[0] == key), None)
        if num_bytes is None:
            assert cache.get(key) == (kept and kept[1])
            if kept:
                model.remove(kept)
                model.append(kept)
            continue
        if kept:
            model.remove(kept)
        cache.put(key, num_bytes, num_bytes)
        if num_bytes + ENTRY_BYTES <= max_bytes:
            model.append((key, num_bytes))
            while sum(size + ENTRY_BYTES for _, size in model) > max_bytes:
                model.pop(0)
        assert cache.num_bytes == sum(size + ENTRY_BYTES for _, size in model) <= max_bytes
        assert len(cache) == len(model)
