"""Adapters over several engines: what one was told all have, what one lost it gets again, and nothing else."""

from __future__ import annotations

import asyncio
import gc

import pytest

from frontend.engine_errors import EngineUnavailableError, RequestRefusedError
from frontend.pooled_adapters import PooledAdapters
from tests.frontend.adapter_engine import AdapterEngine, adapter

PATH = "/adapters/a"


class Engines:
    """So many engines on one file system, found without any adapter, and the adapters of all of them."""

    def __init__(self, number: int = 2) -> None:
        self.files = {PATH: "d1", "/adapters/b": "d9"}
        self.engines = [AdapterEngine(self.files, index) for index in range(number)]
        self.adapters = PooledAdapters(self.engines)  # type: ignore[arg-type]
        for engine in self.engines:
            engine.tell("first")

    def serving(self, name: str) -> list[int]:
        """The engines that requests for `name` may go to."""
        return [each.index for each in self.engines if each.is_connected and self.adapters.has(each, name)]  # type: ignore[arg-type]

    async def repaired(self) -> None:
        while self.adapters._repairs:
            await asyncio.gather(*self.adapters._repairs.values())

    def take_asked(self) -> list[list[str]]:
        asked = [engine.asked for engine in self.engines]
        for engine in self.engines:
            engine.asked = []
        return asked


async def refusal(engines: Engines, name: str, path: str = PATH, *, replaces: bool = False) -> str | None:
    with pytest.raises(RequestRefusedError) as caught:
        await engines.adapters.load(name, path, replaces=replaces)
    return caught.value.error.reason


class TestLoading:
    async def test_all_engines_have_it_then(self) -> None:
        engines = Engines()
        assert engines.serving("a") == []
        loaded = await engines.adapters.load("a", PATH, replaces=False)
        assert (loaded.digest, dict(engines.adapters.by_name)) == ("d1", {"a": loaded})
        assert engines.serving("a") == [0, 1]
        assert engines.serving("") == [0, 1]

    async def test_what_one_refuses_is_undone_in_the_others(self) -> None:
        engines = Engines(3)
        engines.engines[1].broken = {"a"}
        assert await refusal(engines, "a") == "invalid_adapter"
        assert not engines.adapters.by_name
        assert [list(engine.loaded_adapters) for engine in engines.engines] == [[], [], []]

    async def test_what_was_replaced_is_there_again_when_one_refuses(self) -> None:
        engines = Engines()
        await engines.adapters.load("a", PATH, replaces=False)
        engines.engines[1].broken = {"a"}
        assert await refusal(engines, "a", "/adapters/b", replaces=True) == "invalid_adapter"
        assert engines.adapters.by_name["a"].digest == "d1"
        assert engines.serving("a") == [0, 1]

    async def test_engines_must_find_the_same_weights(self) -> None:
        """They may be on machines of their own."""
        engines = Engines()
        engines.engines[1].files = {PATH: "d2"}
        assert await refusal(engines, "a") == "other_weights"
        assert not engines.adapters.by_name
        assert engines.serving("a") == []

    async def test_a_name_is_taken_until_it_is_to_be_replaced(self) -> None:
        engines = Engines()
        await engines.adapters.load("a", PATH, replaces=False)
        assert await refusal(engines, "a") == "name_taken"
        await engines.adapters.load("a", "/adapters/b", replaces=True)
        assert engines.adapters.by_name["a"].digest == "d9"
        assert engines.serving("a") == [0, 1]

    async def test_two_at_once_are_one_after_the_other(self) -> None:
        engines = Engines()
        results = await asyncio.gather(
            *(engines.adapters.load("a", path, replaces=False) for path in (PATH, "/adapters/b")),
            return_exceptions=True,
        )
        assert isinstance(results[1], RequestRefusedError) and results[1].error.reason == "name_taken"
        assert {engine.loaded_adapters["a"].digest for engine in engines.engines} == {"d1"}

    async def test_a_name_is_free_again_when_whoever_was_first_is_refused(self) -> None:
        engines = Engines()
        engines.engines[1].files = {"/adapters/b": "d9"}
        engines.engines[1].gate.clear()
        first = asyncio.create_task(engines.adapters.load("a", PATH, replaces=False))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(engines.adapters.load("a", "/adapters/b", replaces=False))
        await asyncio.sleep(0.01)
        engines.engines[1].gate.set()
        with pytest.raises(RequestRefusedError):
            await first
        assert (await second).digest == "d9"
        assert engines.serving("a") == [0, 1]

    async def test_an_engine_without_lora_is_not_asked(self) -> None:
        engines = Engines()
        engines.engines[0].capabilities = AdapterEngine({}, max_loras=0).capabilities
        await engines.adapters.load("a", PATH, replaces=False)
        assert engines.serving("a") == [1]
        engines.engines[1].lose()
        assert await refusal(engines, "b") == "lora_disabled"

    async def test_without_engines_there_is_nobody_to_ask(self) -> None:
        engines = Engines()
        for engine in engines.engines:
            engine.lose()
        with pytest.raises(EngineUnavailableError):
            await engines.adapters.load("a", PATH, replaces=False)
        assert not engines.adapters.by_name

    async def test_one_that_is_lost_meanwhile_gets_it_later(self) -> None:
        engines = Engines()
        away = engines.engines[1]
        away.gate.clear()
        loading = asyncio.create_task(engines.adapters.load("a", PATH, replaces=False))
        await asyncio.sleep(0.01)
        away.lose()
        away.gate.set()
        await loading
        assert engines.serving("a") == [0]
        away.tell("restarted")
        await engines.repaired()
        assert engines.serving("a") == [0, 1]


class TestUnloading:
    async def test_none_has_it_then(self) -> None:
        engines = Engines()
        await engines.adapters.load("a", PATH, replaces=False)
        await engines.adapters.unload("a")
        assert not engines.adapters.by_name
        assert [list(engine.loaded_adapters) for engine in engines.engines] == [[], []]

    async def test_what_is_not_there_cannot_be_unloaded(self) -> None:
        engines = Engines()
        with pytest.raises(RequestRefusedError) as caught:
            await engines.adapters.unload("a")
        assert caught.value.error.reason == "unknown_adapter"

    async def test_what_only_an_engine_has_that_is_away_is_unloaded_when_it_is_back(self) -> None:
        engines = Engines()
        engines.engines[1].tell("changed", adapter("a", "d1"))
        engines.engines[1].lose()
        await engines.adapters.unload("a")
        assert not engines.adapters.by_name
        engines.engines[1].tell("found_again", adapter("a", "d1"))
        await engines.repaired()
        assert not engines.engines[1].loaded_adapters and not engines.adapters.by_name

    async def test_an_engine_that_was_away_follows(self) -> None:
        engines = Engines()
        away = engines.engines[1]
        await engines.adapters.load("a", PATH, replaces=False)
        away.lose()
        await engines.adapters.unload("a")
        away.tell("found_again", adapter("a", "d1"))
        assert engines.serving("a") == []
        await engines.repaired()
        assert not away.loaded_adapters and not engines.adapters.by_name


class TestWhatSomebodyElseAskedFor:
    """Another frontend of the same engines, for instance."""

    async def test_is_followed(self) -> None:
        engines = Engines()
        for engine in engines.engines:
            engine.tell("changed", adapter("a", "d1"))
        assert engines.serving("a") == [0, 1]
        for engine in engines.engines:
            engine.tell("changed", adapter("a", "d2"))
            # One after the other: it goes on where it is already.
            assert engines.serving("a") == [*range(engine.index + 1)]
        for engine in engines.engines:
            engine.tell("changed")
        assert not engines.adapters.by_name
        await engines.repaired()
        assert engines.take_asked() == [[], []]

    async def test_in_one_engine_is_not_carried_to_the_others(self) -> None:
        """Whoever asked for it tells them, too, or does not want it there."""
        engines = Engines()
        engines.engines[0].tell("changed", adapter("a", "d1"))
        engines.engines[1].tell("changed", adapter("b", "d9"))
        await engines.repaired()
        assert engines.take_asked() == [[], []]
        assert (engines.serving("a"), engines.serving("b")) == ([0], [1])

    async def test_is_followed_when_it_happened_out_of_sight(self) -> None:
        engines = Engines(1)
        engines.engines[0].tell("changed", adapter("old", "d1"), adapter("changed", "d2"))
        engines.engines[0].tell("found_again", adapter("changed", "d3"), adapter("new", "d4"))
        assert {name: each.digest for name, each in engines.adapters.by_name.items()} == {"changed": "d3", "new": "d4"}
        await engines.repaired()
        assert engines.take_asked() == [[]]

    async def test_in_one_engine_takes_nothing_from_a_name_with_other_weights(self) -> None:
        engines = Engines()
        engines.engines[0].tell("first", adapter("a", "d1"))
        engines.engines[1].tell("first", adapter("a", "d2"))
        engines.engines[1].tell("changed")
        assert engines.serving("a") == [0]


class TestAnEngineThatWasStartedAgain:
    async def test_is_given_what_it_has_lost(self) -> None:
        engines = Engines()
        await engines.adapters.load("a", PATH, replaces=False)
        await engines.adapters.load("b", "/adapters/b", replaces=False)
        engines.take_asked()
        engines.engines[0].gate.clear()
        engines.engines[0].tell("restarted", adapter("static", "d5"))
        # Until it has them, requests go to the other, and none to nobody.
        assert (engines.serving("a"), engines.serving("static")) == ([1], [0])
        engines.engines[0].gate.set()
        await engines.repaired()
        assert engines.serving("a") == engines.serving("b") == [0, 1]
        assert engines.take_asked() == [
            [f"load a {PATH} replacing d1", "load b /adapters/b replacing d9"],
            [],
        ]

    async def test_is_given_what_had_replaced_what_it_starts_with(self) -> None:
        engines = Engines(1)
        engines.engines[0].tell("first", adapter("a", "d9", "/adapters/b"))
        await engines.adapters.load("a", PATH, replaces=True)
        engines.engines[0].tell("restarted", adapter("a", "d9", "/adapters/b"))
        assert engines.serving("a") == []
        await engines.repaired()
        assert engines.engines[0].loaded_adapters["a"].digest == "d1"
        assert engines.serving("a") == [0]

    async def test_is_not_given_other_weights(self, caplog: pytest.LogCaptureFixture) -> None:
        engines = Engines()
        await engines.adapters.load("a", PATH, replaces=False)
        engines.files[PATH] = "d2"
        engines.engines[0].tell("restarted")
        await engines.repaired()
        assert "adapter_not_restored engine=0 name='a'" in caplog.text
        assert (engines.serving("a"), engines.adapters.by_name["a"].digest) == ([1], "d1")
        # While the other may come back with it, it is not gone; once that has lost it, too, nobody can have it.
        engines.engines[1].lose()
        assert (engines.serving("a"), list(engines.adapters.by_name)) == ([], ["a"])
        engines.engines[1].tell("restarted")
        await engines.repaired()
        assert not engines.adapters.by_name

    async def test_may_have_started_with_new_weights_where_no_other_has_the_old_ones(self) -> None:
        engines = Engines()
        for engine in engines.engines:
            engine.tell("first", adapter("a", "d1"))
        engines.files[PATH] = "d2"
        engines.engines[0].tell("restarted", adapter("a", "d2"))
        await engines.repaired()
        assert engines.serving("a") == [1]
        engines.engines[1].tell("restarted", adapter("a", "d2"))
        await engines.repaired()
        assert engines.serving("a") == [0, 1]

    async def test_and_dies_again_is_asked_when_it_is_back(self) -> None:
        engines = Engines(1)
        (engine,) = engines.engines
        await engines.adapters.load("a", PATH, replaces=False)
        engine.gate.clear()
        engine.tell("restarted")
        await asyncio.sleep(0.01)
        engine.lose()
        engine.gate.set()
        await engines.repaired()
        assert list(engines.adapters.by_name) == ["a"]
        engine.tell("restarted")
        await engines.repaired()
        assert engines.serving("a") == [0]

    async def test_does_not_get_what_is_being_unloaded(self) -> None:
        engines = Engines()
        await engines.adapters.load("a", PATH, replaces=False)
        for engine in engines.engines:
            engine.gate.clear()
        unloading = asyncio.create_task(engines.adapters.unload("a"))
        await asyncio.sleep(0.01)
        engines.engines[0].tell("restarted")
        for engine in engines.engines:
            engine.gate.set()
        await unloading
        await engines.repaired()
        assert not engines.adapters.by_name
        assert [list(engine.loaded_adapters) for engine in engines.engines] == [[], []]


async def test_an_engine_that_answers_late_gets_what_was_loaded_before() -> None:
    engines = Engines()
    engines.engines[1].lose()
    await engines.adapters.load("a", PATH, replaces=False)
    engines.engines[1].tell("first")
    await engines.repaired()
    assert engines.serving("a") == [0, 1]


async def test_what_engines_were_started_with_is_their_own() -> None:
    engines = Engines()
    own = [(adapter("a", "d1"),), (adapter("b", "d9"),)]
    for occasion in ("first", "restarted", "found_again"):
        for engine, adapters in zip(engines.engines, own, strict=True):
            engine.tell(occasion, *adapters)
    await engines.repaired()
    assert engines.take_asked() == [[], []]
    assert (engines.serving("a"), engines.serving("b")) == ([0], [1])


async def test_what_an_engine_had_when_it_was_found_it_is_given_again() -> None:
    """A frontend that was started again does not know who has asked for it."""
    engines = Engines()
    engines.engines[0].tell("first", adapter("a", "d1"))
    engines.engines[1].tell("first")
    engines.engines[0].tell("restarted")
    await engines.repaired()
    assert engines.take_asked() == [[f"load a {PATH} replacing d1"], []]
    assert engines.serving("a") == [0]


async def test_the_same_name_with_other_weights_is_told_and_the_first_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engines = Engines()
    engines.engines[0].tell("first", adapter("a", "d1"))
    engines.engines[1].tell("first", adapter("a", "d2"))
    assert "adapter_differs engine=1 name='a' digest=d2 served_digest=d1" in caplog.text
    assert engines.serving("a") == [0]
    await engines.repaired()
    assert engines.take_asked() == [[], []]


async def test_nothing_is_kept_of_names_that_come_and_go() -> None:
    engines = Engines()
    for n in range(200):
        await engines.adapters.load(f"a{n}", PATH, replaces=False)
        await engines.adapters.unload(f"a{n}")
    gc.collect()
    assert not engines.adapters.by_name
    assert not engines.adapters._locks and not engines.adapters._repairs


async def test_closing_ends_repairs() -> None:
    engines = Engines(1)
    await engines.adapters.load("a", PATH, replaces=False)
    engines.engines[0].gate.clear()
    engines.engines[0].tell("restarted")
    await asyncio.sleep(0.01)
    async with asyncio.timeout(10):
        await engines.adapters.close()
        await engines.adapters.close()
    assert not engines.adapters._repairs
