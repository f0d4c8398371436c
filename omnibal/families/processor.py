"""Image and video processor files next to `config.json`: pixel limits, frames, normalisation."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, model_validator

from omnibal.base.errors import UserError
from omnibal.base.files import parse_json_model, read_json_model

_IMAGE_FILE, _JOINT_FILE = "preprocessor_config.json", "processor_config.json"
_VIDEO_FILE = "video_preprocessor_config.json"
_REMEDY = "correct it, or move it away to plan with the family's defaults"
P = TypeVar("P", "Processor", "VideoProcessor")


class _ImageSize(BaseModel):
    shortest_edge: PositiveInt | None = None  # both are areas in pixels, despite their names
    longest_edge: PositiveInt | None = None
    height: PositiveInt | None = None


class _PatchLimit(BaseModel):
    in_patch_limit: PositiveInt | None = None


Colour = tuple[float, float, float]  # red, green, blue


class Processor(BaseModel):
    """Image processor fields that determine tokens and pixel values."""

    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    resample: int | None = None
    pixel_scale: PositiveFloat = Field(default=1 / 255, alias="rescale_factor")
    pixel_mean: Colour | None = Field(default=None, alias="image_mean")
    pixel_std: Colour | None = Field(default=None, alias="image_std")
    patch_size: PositiveInt | dict[str, PositiveInt] | None = None
    merge_size: PositiveInt | None = None
    min_pixels: PositiveInt | None = None
    max_pixels: PositiveInt | None = None
    size: _ImageSize | PositiveInt | None = None
    # Tiles of an image (InternVL).
    min_dynamic_patch: PositiveInt | None = Field(default=None, alias="min_patches")
    max_dynamic_patch: PositiveInt | None = Field(default=None, alias="max_patches")
    in_token_limit: PositiveInt | None = None
    media_proc_cfg: _PatchLimit | None = None

    @model_validator(mode="after")
    def _take_area_of_size(self) -> "Processor":
        if isinstance(self.size, _ImageSize):
            self.min_pixels = self.min_pixels or self.size.shortest_edge
            self.max_pixels = self.max_pixels or self.size.longest_edge
        return self

    def fields(self, *names: str) -> dict[str, Any]:
        """Return the fields of an encoder or tiling that the file has."""
        return self.model_dump(include={*names}, exclude_none=True)

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


def _read_first(kind: type[P], key: str, files: Iterable[Path]) -> tuple[P, Path | None]:
    """Return the processor of the first file that exists, and the file; a joint file's at `key`."""
    for path in filter(Path.is_file, files):
        settings = read_json_model(dict[str, Any], path, _REMEDY)
        if path.name != _JOINT_FILE or settings.get(key) is not None:
            text = json.dumps(settings.get(key) or settings)
            return parse_json_model(kind, text, str(path), _REMEDY), path
    return kind(), None


def read_processor(config: Path, sizes: dict[str, Any]) -> Processor:
    """Return the image processor of a file next to `config.json`, or defaults without one.

    Raises:
        UserError: if the file is invalid, differs from the tower's `sizes` or has do_resize false.
    """
    files = map(config.with_name, (_IMAGE_FILE, _JOINT_FILE))
    processor, path = _read_first(Processor, "image_processor", files)
    for name, given in (("patch_size", processor.patch_size), ("merge_size", processor.merge_size)):
        if isinstance(given, int) and given != sizes.get(name, given):
            raise UserError(f"{path}: has {name} {given}, and config.json {sizes[name]}; {_REMEDY}")
    if not processor.do_resize:
        raise UserError(f"{path}: has do_resize false, which limits no image; {_REMEDY}")
    return processor


def read_video_processor(config: Path) -> VideoProcessor:
    """Return the video processor of a file next to `config.json`, or defaults without one."""
    # Transformers' order: joint file, video file, image file, whose pixels then limit a frame.
    files = map(config.with_name, (_JOINT_FILE, _VIDEO_FILE, _IMAGE_FILE))
    return _read_first(VideoProcessor, "video_processor", files)[0]
