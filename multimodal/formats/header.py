"""What the first look at a picture says, before anything is decoded."""

from __future__ import annotations

from dataclasses import dataclass

from multimodal.errors import MediaError


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Height and width as stored, in pixels. `orientation` is EXIF's, 1 to 8.

    `num_frames` is what was counted before counting stopped: exact, or more than the limit that was given.
    """

    height: int
    width: int
    orientation: int = 1
    num_frames: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) as shown, that is with the orientation applied."""
        return (self.width, self.height) if self.orientation >= 5 else (self.height, self.width)


def broken(name: str, reason: str) -> MediaError:
    return MediaError(f"broken {name} image: {reason}")
