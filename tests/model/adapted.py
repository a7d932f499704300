"""A model and adapters over it: what PEFT says with each, and engines that have them all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from peft import PeftModel

from engine_core import EngineCore, EngineRequest
from engine_core.model.device_queue import DeviceQueue
from engine_core.model.kv_pool import KVPool
from engine_core.model.runner import ModelRunner
from engine_core.runner import ScheduledRequest
from tests.adapters import make_adapter

from .equality import (
    CHOSEN_PROMPT_GAP,
    MIN_COMPARED_TOKENS,
    EngineRun,
    Reference,
    check_equal,
    first_tokens,
    generate_reference,
    greedy,
    load_reference_model,
    make_engine,
    poison_unowned_slots,
    run_requests,
)

NUM_TOKENS = 12
PROMPTS_OF_EACH = 2
# As a request calls it.
NO_ADAPTER = ""


@dataclass(frozen=True)
class Adapted:
    """`references` by adapter, of prompts whose continuation is beyond doubt; `NO_ADAPTER` is the model itself."""

    directory: Path
    adapters: Mapping[str, Path]
    references: Mapping[str, Sequence[Reference]]

    def engine(self, queue: DeviceQueue | None = None, **settings: Any) -> EngineCore:
        """That has loaded all of them."""
        defaults = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16, "max_model_len": 256}
        engine = make_engine(self.directory, queue, **(defaults | settings))
        for name, path in self.adapters.items():
            engine.load_adapter(name, path)
        poison_unowned_slots(engine)
        return engine

    def run(self, engine: EngineCore, *names: str, num_tokens: int = NUM_TOKENS) -> list[EngineRun]:
        """Everything that `names` (or all) were asked, at once and in turn, compared with what PEFT answers."""
        pairs = self.in_turn(*names)
        runs = run_requests(
            engine,
            [
                (EngineRequest(str(i), reference.prompt_token_ids, greedy(num_tokens), adapter=name), {})
                for i, (name, reference) in enumerate(pairs)
            ],
        )
        check_equal([first_tokens(reference, num_tokens) for _, reference in pairs], runs)
        return runs

    def in_turn(self, *names: str) -> list[tuple[str, Reference]]:
        each = [[(name, reference) for reference in self.references[name]] for name in names or self.references]
        return [pair for same_place in zip(*each, strict=True) for pair in same_place]


def make_adapted(
    directory: Path, adapters: Mapping[str, Mapping[str, Any]], root: Path, *, prompts_of_each: int = PROMPTS_OF_EACH
) -> Adapted:
    """Adapters by name, made by `make_adapter` with these settings, over the model in `directory`."""
    paths = {
        name: make_adapter(directory, root / name, seed=seed, **settings)
        for seed, (name, settings) in enumerate(adapters.items())
    }
    model = load_reference_model(directory)
    references = {NO_ADAPTER: choose(model, seed=len(paths), count=prompts_of_each)}
    peft_model = with_adapters(model, paths)
    for seed, name in enumerate(paths):
        peft_model.set_adapter(name)
        references[name] = choose(peft_model, seed=seed, count=prompts_of_each)
    check_adapters_matter(peft_model, references)
    return Adapted(directory, paths, references)


def with_adapters(model: Any, paths: Mapping[str, Path]) -> Any:
    """`model` as PEFT changes it; the first one is active."""
    (first, path), *others = paths.items()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied heads as targets
        adapted = PeftModel.from_pretrained(model, path, adapter_name=first)
        for name, other in others:
            adapted.load_adapter(other, name)
    return adapted.eval()


def choose(model: Any, seed: int, count: int) -> list[Reference]:
    """What `model` says to random prompts, about which it is sure at every token."""
    draw = np.random.default_rng(seed)
    vocab_size = model.get_input_embeddings().num_embeddings
    chosen: list[Reference] = []
    while len(chosen) < count:
        prompt = draw.integers(3, vocab_size, size=int(draw.integers(20, 60))).tolist()
        reference = generate_reference(model, prompt, NUM_TOKENS)
        if min(reference.gaps) > CHOSEN_PROMPT_GAP:
            chosen.append(reference)
    return chosen


def check_adapters_matter(peft_model: Any, references: Mapping[str, Sequence[Reference]]) -> None:
    """With another adapter, or none, other tokens would have come: else a test that compares them sees nothing."""
    for name in references:
        if name != NO_ADAPTER:
            reference = references[name][0]
            with peft_model.disable_adapter():
                without = generate_reference(peft_model, reference.prompt_token_ids, MIN_COMPARED_TOKENS)
            assert without.output_token_ids != reference.output_token_ids[:MIN_COMPARED_TOKENS], name


def merged_model(directory: Path, adapter: Path) -> Any:
    """`directory` with PEFT's own merging of one adapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return with_adapters(load_reference_model(directory), {"merged": adapter}).merge_and_unload()


@contextmanager
def in_each_others_slot(engine: EngineCore) -> Iterator[None]:
    """Within it, steps are computed with the adapter in the slot beside the right one."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    launch = runner._launch

    def launch_wrongly(batch: Sequence[ScheduledRequest], pool: KVPool) -> Any:
        for item in batch:
            if item.adapter_slot is not None:
                item.adapter_slot = (item.adapter_slot + 1) % runner.info.num_adapter_slots
        return launch(batch, pool)

    with patch.object(runner, "_launch", launch_wrongly):
        yield
