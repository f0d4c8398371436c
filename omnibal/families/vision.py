"""What the tables of vision towers at native resolution have alike, and an image's pixels."""

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PositiveInt

from omnibal.families.hub_table import HubTable
from omnibal.families.processor import Colour, read_processor, read_video_processor
from omnibal.model.encoders import VideoConfig

Square = PositiveInt | Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
"""A side, or both sides of a rectangle."""


class LayersTable(HubTable):
    """Keys of a tower's layers, named as those of language models are."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt

    @property
    def layer_sizes(self) -> dict[str, Any]:
        """Fields of an encoder about its layers."""
        return {
            "layers": self.num_hidden_layers,
            "hidden_size": self.hidden_size,
            "heads": self.num_attention_heads,
            "ffn_hidden_size": self.intermediate_size,
        }


class DepthTable(HubTable):
    """Keys of the towers of Qwen2-VL and those after it."""

    depth: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    in_channels: Literal[3] = 3
    patch_size: Square
    spatial_merge_size: PositiveInt = 2
    temporal_patch_size: PositiveInt = 2
    rope_parameters: dict[str, Any] | None = None

    def sizes_of(self, hidden_size: int, ffn_hidden_size: int) -> dict[str, Any]:
        """Fields of an ImagesEncoder that all of these towers have."""
        return {
            "layers": self.depth,
            "hidden_size": hidden_size,
            "heads": self.num_heads,
            "ffn_hidden_size": ffn_hidden_size,
            "patch_size": square(self.patch_size, "patch_size"),
            "merge_size": self.spatial_merge_size,
            "frames_per_patch": self.temporal_patch_size,
            "qk_norm": False,
        }


class VisionTable(DepthTable):
    """Keys of the towers of Qwen2.5-VL and those after it."""

    intermediate_size: PositiveInt

    @property
    def sizes(self) -> dict[str, Any]:
        """Fields of an ImagesEncoder, whose layers are of the table's widths."""
        return self.sizes_of(self.hidden_size, self.intermediate_size)


def square(sides: int | list[int], name: str) -> int:
    """The side of a square that is given by one side or by both."""
    if isinstance(sides, int):
        return sides
    if len(set(sides)) != 1:
        raise ValueError(f"{name} is {sides}; it must be a square")
    return sides[0]


class Pixels(NamedTuple):
    """Pixels of a family's released models, for a folder without an image processor's file."""

    least: int
    """Least area of an image."""
    most: int
    mean: Colour = (0.5, 0.5, 0.5)
    """By which, and by `std`, colours become -1 to 1."""
    std: Colour = (0.5, 0.5, 0.5)


CLIP_MEAN: Colour = (0.48145466, 0.4578275, 0.40821073)
"""Mean of the colours that OpenAI's CLIP was trained with."""
CLIP_STD: Colour = (0.26862954, 0.26130258, 0.27577711)
"""Their standard deviation."""
_BICUBIC = 3  # as Pillow numbers it


def pixels(config: Path, sizes: dict[str, Any], default: Pixels) -> dict[str, Any]:
    """Fields of an ImagesEncoder about the pixels of an image.

    Args:
        config: the `config.json`, beside which the image processor's file may be.
    """
    processor = read_processor(config, sizes)
    if not (processor.do_rescale and processor.do_normalize):
        raise ValueError("do_rescale and do_normalize of the image processor must be true")
    if processor.resample not in (None, _BICUBIC):
        raise ValueError(
            f"resample of the image processor is {processor.resample}; it must be {_BICUBIC}, "
            "bicubic"
        )
    return {
        "min_pixels": processor.least_pixels or default.least,
        "max_pixels": processor.most_pixels or default.most,
        "pixel_mean": processor.image_mean or default.mean,
        "pixel_std": processor.image_std or default.std,
        "pixel_scale": processor.rescale_factor,
    }


def video_of(config: Path, default: VideoConfig) -> VideoConfig:
    """How a video becomes tokens, by the video processor's file beside a `config.json`.

    Args:
        default: what the family's released models have, for what the file does not say.
    """
    changes = read_video_processor(config).changes
    return VideoConfig.model_validate({**default.model_dump(), **changes}) if changes else default
