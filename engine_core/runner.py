"""The wall between scheduling and computing: what the scheduler hands over, and who takes it.

A step is launched, and waited for later: in between, the engine may launch the one after it.

`engine_core.model.ModelRunner` is the real one. Anything with this shape can stand in for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ipc.vocabulary import MultimodalFeature, TokenLogprob

from .lora.adapter import Adapter
from .request import Request


@dataclass(frozen=True, slots=True)
class EncodedFeature:
    """A feature of a prompt with what `Runner.encode` made of it."""

    feature: MultimodalFeature
    output: Any


class SlotCopy(NamedTuple):
    """The first `num_slots` slots of block `source` become those of block `target`; its others stay as they are."""

    source: int
    target: int
    num_slots: int


@dataclass(slots=True)
class ScheduledRequest:
    """Compute tokens `[start, start + num_tokens)` of `request` in this step.

    `block_tables` has the whole block table of each KV cache group (`ModelInfo.windows`; live views: do not keep or
    change them). K/V of position `p` goes to slot `table[p // block_size] * block_size + p % block_size` of each,
    except in the first `num_shared_blocks` blocks: those were found in the cache, hold their K/V already and are never
    written (slot -1). Blocks that no token to compute sees any more stand as 0 in their table, whatever block 0 is.
    `features` are those with an embedded token among the tokens to compute, by position.

    With `follows` the one token to compute is what the step launched just before samples for its own batch's
    `follows`-th request, which is this one. Nobody knows it yet: it is not in `request.token_ids`, and `start` is where
    it will be.

    `adapter_slot` is where `Runner.place_adapter` has put the request's adapter; None without one.
    """

    request: Request
    start: int
    num_tokens: int
    block_tables: Sequence[Sequence[int]]
    num_shared_blocks: int
    features: Sequence[EncodedFeature] = ()
    follows: int | None = None
    adapter_slot: int | None = None

    @property
    def end(self) -> int:
        """How many tokens the sequence has up to and including those to compute."""
        return self.start + self.num_tokens

    @property
    def num_output_tokens(self) -> int:
        """How many of them are no prompt's."""
        return self.end - self.request.num_prompt_tokens

    @property
    def samples(self) -> bool:
        """Whether this step reaches the end of the sequence, so that a next token comes out of it."""
        return self.follows is not None or self.end == self.request.num_tokens


@dataclass(slots=True)
class StepResult:
    """What came out of a step; `i` is a request's place in the batch.

    `token_ids[i]` is None where the request does not sample. `logprobs[i]` belongs to the sampled token, and
    `prompt_logprobs[i]` to the prompt tokens that this step's tokens predict, in order; both only where asked for
    (`SamplingParams.logprobs`; `Request.prompt_logprobs` is not None).
    """

    token_ids: list[int | None]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MultimodalInfo:
    """What the engine must know of a model that takes pictures.

    `embed_bytes` is what one row of the encoder's output weighs, everything that is kept for it included. With
    `joins_touching` the tokens of a picture, and of pictures whose tokens touch, see each other in both directions
    (Gemma 3): those that are not cached are computed in one step, or not at all.
    """

    embed_bytes: int
    joins_touching: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine must know of the model it drives.

    `windows` has an entry for each KV cache group: how many tokens its layers see, the token itself included, or None
    for all. Each group has block tables of its own in the one pool; a block holds `block_size` tokens of one group.
    `cache_namespace` (hex) is equal exactly where KV blocks may be shared: same weights, KV dtype, block size
    and layout; `tokenizer_digest` is that of the model's directory, empty where there is none.
    `multimodal` is None for models of text only. `runs_apart` says that `Runner.launch` returns long before the step
    has run, so that it pays to schedule the next one meanwhile.
    `num_adapter_slots`: how many LoRA adapters a step may have; 0 where the model is not ready for any.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    num_blocks: int
    cache_namespace: str
    tokenizer_digest: str = ""
    multimodal: MultimodalInfo | None = None
    runs_apart: bool = False
    windows: tuple[int | None, ...] = (None,)
    num_adapter_slots: int = 0


class LaunchedStep(Protocol):
    """A step that may still be running."""

    def wait(self) -> StepResult:
        """What came out of it, when it has run. Called once at most; raises whatever went wrong in it.

        On an exception nothing is known about the K/V written in this step, and in one launched behind it.
        """
        ...


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step that was computed when it was launched."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class Runner(Protocol):
    info: ModelInfo

    def copy_slots(self, copies: Sequence[SlotCopy]) -> None:
        """Copy what the next step to be launched reads, before its own writes. No target is also a source."""
        ...

    def check_features(self, features: Sequence[MultimodalFeature]) -> None:
        """Make sure that a prompt with these features, which `checks.check_request` has passed, can be computed.

        Any thread may call this at any time. Raises ValueError, naming the feature, where it cannot: a step with it
        would fail, and end other requests' steps.
        """
        ...

    def encode(
        self, feature: MultimodalFeature, inputs: Mapping[str, np.ndarray], adapter_slot: int | None = None
    ) -> Any:
        """What the model sees of one feature: `feature.num_embeds` rows, in whatever form `execute` takes them; with
        the adapter in that slot, if there is one.

        Only called where `info.multimodal` is set. Raises ValueError for inputs that are not this feature's.
        """
        ...

    def read_adapter(self, path: Path, root: Path | None = None) -> Adapter:
        """Read a PEFT directory, check that it fits the model, and bring its weights into the form they are computed
        with. Any thread may call this at any time; steps go on meanwhile.

        With `root`, neither the directory nor a file of it may lie elsewhere, links resolved. Raises AdapterError.
        """
        ...

    def place_adapter(self, slot: int, adapter: Adapter) -> None:
        """From the next call on, `slot` (below `info.num_adapter_slots`) has this adapter, which `read_adapter`
        returned; whatever was launched before computes with what was there before.

        Raises whatever goes wrong; then nobody is computed with that slot until something was placed in it.
        """
        ...

    def clear_adapter(self, slot: int) -> None:
        """No step computes with what is in `slot` any more: keep no memory for it that was not there before it came."""
        ...

    def launch(self, batch: Sequence[ScheduledRequest]) -> LaunchedStep:
        """Begin to compute one step. `batch` is never empty; it and what it refers to may change once this returns.

        One more step at most is launched before this one was waited for. Whatever is called in a later call,
        `copy_slots` and `encode` included, happens after it. An exception here is like one of `LaunchedStep.wait`.
        """
        ...
