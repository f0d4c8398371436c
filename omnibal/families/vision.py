"""What the tables of vision towers at native resolution have alike, and an image's pixels."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from omnibal.families.hub_table import HubTable
from omnibal.families.processor import Processor, read_processor

Square = PositiveInt | Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
"""A side, or both sides of a rectangle."""


class VisionTable(HubTable):
    """Keys of the towers of Qwen2-VL and those after it."""

    depth: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    in_channels: Literal[3] = 3
    patch_size: Square
    spatial_merge_size: PositiveInt = 2
    temporal_patch_size: PositiveInt = 2
    rope_parameters: dict[str, Any] | None = None

    @property
    def sizes(self) -> dict[str, Any]:
        """Fields of an ImagesEncoder that all of these towers have."""
        return {
            "layers": self.depth,
            "hidden_size": self.hidden_size,
            "heads": self.num_heads,
            "ffn_hidden_size": self.intermediate_size,
            "patch_size": square(self.patch_size, "patch_size"),
            "merge_size": self.spatial_merge_size,
            "frames_per_patch": self.temporal_patch_size,
            "qk_norm": False,
        }


def square(sides: int | list[int], name: str) -> int:
    """The side of a square that is given by one side or by both.

    Raises:
        ValueError: the sides differ.
    """
    if isinstance(sides, int):
        return sides
    if len(set(sides)) != 1:
        raise ValueError(f"{name} is {sides}; it must be a square")
    return sides[0]


def pixels(config: Path, sizes: dict[str, Any], *, least: int, most: int) -> dict[str, int]:
    """Fields of an ImagesEncoder about the area of an image.

    Args:
        config: the `config.json`, beside which the image processor's file may be.
        sizes: of the tower, with its patches and cells.
        least, most: what the family's released models have, for a folder without that file.
    """
    limits = processor_of(config, sizes)
    return {"min_pixels": limits.least_pixels or least, "max_pixels": limits.most_pixels or most}


def processor_of(config: Path, sizes: dict[str, Any]) -> Processor:
    """The image processor beside a `config.json`, which must agree with the tower's sizes."""
    return read_processor(config, patch_size=sizes["patch_size"], merge_size=sizes["merge_size"])
