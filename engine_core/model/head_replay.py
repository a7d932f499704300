"""A model's head, run again on what its decoder has computed: logits of many tokens, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def decoding_once(model: Any) -> Iterator[None]:
    """Within it, the first forward of `model` runs everything and later ones only what follows the decoder.

    So the head, with whatever caps and scales the architecture puts around it, can be asked for other
    `logits_to_keep` of the same tokens.
    """
    decoder = model.get_decoder()
    decode = decoder.forward
    outputs: list[Any] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not outputs:
            outputs.append(decode(*args, **kwargs))
        return outputs[0]

    decoder.forward = forward
    try:
        yield
    finally:
        decoder.forward = decode
