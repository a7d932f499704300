"""A runner without a model that knows what every KV slot must hold.

It keeps one number per slot: a digest of everything that decides the K/V there (the tokens up to that position and the
extra keys that cover them). Each step it writes the slots it is told to write and then reads every position of every
scheduled request through its block tables, as attention would: in a group with a window, those that a computed token
sees. A stale, shared-and-overwritten, foreign or never written
slot is a `WrongStepError`, in the step where a real model would have gone wrong silently. So is a picture's token for
which the step has no row, or another picture's, and one that is computed without those it must see. So is a request in
whose slot is not its adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine_core.feature_layout import feature_units
from engine_core.lora.adapter import Adapter
from engine_core.request import Request
from engine_core.runner import (
    ComputedStep,
    LaunchedStep,
    ModelInfo,
    MultimodalInfo,
    ScheduledRequest,
    SlotCopy,
    StepResult,
)
from ipc.vocabulary import MultimodalFeature
from tests.fake_adapters import fake_digest, read_fake_adapter, shift_of
from tests.feature_prompts import content_of, placed_rows, rows_of, true_rows


def next_token(token_ids: Sequence[int], vocab_size: int, adapter_digest: bytes | None = None) -> int:
    """What this "model" generates: a function of the sequence's length, of its last token and of the adapter."""
    shift = shift_of(adapter_digest, vocab_size)
    return (7919 * len(token_ids) + 31 * token_ids[-1] + 17 + shift) % vocab_size


def expected_output(prompt: Sequence[int], num_tokens: int, vocab_size: int, weights: str | None = None) -> list[int]:
    """`weights` are those of a request's adapter."""
    tokens = list(prompt)
    digest = None if weights is None else fake_digest(weights)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, vocab_size, digest))
    return tokens[len(prompt) :]


class WrongStepError(BaseException):
    """No `Exception`: an engine ends the requests of a step that raises one, and goes on."""


@dataclass(frozen=True)
class FailedStep:
    """A step that went wrong, which shows when it is waited for."""

    error: Exception

    def wait(self) -> StepResult:
        raise self.error


class CheckingRunner:
    """`fail_next` makes the next step write its slots with garbage and raise, with `fails_late` when it is waited for;
    whatever is launched behind it fails, too. `encoder_fails` is what the encoder says for a key.

    Steps are computed when they are launched. A token that is still unknown then (`ScheduledRequest.follows`) is taken
    from what this runner computed last, never from the request.

    `encoded` are the contents (`tests.feature_prompts`) it was made to encode. `adapters` is what the adapters' slots
    have (`tests.fake_adapters`); `placing_fails` is what placing one says, by digest.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 1000,
        max_model_len: int = 512,
        eos_token_ids: frozenset[int] = frozenset(),
        multimodal: MultimodalInfo | None = None,
        windows: tuple[int | None, ...] = (None,),
        num_adapter_slots: int = 0,
    ) -> None:
        self.info = ModelInfo(
            "checking",
            vocab_size,
            max_model_len,
            eos_token_ids,
            num_blocks,
            "checking",
            multimodal=multimodal,
            windows=windows,
            num_adapter_slots=num_adapter_slots,
        )
        self.adapters: list[Adapter | None] = [None] * num_adapter_slots
        self.placing_fails: dict[bytes, Exception] = {}
        self.encoded: list[int] = []
        self.encoder_fails: dict[bytes, Exception] = {}
        self.block_size = block_size
        # A block belongs to one group at a time, and its slots hold what is of that group alone.
        self.slots: list[tuple[int, int] | str] = ["never written"] * (num_blocks * block_size)
        self.fail_next = False
        self.fails_late = False
        self.steps: list[int] = []
        self.num_ahead = 0
        self.num_copies = 0
        self._digests: dict[str, tuple[Request, list[int]]] = {}
        self._last_batch: Sequence[ScheduledRequest] = ()
        self._last_tokens: Sequence[int | None] | None = ()

    def forget(self) -> None:
        """Every request it has ever seen."""
        self._digests.clear()
        self._last_batch = ()

    def copy_slots(self, copies: Sequence[SlotCopy]) -> None:
        targets = {copy.target for copy in copies}
        if {copy.source for copy in copies} & targets or len(targets) < len(copies):
            raise WrongStepError(f"copies depend on their order: {copies}")
        for source, target, num_slots in copies:
            assert 0 < num_slots <= self.block_size
            first, end = source * self.block_size, source * self.block_size + num_slots
            self.slots[target * self.block_size : target * self.block_size + num_slots] = self.slots[first:end]
            self.num_copies += 1

    def check_features(self, features: Sequence[MultimodalFeature]) -> None:
        pass  # positions are places

    def read_adapter(self, path: Path, root: Path | None = None) -> Adapter:
        return read_fake_adapter(path, root)

    def place_adapter(self, slot: int, adapter: Adapter) -> None:
        self.adapters[slot] = None
        if adapter.digest in self.placing_fails:
            raise self.placing_fails[adapter.digest]
        self.adapters[slot] = adapter

    def clear_adapter(self, slot: int) -> None:
        self.adapters[slot] = None

    def encode(
        self, feature: MultimodalFeature, inputs: Mapping[str, np.ndarray], adapter_slot: int | None = None
    ) -> list[int]:
        if feature.key in self.encoder_fails:
            raise self.encoder_fails[feature.key]
        if inputs.keys() != {"pixels"} or len(inputs["pixels"]) != feature.num_embeds:
            raise ValueError(f"no pixels for {feature.num_embeds} rows")
        self.encoded.append(content_of(feature))
        return _as_encoded(rows_of(inputs["pixels"]), None if adapter_slot is None else self.adapters[adapter_slot])

    def launch(self, batch: Sequence[ScheduledRequest]) -> LaunchedStep:
        is_ahead = batch[0].follows is not None
        if is_ahead and self._last_tokens is None:
            self.fail_next = self.fails_late = True
        try:
            result = self.execute(batch)
        except AssertionError as error:
            raise WrongStepError(str(error)) from error
        except RuntimeError as error:
            self._last_tokens = None
            if not self.fails_late:
                raise
            return FailedStep(error)
        self.num_ahead += is_ahead
        self._last_batch, self._last_tokens = tuple(batch), result.token_ids
        return ComputedStep(result)

    def execute(self, batch: Sequence[ScheduledRequest]) -> StepResult:
        assert batch, "an empty step was executed"
        assert len({id(entry.request) for entry in batch}) == len(batch)
        self.steps.append(sum(entry.num_tokens for entry in batch))
        for entry in batch:
            self._check_slot(entry)
            self._check_rows(entry)
            self._write(entry)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is on fire")
        for entry in batch:
            self._read(entry)
        return StepResult(
            [
                next_token(self._tokens_of(entry), self.info.vocab_size, self._digest_in_slot(entry))
                if entry.samples
                else None
                for entry in batch
            ]
        )

    def _tokens_of(self, entry: ScheduledRequest) -> list[int]:
        """The sequence up to what this step computes."""
        if entry.follows is None:
            return entry.request.token_ids[: entry.end]
        if self._last_tokens is None:
            return [*entry.request.token_ids, 0]
        assert self._last_batch[entry.follows].request is entry.request, f"{entry.request} follows somebody else"
        assert entry.num_tokens == 1 and entry.start == len(entry.request.token_ids)
        token = self._last_tokens[entry.follows]
        assert token is not None, f"{entry.request} follows a step that sampled nothing for it"
        return [*entry.request.token_ids, token]

    def _check_slot(self, entry: ScheduledRequest) -> None:
        adapter = entry.request.adapter
        wanted = None if adapter is None else adapter.digest
        assert (entry.adapter_slot is None) == (adapter is None), f"{entry.request} is in slot {entry.adapter_slot}"
        assert self._digest_in_slot(entry) == wanted, f"{entry.request}: another adapter is in its slot"

    def _digest_in_slot(self, entry: ScheduledRequest) -> bytes | None:
        adapter = None if entry.adapter_slot is None else self.adapters[entry.adapter_slot]
        return None if adapter is None else adapter.digest

    def _check_rows(self, entry: ScheduledRequest) -> None:
        end, adapter = entry.end, entry.request.adapter
        needed = _rows_between((_true_rows(feature, adapter) for feature in entry.request.features), entry.start, end)
        given = _rows_between((placed_rows(item.feature, item.output) for item in entry.features), entry.start, end)
        assert given == needed, f"{entry.request}: rows of {sorted(given)} at [{entry.start}, {end})"
        assert all(_rows_between([true_rows(item.feature)], entry.start, end) for item in entry.features)
        if self.info.multimodal is not None and self.info.multimodal.joins_touching:
            for unit in feature_units(entry.request.features, joins_touching=True, all_at_once=False):
                assert not unit.start < end < unit.end, f"{entry.request}: [{entry.start}, {end}) ends in {unit}"

    def _write(self, entry: ScheduledRequest) -> None:
        assert entry.num_tokens > 0
        digests = self._digests_of(entry)
        for position in range(entry.start, entry.end):
            if position // self.block_size < entry.num_shared_blocks:
                assert entry.num_tokens == 1 and entry.samples, "only a full hit recomputes a shared position"
                continue
            for group in range(len(self.info.windows)):
                holds = "garbage" if self.fail_next else (group, digests[position])
                self.slots[self._slot(entry, group, position)] = holds

    def _read(self, entry: ScheduledRequest) -> None:
        digests = self._digests_of(entry)
        assert len(entry.block_tables) == len(self.info.windows)
        for group, window in enumerate(self.info.windows):
            first = 0 if window is None else max(0, entry.start - window + 1)
            for position in range(first, entry.end):
                held = self.slots[self._slot(entry, group, position)]
                assert held == (group, digests[position]), f"{entry.request} reads {held} at {position} of {group}"

    def _slot(self, entry: ScheduledRequest, group: int, position: int) -> int:
        table = entry.block_tables[group]
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _digests_of(self, entry: ScheduledRequest) -> list[int]:
        request = entry.request
        known, digests = self._digests.get(request.request_id, (None, []))
        if known is not request:
            digests = []
            self._digests[request.request_id] = (request, digests)
        seen = self._what_pictures_decide(request)
        token_ids = self._tokens_of(entry)
        for position in range(len(digests), entry.end):
            covering = sorted(
                (span.kind, repr(span.key), position - span.start)
                for span in request.extra_key_spans
                if span.start <= position and (span.end is None or position < span.end)
                if request.adapter is None or span.kind != "lora"
            )
            digests.append(
                hash(
                    (
                        digests[-1] if digests else self._digest_in_slot(entry),
                        token_ids[position],
                        tuple(covering),
                        seen.get(position),
                    )
                )
            )
        return digests

    def _what_pictures_decide(self, request: Request) -> dict[int, object]:
        """By position of their tokens: the rows that the K/V there depends on, besides those of earlier positions."""
        rows = _rows_between(map(true_rows, request.features), 0, request.num_tokens)
        if self.info.multimodal is None or not self.info.multimodal.joins_touching:
            return dict(rows)
        seen: dict[int, object] = {}
        for unit in feature_units(request.features, joins_touching=True, all_at_once=False):
            together = tuple(rows[position] for position in range(unit.start, unit.end))
            seen |= dict.fromkeys(range(unit.start, unit.end), together)
        return seen


def _as_encoded(rows: list[int], adapter: Adapter | None) -> list[int]:
    """What an encoder makes of a picture whose `rows` it makes by itself."""
    if adapter is None or not adapter.targets_encoder:
        return rows
    return [hash((row, adapter.digest)) for row in rows]


def _true_rows(feature: MultimodalFeature, adapter: Adapter | None) -> dict[int, int]:
    rows = true_rows(feature)
    return dict(zip(rows, _as_encoded(list(rows.values()), adapter), strict=True))


def _rows_between(placed: Iterable[dict[int, int]], start: int, end: int) -> dict[int, int]:
    return {position: row for rows in placed for position, row in rows.items() if start <= position < end}
