"""Extra-key spans by block, in the order in which a block mixes them in."""

from __future__ import annotations

from collections.abc import Sequence

from ipc.vocabulary import ExtraKeySpan

_NEVER = 1 << 62
_KIND_ORDER = {"lora": 0, "mm": 1, "cache_salt": 2, "prompt_embeds": 3}


def hashing_order(span: ExtraKeySpan) -> tuple[int, str, int, bool, bytes, int]:
    """The order of extra keys within a block: by kind, then by where they start, so senders need not sort.

    Except for pictures of the same span, whose order is the sender's: where pictures that touch see each other, a cat
    beside a dog is not a dog beside a cat. Where other spans end decides last, so that a block's identity does not
    depend on which of them goes on longer behind it.
    """
    is_bytes = isinstance(span.key, bytes)
    key = span.key if isinstance(span.key, bytes) else span.key.encode()
    if span.kind == "mm":
        is_bytes, key = False, b""
    kind_rank = _KIND_ORDER.get(span.kind, len(_KIND_ORDER))
    return kind_rank, span.kind, span.start, is_bytes, key, _NEVER if span.end is None else span.end


def spans_by_block(
    spans: Sequence[ExtraKeySpan], first: int, num_blocks: int, block_size: int
) -> list[list[ExtraKeySpan]]:
    """For each of `num_blocks` blocks from block `first` on, the spans that overlap it, in hashing order."""
    by_block: list[list[ExtraKeySpan]] = [[] for _ in range(num_blocks)]
    for span in sorted(spans, key=hashing_order):
        last = num_blocks if span.end is None else min(num_blocks, -(-span.end // block_size) - first)
        for index in range(max(0, span.start // block_size - first), last):
            by_block[index].append(span)
    return by_block
