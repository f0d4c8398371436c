"""Image and video processor files next to `config.json`."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, PositiveFloat, PositiveInt

from omnibal.base.errors import UserError
from omnibal.base.files import parse_json_model, read_text

_FILES = ("preprocessor_config.json", "processor_config.json")
_VIDEO_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")
_REMEDY = "correct it, or move it away to plan with the family's defaults"


class _Size(BaseModel):
    shortest_edge: PositiveInt | None = None
    longest_edge: PositiveInt | None = None
    height: PositiveInt | None = None
    width: PositiveInt | None = None


class _Limits(BaseModel):
    in_patch_limit: PositiveInt | None = None


Colour = tuple[float, float, float]
"""Red, green and blue."""


class Processor(BaseModel):
    """Image processor fields that determine tokens and values; means and rescaling cost nothing."""

    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    resample: int | None = None
    rescale_factor: PositiveFloat = 1 / 255
    image_mean: Colour | None = None
    image_std: Colour | None = None
    patch_size: PositiveInt | dict[str, PositiveInt] | None = None
    merge_size: PositiveInt | None = None
    temporal_patch_size: PositiveInt | None = None
    min_pixels: PositiveInt | None = None
    max_pixels: PositiveInt | None = None
    size: _Size | PositiveInt | None = None
    min_patches: PositiveInt | None = None
    max_patches: PositiveInt | None = None
    """Max tiles of an image (InternVL)."""
    in_token_limit: PositiveInt | None = None
    media_proc_cfg: _Limits | None = None

    @property
    def least_pixels(self) -> int | None:
        """Min area of an image, in either spelling. The older takes precedence."""
        size = self.size.shortest_edge if isinstance(self.size, _Size) else None
        return self.min_pixels or size

    @property
    def most_pixels(self) -> int | None:
        """Max area of an image, in either spelling."""
        size = self.size.longest_edge if isinstance(self.size, _Size) else None
        return self.max_pixels or size

    @property
    def side(self) -> int | None:
        """Side of fixed-size square images, else None."""
        return self.size.height if isinstance(self.size, _Size) else None

    @property
    def most_patches(self) -> int | None:
        """Max patches per image (Kimi)."""
        limits = self.media_proc_cfg
        return self.in_token_limit or (None if limits is None else limits.in_patch_limit)


class VideoProcessor(BaseModel):
    """Video processor fields that determine frames and pixels."""

    fps: PositiveFloat | None = None
    min_frames: PositiveInt | None = None
    max_frames: PositiveInt | None = None
    min_pixels: PositiveInt | None = None
    """Min area of a frame (Qwen2-VL), like `max_pixels`."""
    max_pixels: PositiveInt | None = None
    size: _Size | None = None
    num_frames: None = None
    """Fixed frame count; not supported."""
    cap_pixels_per_frame: Literal[False] | None = None
    """Extra per-frame limit of Transformers; not supported."""

    def changes(self, older: bool) -> dict[str, Any]:
        """Fields of a VideoConfig from the file; `older`: of Qwen2-VL's processor."""
        size = self.size or _Size()
        least, most = (self.min_pixels, self.max_pixels) if older else (None, None)
        given = {
            "frames_per_second": self.fps,
            "min_frames": self.min_frames,
            "max_frames": self.max_frames,
            "min_pixels": least or size.shortest_edge,
            "max_pixels": most or size.longest_edge,
        }
        return {name: value for name, value in given.items() if value is not None}


class _Nested(BaseModel):
    image_processor: dict[str, Any] | None = None
    video_processor: dict[str, Any] | None = None


def read_processor(config: Path, sizes: dict[str, Any]) -> Processor:
    """Read the image processor's file next to `config.json`, or return defaults.

    It must agree with the tower's `patch_size` and `merge_size`.
    """
    for name in _FILES:
        path = config.with_name(name)
        if not path.is_file():
            continue
        text = read_text(path, _REMEDY)
        nested = parse_json_model(_Nested, text, str(path), _REMEDY).image_processor
        if nested is not None:
            text = json.dumps(nested)
        processor = parse_json_model(Processor, text, str(path), _REMEDY)
        _agrees(processor, path, sizes)
        return processor
    return Processor()


def read_video_processor(config: Path) -> VideoProcessor:
    """Read the first file of a video processor next to `config.json`, or return defaults.

    The files and their order are Transformers'. The last is the image processor's: its pixels are
    limits of a frame then.
    """
    whole = config.with_name("processor_config.json")
    if whole.is_file():
        text = read_text(whole, _REMEDY)
        nested = parse_json_model(_Nested, text, str(whole), _REMEDY).video_processor
        if nested is not None:
            return parse_json_model(VideoProcessor, json.dumps(nested), str(whole), _REMEDY)
    for file in map(config.with_name, _VIDEO_FILES):
        if file.is_file():
            return parse_json_model(VideoProcessor, read_text(file, _REMEDY), str(file), _REMEDY)
    return VideoProcessor()


def _agrees(processor: Processor, path: Path, sizes: dict[str, Any]) -> None:
    for name in ("patch_size", "merge_size"):
        given = processor.model_dump()[name]
        if isinstance(given, int) and given != sizes.get(name, given):
            raise UserError(
                f"{path}: has {name} {given}; it must be {sizes[name]}, as the vision tower of "
                f"config.json has it; {_REMEDY}"
            )
    if not processor.do_resize:
        raise UserError(
            f"{path}: has do_resize false, so nothing limits an image; it must be true; {_REMEDY}"
        )
