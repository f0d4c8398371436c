"""Shared tables of native-resolution vision towers, and pixel limits."""

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PositiveInt

from omnibal.families.hub_table import HubTable
from omnibal.families.processor import Colour, read_processor, read_video_processor
from omnibal.model.encoders import VideoConfig

Square = PositiveInt | Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
"""A side, or both sides of a rectangle."""


class LayersTable(HubTable):
    """Keys of a tower's layers, named like language models'."""

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
    """Keys of Qwen2-VL's tower and later."""

    depth: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    in_channels: Literal[3] = 3
    patch_size: Square
    spatial_merge_size: PositiveInt = 2
    temporal_patch_size: PositiveInt = 2
    rope_parameters: dict[str, Any] | None = None

    def sizes_of(self, hidden_size: int, ffn_hidden_size: int) -> dict[str, Any]:
        """Fields of an ImagesEncoder shared by these towers."""
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
    """Keys of Qwen2.5-VL's tower and later."""

    intermediate_size: PositiveInt

    @property
    def sizes(self) -> dict[str, Any]:
        """Fields of an ImagesEncoder with the table's widths."""
        return self.sizes_of(self.hidden_size, self.intermediate_size)


def square(sides: int | list[int], name: str) -> int:
    """Side of a square given by one or both sides."""
    if isinstance(sides, int):
        return sides
    if len(set(sides)) != 1:
        raise ValueError(f"{name} is {sides}; it must be a square")
    return sides[0]


class Pixels(NamedTuple):
    """Pixel limits of released models, used without an image processor's file."""

    least: int
    """Min area of an image."""
    most: int
    mean: Colour = (0.5, 0.5, 0.5)
    """Normalises colours, with `std`."""
    std: Colour = (0.5, 0.5, 0.5)


CLIP_MEAN: Colour = (0.48145466, 0.4578275, 0.40821073)
"""Colour mean of OpenAI's CLIP."""
CLIP_STD: Colour = (0.26862954, 0.26130258, 0.27577711)
"""Colour standard deviation of OpenAI's CLIP."""
_BICUBIC = 3  # Pillow's number


def pixels(config: Path, sizes: dict[str, Any], default: Pixels) -> dict[str, Any]:
    """Pixel fields of an ImagesEncoder.

    Args:
        config: the `config.json`, next to an optional image processor's file.
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
    """Video settings of the video processor's file next to a `config.json`, over `default`."""
    changes = read_video_processor(config).changes(older=not default.counts_frames)
    return VideoConfig.model_validate({**default.model_dump(), **changes}) if changes else default
