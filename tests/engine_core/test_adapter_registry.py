"""Which LoRA adapters an engine knows by which names, and what it refuses."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine_core.errors import AdapterError
from engine_core.lora.adapter import Adapter
from engine_core.lora.registry import AdapterRegistry
from tests.fake_adapters import fake_digest, read_fake_adapter, write_fake_adapter


@pytest.fixture
def registry() -> AdapterRegistry:
    return AdapterRegistry(read_fake_adapter, 3, "model")


@pytest.fixture
def w1(tmp_path: Path) -> Path:
    return write_fake_adapter(tmp_path / "w1", "w1", rank=4)


@pytest.fixture
def w2(tmp_path: Path) -> Path:
    return write_fake_adapter(tmp_path / "w2", "w2", targets_encoder=True)


def refusal(registry: AdapterRegistry, name: str, path: Path | str, *args, **options) -> tuple[str, str]:
    before = registry.infos()
    with pytest.raises(AdapterError) as caught:
        registry.load(name, path, *args, **options)
    assert registry.infos() == before
    return caught.value.reason, caught.value.param


def test_what_is_loaded_is_told_in_the_order_of_names(registry: AdapterRegistry, w1: Path, w2: Path):
    second, first = registry.load("second", w2), registry.load("first", w1)
    assert registry.infos() == [second, first]
    assert (first.name, first.digest, first.path, first.rank) == ("first", fake_digest("w1").hex(), str(w1), 4)
    assert second.targets_encoder and not first.targets_encoder
    assert registry.num_bytes == 4


def test_the_same_weights_again_under_the_same_name_are_fine(registry: AdapterRegistry, w1: Path, tmp_path: Path):
    registry.load("a", w1)
    adapter = registry.get("a")
    copy = write_fake_adapter(tmp_path / "copy", "w1")
    assert registry.load("a", copy).path == str(copy)
    assert registry.get("a") is adapter
    assert len(registry.infos()) == 1


def test_a_name_does_not_change_its_weights_unless_told_to(registry: AdapterRegistry, w1: Path, w2: Path):
    registry.load("a", w1)
    assert refusal(registry, "a", w2) == ("name_taken", "lora_name")
    registry.load("a", w2, replaces=True)
    assert registry.infos()[0].digest == fake_digest("w2").hex()
    assert registry.is_loaded(fake_digest("w2")) and not registry.is_loaded(fake_digest("w1"))


def test_two_names_of_the_same_weights_share_them(registry: AdapterRegistry, w1: Path):
    registry.load("a", w1)
    registry.load("b", w1)
    assert registry.get("a") is registry.get("b")
    assert registry.num_bytes == 2
    registry.unload("a")
    assert registry.get("a") is None and registry.is_loaded(fake_digest("w1"))


def test_weights_that_are_loaded_again_while_a_request_has_them_are_kept_once(registry: AdapterRegistry, w1: Path):
    registry.load("a", w1)
    of_a_request = registry.get("a")
    registry.unload("a")
    registry.load("b", w1)
    assert registry.get("b") is of_a_request


def test_there_are_at_most_so_many_and_replacing_one_needs_no_room(registry: AdapterRegistry, w1: Path, w2: Path):
    for name in "abc":
        registry.load(name, w1)
    assert refusal(registry, "d", w1) == ("too_many_adapters", "lora_name")
    registry.load("c", w2, replaces=True)
    registry.unload("a")
    registry.load("d", w1)


def test_what_is_not_loaded_cannot_be_unloaded(registry: AdapterRegistry, w1: Path):
    registry.load("a", w1)
    registry.unload("a")
    with pytest.raises(AdapterError, match="'a'") as caught:
        registry.unload("a")
    assert (caught.value.reason, caught.value.param) == ("unknown_adapter", "lora_name")


@pytest.mark.parametrize("name", ["", " a", "a ", "a\n", "a\0b", "\ud800", "a" * 257, "\u202eevil"])
def test_a_name_can_be_printed_and_is_not_too_long(registry: AdapterRegistry, w1: Path, name: str):
    assert refusal(registry, name, w1) == ("invalid_name", "lora_name")


@pytest.mark.parametrize("name", ["a" * 256, "größer", "a b/c:d", "模型"])
def test_any_other_name_will_do(registry: AdapterRegistry, w1: Path, name: str):
    assert registry.load(name, w1).name == name


def test_the_models_own_name_is_taken(registry: AdapterRegistry, w1: Path):
    assert refusal(registry, "model", w1) == ("name_taken", "lora_name")


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800", "a" * 5000])
def test_what_can_be_no_path_is_not_looked_for(registry: AdapterRegistry, path: str):
    assert refusal(registry, "a", path) == ("path_not_found", "lora_path")


def test_a_relative_path_begins_at_the_root(registry: AdapterRegistry, w1: Path, w2: Path):
    assert registry.load("a", "w1", w1.parent).path == str(w1)
    assert refusal(registry, "b", "../w2", w1) == ("outside_lora_root", "lora_path")


def test_with_a_digest_no_other_weights_will_do(registry: AdapterRegistry, w1: Path, w2: Path):
    wanted = fake_digest("w1").hex()
    assert refusal(registry, "a", w2, digest=wanted) == ("other_weights", "lora_path")
    registry.load("a", w1, digest=wanted)


def test_what_reading_says_is_passed_on_and_the_next_one_is_read(registry: AdapterRegistry, w1: Path, tmp_path: Path):
    assert refusal(registry, "a", tmp_path / "none") == ("path_not_found", "lora_path")
    (tmp_path / "empty").mkdir()
    assert refusal(registry, "a", tmp_path / "empty") == ("invalid_adapter", "lora_path")
    registry.load("a", w1)


def test_while_one_is_read_names_can_be_looked_up_and_unloaded(w1: Path, w2: Path):
    reading, go_on = threading.Event(), threading.Event()

    def read_slowly(path: Path, root: Path | None) -> Adapter:
        if path == w2:
            reading.set()
            assert go_on.wait(20)
        return read_fake_adapter(path, root)

    registry = AdapterRegistry(read_slowly, 3, "model")
    registry.load("a", w1)
    loading = threading.Thread(target=registry.load, args=("b", w2))
    loading.start()
    assert reading.wait(20)
    assert registry.get("a") is not None and registry.get("b") is None
    registry.unload("a")
    go_on.set()
    loading.join(20)
    assert [info.name for info in registry.infos()] == ["b"]


def test_of_two_loads_of_one_name_at_once_the_second_finds_it_taken(w1: Path, w2: Path):
    registry = AdapterRegistry(read_fake_adapter, 3, "model")
    outcomes: list[str] = []

    def load(path: Path) -> None:
        try:
            outcomes.append(registry.load("a", path).digest)
        except AdapterError as error:
            outcomes.append(error.reason)

    threads = [threading.Thread(target=load, args=(path,)) for path in (w1, w2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(outcomes)[1] == "name_taken" and len(registry.infos()) == 1
