"""Steps of a `ModelRunner` by hand: any tokens of a request, its pictures given as far as a scheduler gives them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine_core import EngineConfig, EngineRequest, SamplingParams
from engine_core.model.runner import ModelRunner
from engine_core.request import Request
from engine_core.runner import EncodedFeature, ScheduledRequest
from ipc.vocabulary import TokenLogprob

from .picture_prompts import PicturePrompt

BLOCK_SIZE = 16
# Of each request by hand: the i-th request of a test has the i-th run of blocks of each KV cache group.
BLOCKS_PER_REQUEST = 16


def make_runner(directory: Path, **settings: object) -> ModelRunner:
    defaults = {"model": str(directory), "dtype": "float32", "device": "cpu", "num_blocks": 128}
    return ModelRunner(EngineConfig(**(defaults | {"block_size": BLOCK_SIZE} | settings)))


class HandMade:
    """A request whose steps a test writes itself, with the adapter in a slot. All prompt tokens' log-probabilities are
    asked for.
    """

    def __init__(
        self, runner: ModelRunner, prompt: PicturePrompt, place: int = 0, adapter_slot: int | None = None
    ) -> None:
        params = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0)
        self.request = Request(
            EngineRequest(f"by hand {place}", prompt.token_ids, params, mm_features=prompt.features),
            max_tokens=64,
            seed=0,
            arrival_time_s=0.0,
        )
        self.encoded = [
            EncodedFeature(feature, runner.encode(feature, prompt.inputs[feature.key], adapter_slot))
            for feature in prompt.features
        ]
        self._adapter_slot = adapter_slot
        windows = runner.info.windows
        starts = [(place * len(windows) + group) * BLOCKS_PER_REQUEST for group in range(len(windows))]
        self._block_tables = [range(start, start + BLOCKS_PER_REQUEST) for start in starts]

    def tokens(self, start: int, end: int) -> ScheduledRequest:
        features = [one for one in self.encoded if one.feature.start < end and start < one.feature.end]
        return ScheduledRequest(
            *(self.request, start, end - start, self._block_tables, 0),
            features=features,
            adapter_slot=self._adapter_slot,
        )


def prompt_logprobs(runner: ModelRunner, by_hand: HandMade, borders: Sequence[int]) -> list[float]:
    """Of each prompt token but the first, and of the token that follows the prompt, whose steps end at `borders`."""
    found: list[TokenLogprob] = []
    for start, end in zip((0, *borders), (*borders, by_hand.request.num_tokens)):
        result = runner.launch([by_hand.tokens(start, end)]).wait()
        found += [*result.prompt_logprobs.get(0, []), *filter(None, [result.logprobs.get(0)])]
    return [entry.logprob for entry in found]


@torch.inference_mode()
def reference_logprobs(model: torch.nn.Module, prompt: PicturePrompt) -> list[float]:
    """What `prompt_logprobs` should find."""
    logprobs = model(**prompt.reference_inputs, use_cache=False).logits[0].log_softmax(dim=-1)
    token_ids = torch.tensor([*prompt.token_ids[1:], int(logprobs[-1].argmax())])
    return logprobs.gather(1, token_ids[:, None])[:, 0].tolist()
