"""What a model's processor makes of a picture's size: the text in its place, its tokens, and what its inputs weigh."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """What is known of a picture before its pixels are processed. Shared by all pictures of a size: change nothing.

    Attributes:
        replacement: the text that takes the place of the model's image token.
        embed_runs: how many tokens in a row the encoder's rows replace, run by run; between two runs stand tokens of
            other kinds (row breaks, tile names).
        input_shapes: shapes of the model inputs, by argument.
        num_input_bytes: what they weigh together.
        layout: the numbers that positions depend on, by argument (`image_grid_thw`: (1, 16, 16)).
        stands_alone: whether the picture is the only one of its prompt; None where that makes no difference to it.
    """

    replacement: str
    embed_runs: tuple[int, ...]
    input_shapes: dict[str, tuple[int, ...]]
    num_input_bytes: int
    layout: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stands_alone: bool | None = None

    @property
    def num_embeds(self) -> int:
        """Rows that the encoder makes of the picture, and tokens they replace."""
        return sum(self.embed_runs)
