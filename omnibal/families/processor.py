"""Image and video processor files next to `config.json`: pixel limits, frames, normalisation."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, PositiveFloat, PositiveInt

from omnibal.base.errors import UserError
from omnibal.base.files import parse_json_model, read_text

_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
_VIDEO_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")
_PROCESSOR_REMEDY = "correct it, or move it away to plan with the family's defaults"


class _ImageSize(BaseModel):
    shortest_edge: PositiveInt | None = None  # both are areas in pixels, despite their names
    longest_edge: PositiveInt | None = None
    height: PositiveInt | None = None
    width: PositiveInt | None = None


class _PatchLimit(BaseModel):
    in_patch_limit: PositiveInt | None = None


Colour = tuple[float, float, float]  # red, green, blue


class Processor(BaseModel):
    """Image processor fields that determine tokens and pixel values."""

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
    size: _ImageSize | PositiveInt | None = None
    min_patches: PositiveInt | None = None  # tiles of an image (InternVL), like `max_patches`
    max_patches: PositiveInt | None = None
    in_token_limit: PositiveInt | None = None
    media_proc_cfg: _PatchLimit | None = None

    @property
    def area_limits(self) -> tuple[int | None, int | None]:
        """Min and max pixels of an image or None; `min_pixels` and `max_pixels` override `size`."""
        size = self.size if isinstance(self.size, _ImageSize) else _ImageSize()
        return self.min_pixels or size.shortest_edge, self.max_pixels or size.longest_edge

    @property
    def side(self) -> int | None:
        """Side in pixels if images are resized to a fixed square, else None."""
        return self.size.height if isinstance(self.size, _ImageSize) else None

    @property
    def max_image_patches(self) -> int | None:
        """Max patches per image (Kimi), or None if absent."""
        limits = self.media_proc_cfg
        return self.in_token_limit or (None if limits is None else limits.in_patch_limit)


class VideoProcessor(BaseModel):
    """Video processor fields that determine frames and pixels."""

    fps: PositiveFloat | None = None
    min_frames: PositiveInt | None = None
    max_frames: PositiveInt | None = None
    min_pixels: PositiveInt | None = None  # of a frame (Qwen2-VL), like `max_pixels`
    max_pixels: PositiveInt | None = None
    size: _ImageSize | None = None
    num_frames: None = None  # a fixed number of frames is not supported
    cap_pixels_per_frame: Literal[False] | None = None  # nor is Transformers' second limit

    def changes(self, per_frame: bool) -> dict[str, Any]:
        """Return VideoConfig fields of the file; `min_pixels`, `max_pixels` only if `per_frame`."""
        size = self.size or _ImageSize()
        min_pixels, max_pixels = (self.min_pixels, self.max_pixels) if per_frame else (None, None)
        given = {
            "frames_per_second": self.fps,
            "min_frames": self.min_frames,
            "max_frames": self.max_frames,
            "min_pixels": min_pixels or size.shortest_edge,
            "max_pixels": max_pixels or size.longest_edge,
        }
        return {name: value for name, value in given.items() if value is not None}


class _Nested(BaseModel):
    image_processor: dict[str, Any] | None = None
    video_processor: dict[str, Any] | None = None


def read_processor(config: Path, sizes: dict[str, Any]) -> Processor:
    """Return the image processor of a file next to `config.json`, or defaults without one.

    Raises:
        UserError: if the file is invalid, differs from the tower's `sizes` or has do_resize false.
    """
    remedy = _PROCESSOR_REMEDY
    path = next(filter(Path.is_file, map(config.with_name, _IMAGE_FILES)), None)
    if path is None:
        return Processor()
    text = read_text(path, remedy)
    nested = parse_json_model(_Nested, text, str(path), remedy).image_processor
    if nested is not None:
        text = json.dumps(nested)
    processor = parse_json_model(Processor, text, str(path), remedy)
    for name in ("patch_size", "merge_size"):
        given = processor.model_dump()[name]
        if isinstance(given, int) and given != sizes.get(name, given):
            raise UserError(f"{path}: has {name} {given}, and config.json {sizes[name]}; {remedy}")
    if not processor.do_resize:
        raise UserError(f"{path}: has do_resize false, which limits no image; {remedy}")
    return processor


def read_video_processor(config: Path) -> VideoProcessor:
    """Return the video processor of a file next to `config.json`, or defaults without one."""
    # Transformers' order: joint file, video file, image file, whose pixels then limit a frame.
    remedy = _PROCESSOR_REMEDY
    joint = config.with_name("processor_config.json")
    if joint.is_file():
        text = read_text(joint, remedy)
        nested = parse_json_model(_Nested, text, str(joint), remedy).video_processor
        if nested is not None:
            return parse_json_model(VideoProcessor, json.dumps(nested), str(joint), remedy)
    for file in map(config.with_name, _VIDEO_FILES):
        if file.is_file():
            return parse_json_model(VideoProcessor, read_text(file, remedy), str(file), remedy)
    return VideoProcessor()
