"""Everything a loaded model needs for pictures, worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine_core.runner import MultimodalInfo
from ipc.vocabulary import MultimodalFeature

from .picture_encoder import PictureEncoder, picture_owner
from .picture_groups import joins_touching
from .picture_positions import PicturePositions


@dataclass(frozen=True, slots=True)
class Pictures:
    """`positions` is None where a token's place in the sequence is its position."""

    encoder: PictureEncoder
    positions: PicturePositions | None
    joins_touching: bool

    @classmethod
    def of(cls, model: Any, config: Any) -> Pictures:
        """Those of a loaded model with `get_image_features`.

        Raises:
            UnsupportedModelError: the tokens of its pictures see what a step cannot give them, or its layers are given
                pictures in an unknown way.
        """
        owner = picture_owner(model)
        return cls(
            PictureEncoder(model, config),
            PicturePositions(owner, config) if PicturePositions.are_used_by(owner) else None,
            joins_touching(type(model), config),
        )

    @property
    def info(self) -> MultimodalInfo:
        return MultimodalInfo(self.encoder.row_bytes, joins_touching=self.joins_touching)

    def check(self, features: Sequence[MultimodalFeature]) -> None:
        """As `engine_core.runner.Runner.check_features`."""
        if self.positions is not None:
            self.positions.check(features)
