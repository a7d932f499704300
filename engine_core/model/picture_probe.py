"""Whether a model does with pictures what a flattened batch can do, found by trying.

A short prompt with a made-up picture is computed twice: by the model's own forward, with its own attention, and as a
step computes it. Whatever an architecture does beyond replacing embeddings (other experts for pictures, inputs per
layer, masks of its own) makes a difference, and such a model is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from engine_core.request import Request
from engine_core.runner import EncodedFeature, ScheduledRequest
from ipc.vocabulary import EngineRequest, MultimodalFeature

from .attention import ATTENTION_NAME
from .picture_encoder import EncodedRows, picture_owner
from .picture_positions import merge_size
from .probe import disagreement, ordinary_token_ids, tolerance
from .support import UnsupportedModelError

_START, _ROWS_HIGH, _ROWS_WIDE = 3, 2, 3


@dataclass
class _EncodedPicture(ModelOutput):
    """What a model's own forward looks at of `get_image_features`."""

    pooler_output: Any = None
    deepstack_features: Any = None


@torch.inference_mode()
def check_pictures(
    model: Any, config: Any, num_deepstack: int, compute: Callable[[ScheduledRequest], torch.Tensor]
) -> None:
    """Make sure that a loaded model does nothing else with pictures.

    Args:
        num_deepstack: of the rows `compute` is to be given (`PictureEncoder.num_deepstack`).
        compute: a step with this request alone, which has no blocks yet: logits `[num_tokens, vocab_size]`.

    Raises:
        UnsupportedModelError: it does, or that cannot be tried.
    """
    item = _prompt_with_picture(model, config, num_deepstack)
    expected = _own_logits(model, config, item)
    changed = disagreement(expected, compute(item))
    # Written so that NaN is a difference.
    if not changed <= tolerance(expected.dtype):
        raise UnsupportedModelError(
            f"{config.model_type}: the logits of a prompt with a picture change by {changed:.1%} of their spread when"
            " the decoder is told of it by embeddings and positions alone: it does more with pictures than that"
        )


def _prompt_with_picture(model: Any, config: Any, num_deepstack: int) -> ScheduledRequest:
    """Some tokens, `_ROWS_HIGH * _ROWS_WIDE` rows as of a picture, and some tokens, whole."""
    token_ids = list(ordinary_token_ids(config))
    if getattr(config, "image_token_id", None) is None:
        raise UnsupportedModelError(f"{config.model_type}: its configuration names no token for pictures")
    num_rows = _ROWS_HIGH * _ROWS_WIDE
    prompt = token_ids[:_START] + [config.image_token_id] * num_rows + token_ids[_START:]
    grid = (1, _ROWS_HIGH * merge_size(config), _ROWS_WIDE * merge_size(config))
    feature = MultimodalFeature(
        bytes(32), _START, num_rows, ((0, num_rows),), num_input_bytes=0, layout={"image_grid_thw": grid}
    )
    request = Request(EngineRequest("probe", prompt, mm_features=(feature,)), max_tokens=1, seed=0, arrival_time_s=0.0)
    ids = torch.tensor(token_ids[:num_rows], device=model.get_input_embeddings().weight.device)
    # As large as embeddings are, and no token's.
    rows = model.get_input_embeddings()(ids).flip(-1)
    encoded = EncodedRows(rows, tuple(rows.roll(layer + 1, 0) for layer in range(num_deepstack)))
    return ScheduledRequest(
        request, 0, len(prompt), block_tables=(), num_shared_blocks=0, features=[EncodedFeature(feature, encoded)]
    )


def _own_logits(model: Any, config: Any, item: ScheduledRequest) -> torch.Tensor:
    """By the model's own forward, told only that a picture has been encoded already."""
    known = inspect.signature(model.forward).parameters
    if "mm_encoder_outputs" not in known:
        raise UnsupportedModelError(f"{type(model).__name__} takes no encoded pictures (mm_encoder_outputs)")
    feature, encoded = item.features[0].feature, item.features[0].output
    token_ids = torch.tensor([item.request.token_ids], device=encoded.rows.device)
    types = torch.zeros_like(token_ids)
    types[0, feature.start : feature.end] = 1
    grids = torch.tensor([feature.layout["image_grid_thw"]], device=token_ids.device)
    arguments = {"token_type_ids": types, "mm_token_type_ids": types, "image_grid_thw": grids}
    arguments = {name: value for name, value in arguments.items() if name in known}
    deepstack = [(rows,) for rows in encoded.deepstack]
    errors = []
    # Per picture, or all in one: what an architecture expects is what its tower returns.
    for rows in ((encoded.rows,), encoded.rows[None]):
        output = _EncodedPicture(pooler_output=rows, deepstack_features=deepstack)
        try:
            with _own_attention(model):
                logits = model(
                    input_ids=token_ids, mm_encoder_outputs={"image": output}, use_cache=False, **arguments
                ).logits[0]
        except Exception as error:  # every architecture has its own way of not expecting something
            errors.append(f"{type(error).__name__}: {error}")
        else:
            return logits
        finally:
            # Some remember the last call's.
            if hasattr(picture_owner(model), "rope_deltas"):
                picture_owner(model).rope_deltas = None
    raise UnsupportedModelError(
        f"{config.model_type}: its own forward takes no encoded picture to compare with ({'; '.join(errors)})"
    )


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    """Within it, the decoder attends as transformers does."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    configs |= {id(part): part for part in (model.config.get_text_config(decoder=True),)}
    ours = [part for part in configs.values() if part._attn_implementation_internal == ATTENTION_NAME]
    for part in ours:
        part._attn_implementation_internal = "sdpa" if model._supports_sdpa else "eager"
    try:
        yield
    finally:
        for part in ours:
            part._attn_implementation_internal = ATTENTION_NAME
