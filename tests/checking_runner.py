"""A runner without a model that knows what every KV slot must hold.

It keeps one number per slot: a digest of everything that decides the K/V there (the tokens up to that position and the
extra keys that cover them). Each step it writes the slots it is told to write and then reads every position of every
scheduled request through its block table, as attention would. A stale, shared-and-overwritten, foreign or never written
slot is an AssertionError, in the step where a real model would have gone wrong silently.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.request import Request
from engine_core.runner import ModelInfo, ScheduledRequest, StepResult


def next_token(token_ids: Sequence[int], vocab_size: int) -> int:
    """What this "model" generates: a function of the whole sequence's length and of its last token."""
    return (7919 * len(token_ids) + 31 * token_ids[-1] + 17) % vocab_size


def expected_output(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


class CheckingRunner:
    """Args: `fail_next` makes the next step write half of its slots with garbage and raise."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 1000,
        max_model_len: int = 512,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.info = ModelInfo("checking", vocab_size, max_model_len, eos_token_ids, num_blocks, "checking")
        self.block_size = block_size
        self.slots: list[int | str] = ["never written"] * (num_blocks * block_size)
        self.fail_next = False
        self.steps: list[int] = []
        self.num_copied_blocks = 0
        self._digests: dict[str, tuple[Request, list[int]]] = {}

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        assert not {source for source, _ in copies} & {target for _, target in copies}
        size = self.block_size
        for source, target in copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
            self.num_copied_blocks += 1

    def execute(self, batch: Sequence[ScheduledRequest]) -> StepResult:
        assert batch, "an empty step was executed"
        assert len({id(entry.request) for entry in batch}) == len(batch)
        self.steps.append(sum(entry.num_tokens for entry in batch))
        for entry in batch:
            self._write(entry)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is on fire")
        for entry in batch:
            self._read(entry)
        return StepResult(
            [next_token(entry.request.token_ids, self.info.vocab_size) if entry.samples else None for entry in batch]
        )

    def _write(self, entry: ScheduledRequest) -> None:
        assert entry.num_tokens > 0
        digests = self._digests_of(entry.request)
        for position in range(entry.start, entry.start + entry.num_tokens):
            if position // self.block_size < entry.num_shared_blocks:
                assert entry.num_tokens == 1 and entry.samples, "only a full hit recomputes a shared position"
                continue
            self.slots[self._slot(entry, position)] = "garbage" if self.fail_next else digests[position]

    def _read(self, entry: ScheduledRequest) -> None:
        digests = self._digests_of(entry.request)
        for position in range(entry.start + entry.num_tokens):
            held = self.slots[self._slot(entry, position)]
            assert held == digests[position], f"{entry.request} reads {held} at position {position}"

    def _slot(self, entry: ScheduledRequest, position: int) -> int:
        return entry.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _digests_of(self, request: Request) -> list[int]:
        known, digests = self._digests.get(request.request_id, (None, []))
        if known is not request:
            digests = []
            self._digests[request.request_id] = (request, digests)
        for position in range(len(digests), request.num_tokens):
            covering = tuple(
                (span.kind, span.key, position - span.start)
                for span in request.extra_key_spans
                if span.start <= position and (span.end is None or position < span.end)
            )
            digests.append(hash((digests[-1] if digests else 0, request.token_ids[position], covering)))
        return digests
