"""Two stages: the vision tower learns what each patch shows, then the whole model learns to answer.

The first is what makes the second quick (a trial without it learnt colours in the time that this takes for all). Both
keep everything in one checkpoint, so a run that was stopped goes on where it was; a stage's random choices depend on
the step alone. Matrices are trained with Muon, the rest with AdamW; rates rise, stay, and fall linearly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from .drawing import IGNORED, Labels, draw
from .rows import NOT_LEARNT, Row, RowMaker, padded, visible
from .scenes import COLOUR_NAMES, KINDS, Scene, sample_scene

TOWER_BATCH, ROWS_BATCH = 64, 16
_CHECKPOINT_EVERY_STEPS = 50
_PLACE_BINS = 16
_ATTENTION = "demo_plain"


@dataclass(frozen=True, slots=True)
class Pictures:
    """Drawn scenes: `pixels` `[n, SIDE, SIDE, 3]` uint8, labels stacked along the first axis."""

    scenes: list[Scene]
    pixels: np.ndarray
    labels: Labels


def draw_pictures(count: int, seed: int, advance: Callable[[], None], *, with_unseen_pair: bool = False) -> Pictures:
    """`count` random scenes. The i-th depends on `seed` and i only."""
    scenes, pixels, labels = [], [], []
    for index in range(count):
        random = Random(seed * 1_000_003 + index)
        scenes.append(sample_scene(random, with_unseen_pair=with_unseen_pair))
        drawn, what = draw(random, scenes[-1])
        pixels.append(drawn)
        labels.append(what)
        advance()
    stacked = Labels(*(np.stack([getattr(what, name) for what in labels]) for name in Labels.__slots__))
    return Pictures(scenes, np.stack(pixels), stacked)


def normalised(pixels: np.ndarray) -> torch.Tensor:
    """As the processor does it for a picture of the right size: `[n, 3, SIDE, SIDE]` in [-1, 1]."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


class PatchHeads(nn.Module):
    """What each patch's features should tell: thing, colour, centre, place and size, and the background's colour."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        sizes = {
            "kind": len(KINDS) + 1,
            "colour": len(COLOUR_NAMES) + 1,
            "centre": 1,
            "box": 4,
            "background": len(COLOUR_NAMES),
        }
        sizes |= {"column": _PLACE_BINS, "row": _PLACE_BINS}
        self.heads = nn.ModuleDict({name: nn.Linear(width, size) for name, size in sizes.items()})

    def loss(self, features: torch.Tensor, labels: Labels, background: torch.Tensor) -> torch.Tensor:
        """`features`: `[n, NUM_PATCHES, width]`; `labels` of the same n; `background`: `[n]`."""
        features = self.norm(features)
        said = {name: head(features).flatten(0, 1).float() for name, head in self.heads.items()}
        kind = torch.from_numpy(labels.kind).flatten().long()
        colour = torch.from_numpy(labels.colour).flatten().long()
        box = torch.from_numpy(labels.box).flatten(0, 1).float()
        there = kind > 0
        loss = F.cross_entropy(said["kind"], kind, ignore_index=IGNORED)
        loss = loss + F.cross_entropy(said["colour"], colour, ignore_index=IGNORED)
        loss = loss + F.cross_entropy(said["background"], background.repeat_interleave(features.shape[1])) * 0.5
        centre = torch.from_numpy(labels.is_centre).flatten().float()
        loss = loss + F.binary_cross_entropy_with_logits(said["centre"][:, 0], centre) * 2
        if there.any():
            loss = loss + F.smooth_l1_loss(said["box"][there], box[there], beta=0.05) * 4
            for name, column in (("column", 0), ("row", 1)):
                bins = (box[there][:, column] * _PLACE_BINS).long().clamp(0, _PLACE_BINS - 1)
                loss = loss + F.cross_entropy(said[name][there], bins) * 0.5
        return loss


def use_plain_attention(model: Any) -> None:
    AttentionInterface.register(_ATTENTION, _plain_attention)
    model.set_attn_implementation({"text_config": _ATTENTION, "vision_config": "sdpa"})


def rows_of(step: int, maker: RowMaker, count: int = ROWS_BATCH) -> list[Row]:
    """A batch; it depends on the step alone."""
    random = Random(7_000_003 + step)
    return [maker.row(random) for _ in range(count)]


def pictures_of(rows: list[Row]) -> np.ndarray:
    """Their indices, in the order of their tokens."""
    return np.array([index for row in rows for index in row.pictures])


def features_of(model: Any, pictures: Pictures, chosen: np.ndarray) -> torch.Tensor:
    """`[n, NUM_PATCHES, width]`: what the projector is given."""
    pixels = normalised(pictures.pixels[chosen])
    return model.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-1]


def answers_loss(model: Any, features: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """`features` are those of all pictures of `rows`, in order."""
    token_ids = torch.from_numpy(padded([row.token_ids for row in rows], 0))
    embeddings = model.get_input_embeddings()(token_ids)
    projected = model.model.multi_modal_projector(features)
    is_picture = token_ids == model.config.image_token_id
    embeddings = embeddings.masked_scatter(is_picture[..., None], projected.to(embeddings.dtype))
    labels = torch.from_numpy(padded([row.labels for row in rows], NOT_LEARNT))
    hidden = model.model.language_model(
        inputs_embeds=embeddings,
        attention_mask=torch.from_numpy(visible(rows))[:, None],
        position_ids=torch.from_numpy(padded([row.positions for row in rows], 0)),
        use_cache=False,
    ).last_hidden_state
    learnt = labels != NOT_LEARNT
    return F.cross_entropy(model.lm_head(hidden[learnt]).float(), labels[learnt])


class Training:
    """A model in training, its optimizers and its checkpoint."""

    def __init__(self, model: Any, path: Path) -> None:
        self.model = model
        self.heads = PatchHeads(model.config.vision_config.hidden_size)
        self.path = path
        self.done = {"tower": 0, "answers": 0}
        use_plain_attention(model)
        if path.exists():
            saved = torch.load(path, weights_only=True)
            self.done = saved["done"]
            self.model.load_state_dict(saved["model"])
            self.heads.load_state_dict(saved["heads"])
        self._optimizers: list[torch.optim.Optimizer] = []

    def train_tower(self, pictures: Pictures, num_steps: int) -> Iterator[float]:
        """Yields the loss of each step."""
        tower = self.model.model.vision_tower
        parameters = [*tower.named_parameters(), *self.heads.named_parameters()]
        yield from self._steps("tower", parameters, num_steps, 2.5e-3, lambda step: self._tower_loss(step, pictures))

    def train_answers(self, pictures: Pictures, rows: RowMaker, num_steps: int) -> Iterator[float]:
        """Yields the loss of each step. The tower rests while the rest catches up; then it goes on learning, slowly."""
        tower = self.model.model.vision_tower
        frozen_steps = num_steps // 4

        def loss(step: int) -> torch.Tensor:
            tower.requires_grad_(step >= frozen_steps)
            return self._answers_loss(step, pictures, rows)

        parameters = [*self.model.named_parameters(), *self.heads.named_parameters("heads")]
        yield from self._steps("answers", parameters, num_steps, 2e-3, loss)

    def _tower_loss(self, step: int, pictures: Pictures) -> torch.Tensor:
        chosen = np.random.default_rng((1, step)).integers(0, len(pictures.scenes), TOWER_BATCH)
        return self.heads.loss(features_of(self.model, pictures, chosen), *_labels_of(pictures, chosen))

    def _answers_loss(self, step: int, pictures: Pictures, maker: RowMaker) -> torch.Tensor:
        rows = rows_of(step, maker)
        chosen = pictures_of(rows)
        features = features_of(self.model, pictures, chosen)
        loss = answers_loss(self.model, features, rows)
        if features.requires_grad:
            loss = loss + 0.1 * self.heads.loss(features, *_labels_of(pictures, chosen))
        return loss

    def _steps(
        self,
        stage: str,
        parameters: list[tuple[str, nn.Parameter]],
        num_steps: int,
        rate: float,
        loss_of: Callable[[int], torch.Tensor],
    ) -> Iterator[float]:
        self._optimizers = _optimizers(parameters, rate)
        optimizer_path = self.path.with_suffix(f".{stage}.pt")
        if 0 < self.done[stage] < num_steps:
            for optimizer, state in zip(self._optimizers, torch.load(optimizer_path, weights_only=True), strict=True):
                optimizer.load_state_dict(state)
        for step in range(self.done[stage], num_steps):
            share = _rate(step, num_steps)
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["full_lr"] * share
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(step)
            loss.backward()
            nn.utils.clip_grad_norm_([parameter for _, parameter in parameters], 1.0)
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.done[stage] = step + 1
            if (step + 1) % _CHECKPOINT_EVERY_STEPS == 0 or step + 1 == num_steps:
                self._save(optimizer_path)
            yield loss.item()

    def _save(self, optimizer_path: Path) -> None:
        _save_whole([optimizer.state_dict() for optimizer in self._optimizers], optimizer_path)
        _save_whole({"done": self.done, "model": self.model.state_dict(), "heads": self.heads.state_dict()}, self.path)


def _save_whole(state: Any, path: Path) -> None:
    """So that an interrupted run leaves the file of before."""
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def _labels_of(pictures: Pictures, chosen: np.ndarray) -> tuple[Labels, torch.Tensor]:
    labels = Labels(*(getattr(pictures.labels, name)[chosen] for name in Labels.__slots__))
    background = [COLOUR_NAMES.index(pictures.scenes[index].background) for index in chosen]
    return labels, torch.tensor(background)


def _optimizers(parameters: list[tuple[str, nn.Parameter]], rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers, AdamW for embeddings, heads, norms and biases. The tower learns more slowly when
    it is not alone.
    """

    def is_matrix(name: str, parameter: nn.Parameter) -> bool:
        return parameter.ndim == 2 and not any(word in name for word in ("embed", "heads", "lm_head"))

    with_tower_only = all("language_model" not in name for name, _ in parameters)

    def groups(wanted: bool, full_lr: float) -> list[dict[str, Any]]:
        found: dict[bool, list[nn.Parameter]] = {}
        for name, parameter in parameters:
            if is_matrix(name, parameter) == wanted:
                found.setdefault("vision_tower" in name and not with_tower_only, []).append(parameter)
        return [
            {"params": members, "lr": 0.0, "full_lr": full_lr * (0.3 if is_slow else 1.0)}
            for is_slow, members in found.items()
        ]

    return [
        torch.optim.Muon(groups(True, rate), lr=0.0, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups(False, rate * 0.8), lr=0.0, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def _rate(step: int, num_steps: int) -> float:
    """Rises for 50 steps, stays, and falls to nothing over the last 45 %."""
    return min(1.0, (step + 1) / 50, max(0.01, (num_steps - step) / (0.45 * num_steps)))


def _plain_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax over plain products: on a CPU in bfloat16 quicker than torch's fused one with a mask."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    weights = scores.float().softmax(-1).to(value.dtype)
    return (weights @ value).transpose(1, 2), None
