"""One step through the model: ids, or embeddings with the rows of pictures in their places, in; logits out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine_core.runner import ScheduledRequest

from .attention import LayerKV
from .input_batch import InputBatch, Places
from .lora.model_adapters import ModelAdapters
from .picture_encoder import EncodedRows
from .picture_positions import PicturePositions
from .staging import Staging


@dataclass(frozen=True, slots=True)
class PictureRows:
    """Rows of pictures that a step's tokens stand for: `places` `[num_rows]` in the flattened batch, ascending."""

    places: torch.Tensor
    rows: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]


def step_logits(
    model: Any,
    batch: Sequence[ScheduledRequest],
    inputs: InputBatch,
    layer_kv: LayerKV,
    positions: PicturePositions | None,
    staging: Staging,
    adapters: ModelAdapters | None = None,
) -> Callable[[Places], torch.Tensor]:
    """A forward of `batch`, which `inputs` lays out: from places in it to their logits `[num_places, vocab_size]`.

    `adapters` are what the model has room for.
    """
    pictures = picture_rows(batch, staging)
    position_ids = None if positions is None else positions.position_ids(batch)
    arguments: dict[str, Any] = {
        "position_ids": inputs.position_ids if position_ids is None else staging.upload(position_ids)[0]
    }
    if pictures is None:
        arguments["input_ids"] = inputs.input_ids
    else:
        arguments["inputs_embeds"] = _embed(model, inputs.input_ids, pictures)

    def forward(places: Places) -> torch.Tensor:
        with _deepstack(model, inputs.input_ids, pictures):
            return model(**arguments, use_cache=False, logits_to_keep=places.on_device, layer_kv=layer_kv).logits[0]

    of_step = None if adapters is None else adapters.of_step(batch, staging)
    if adapters is None or of_step is None:
        return forward

    def logits_of(places: Places) -> torch.Tensor:
        with adapters.computing(of_step, places.on_host, staging):
            return forward(places)

    return logits_of


def picture_rows(batch: Sequence[ScheduledRequest], staging: Staging) -> PictureRows | None:
    """None if no token of `batch` stands for a row of a picture."""
    places: list[np.ndarray] = []
    parts: list[tuple[torch.Tensor, ...]] = []
    first_place = 0
    for item in batch:
        for encoded in item.features:
            output: EncodedRows = encoded.output
            first_row = 0
            for range_start, range_end in encoded.feature.embed_ranges:
                start = max(encoded.feature.start + range_start, item.start)
                end = min(encoded.feature.start + range_end, item.start + item.num_tokens)
                if start < end:
                    row = first_row + start - (encoded.feature.start + range_start)
                    places.append(np.arange(start, end) + (first_place - item.start))
                    parts.append(tuple(rows[row : row + end - start] for rows in (output.rows, *output.deepstack)))
                first_row += range_end - range_start
        first_place += item.num_tokens
    if not places:
        return None
    rows, *deepstack = (torch.cat(rows) for rows in zip(*parts, strict=True))
    return PictureRows(staging.upload(np.concatenate(places))[0], rows, tuple(deepstack))


def _embed(model: Any, input_ids: torch.Tensor, pictures: PictureRows) -> torch.Tensor:
    # Some models' placeholder has no embedding.
    ids = input_ids.index_fill(1, pictures.places, 0)
    return model.get_input_embeddings()(ids).index_copy(1, pictures.places, pictures.rows[None])


@contextmanager
def _deepstack(model: Any, input_ids: torch.Tensor, pictures: PictureRows | None) -> Iterator[None]:
    """Within it, the decoder is given what its first layers add to the places of pictures.

    The modules around it would pass this on only together with pixels.
    """
    if pictures is None or not pictures.deepstack:
        yield
        return
    mask = torch.zeros_like(input_ids, dtype=torch.bool).index_fill(1, pictures.places, True)
    extra = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(pictures.deepstack)}

    def hand_over(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | extra

    hook = model.get_decoder().register_forward_pre_hook(hand_over, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
