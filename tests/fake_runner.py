"""A `Runner` without a model, for tests of processes and wires: its next token is a formula anybody can check."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from engine_core.lora.adapter import Adapter
from engine_core.runner import ComputedStep, ModelInfo, MultimodalInfo, ScheduledRequest, SlotCopy, StepResult
from ipc.vocabulary import MultimodalFeature, TokenLogprob
from tests.fake_adapters import fake_digest, read_fake_adapter, shift_of

VOCAB_SIZE = 1000


def next_token(token_ids: Sequence[int], adapter_digest: bytes | None = None) -> int:
    shift = shift_of(adapter_digest, VOCAB_SIZE)
    return (7919 * len(token_ids) + 31 * token_ids[-1] + 17 + shift) % VOCAB_SIZE


def continuation(prompt_token_ids: Iterable[int], num_tokens: int, weights: str | None = None) -> list[int]:
    """What a request with this prompt must produce; with an adapter, if it is given that one's weights."""
    token_ids = list(prompt_token_ids)
    num_prompt_tokens = len(token_ids)
    digest = None if weights is None else fake_digest(weights)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, digest))
    return token_ids[num_prompt_tokens:]


def certain(token_id: int, num_top_tokens: int) -> TokenLogprob:
    """This "model" never doubts: every token has probability 1."""
    return TokenLogprob(token_id, 0.0, 1, [(token_id, 0.0)][:num_top_tokens])


class FakeRunner:
    """Each step takes `step_s`. Of `SamplingParams` it honours `logprobs` and `prompt_logprobs`.

    With `multimodal` it takes any pictures, and never looks at them. With `num_adapter_slots` it takes adapters
    (`tests.fake_adapters`), and computes with what is in a request's slot.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 4096,
        block_size: int = 16,
        step_s: float = 0.0,
        multimodal: MultimodalInfo | None = None,
        num_adapter_slots: int = 0,
    ) -> None:
        self.step_s = step_s
        self.adapters: list[Adapter | None] = [None] * num_adapter_slots
        self.info = ModelInfo(
            name="fake",
            vocab_size=VOCAB_SIZE,
            max_model_len=num_blocks * block_size,
            eos_token_ids=frozenset(),
            num_blocks=num_blocks,
            cache_namespace="00",
            multimodal=multimodal,
            num_adapter_slots=num_adapter_slots,
        )

    def copy_slots(self, copies: Sequence[SlotCopy]) -> None:
        pass  # no next token depends on a block

    def check_features(self, features: Sequence[MultimodalFeature]) -> None:
        pass  # nothing depends on where they are

    def encode(
        self, feature: MultimodalFeature, inputs: Mapping[str, np.ndarray], adapter_slot: int | None = None
    ) -> None:
        assert inputs, feature

    def read_adapter(self, path: Path, root: Path | None = None) -> Adapter:
        return read_fake_adapter(path, root)

    def place_adapter(self, slot: int, adapter: Adapter) -> None:
        self.adapters[slot] = adapter

    def clear_adapter(self, slot: int) -> None:
        self.adapters[slot] = None

    def launch(self, batch: Sequence[ScheduledRequest]) -> ComputedStep:
        return ComputedStep(self.execute(batch))

    def execute(self, batch: Sequence[ScheduledRequest]) -> StepResult:
        time.sleep(self.step_s)
        result = StepResult([None] * len(batch))
        for place, item in enumerate(batch):
            request, params = item.request, item.request.sampling_params
            if request.prompt_logprobs is not None:
                predicted = request.token_ids[item.start + 1 : item.start + item.num_tokens + 1]
                result.prompt_logprobs[place] = [certain(token, params.prompt_logprobs or 0) for token in predicted]
            if item.samples:
                adapter = None if item.adapter_slot is None else self.adapters[item.adapter_slot]
                digest = None if adapter is None else adapter.digest
                token = result.token_ids[place] = next_token(request.token_ids, digest)
                if params.logprobs is not None:
                    result.logprobs[place] = certain(token, params.logprobs)
        return result
