"""Tokens and text of native-resolution images and videos, by the released models' rules.

Qwen2-VL (arXiv 2409.12191, section 2.1), Qwen3-VL, GLM-4.5V (arXiv 2507.01006), Kimi-VL (arXiv
2504.07491) and Gemma 3 (arXiv 2503.19786, section 2.1); tests compare with Transformers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.image_sizes import IMAGE, ImageSizes
from omnibal.data.sample import Sample, Video
from omnibal.data.stored_files import BadFile, ImageFile
from omnibal.data.video_files import read_video_header
from omnibal.model.encoders import ImageRule, VideoConfig

MAX_ASPECT_RATIO = 200  # max ratio of longest to shortest side of Qwen's and GLM's processors


class Grid(NamedTuple):
    """Patches of an image or video; `merge_size`^2 adjacent patches are a cell, of one token."""

    times: int  # groups of frames that share patches, 1 for an image
    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.times * self.rows * self.columns


class Shown(NamedTuple):
    """Image or video of a sample, as patches."""

    grid: Grid
    seconds: float | None = None  # seconds between frame groups of a video, None for an image


class Segments(NamedTuple):
    """Image or video as runs of tokens; attention is within a run (image or frame group)."""

    number: int
    tokens: int  # per run

    @property
    def all_tokens(self) -> int:
        return self.number * self.tokens


def image_segments(width: int, height: int, rule: ImageRule) -> Segments:
    """Return the run of an image of `width` x `height` pixels; raises BadFile if too narrow.

    Example:
        >>> image_segments(640, 480, ImageRule(patch_size=14))
        Segments(number=1, tokens=391)
    """
    return segments_of(image_grid(width, height, rule), rule)


def segments_of(grid: Grid, rule: ImageRule) -> Segments:
    """Return the runs of tokens of an image or video from its patches."""
    return Segments(grid.times, grid.rows * grid.columns // rule.merge_size**2)


def sizes_of(shown: Sequence[Sequence[Segments]]) -> ImageSizes:
    images = [run for segments in shown for run in segments]
    counts = [len(segments) for segments in shown]
    return ImageSizes(images=np.array(images, IMAGE), counts=np.array(counts, np.int64))


@lru_cache(maxsize=65_536)
def image_grid(width: int, height: int, rule: ImageRule) -> Grid:
    """Return the patches of a `width` x `height` pixel image; raises BadFile if too narrow."""
    cell = rule.cell_pixels
    match rule.resize:
        case "fixed":
            size = (math.isqrt(rule.max_pixels),) * 2
        case "padded":
            size = _pad_sides(width, height, rule)
        case "smart":
            size = _fit_pixels(width, height, cell, (rule.min_pixels, rule.max_pixels))
        case "repeated":
            limits, frames = (rule.min_pixels, rule.max_pixels), rule.frames_per_patch
            size = _fit_pixels(*_enlarge(width, height, cell), cell, limits, frames, frames)
    return _count_patches(1, size, rule)


@lru_cache(maxsize=65_536)
def video_grid(frames: int, width: int, height: int, rule: ImageRule) -> Grid:
    """Return a video's patches, its last group filled up; raises BadFile if too narrow."""
    if rule.video is None:
        return image_grid(width, height, rule)._replace(times=frames)
    cell, together = rule.cell_pixels, rule.frames_per_patch
    limits, groups = (rule.video.min_pixels, rule.video.max_pixels), -(-frames // together)
    if rule.video.counts_frames:
        frames = max(frames, together)
        rounded = round(frames / together) * together
        size = _fit_pixels(*_enlarge(width, height, cell), cell, limits, frames, rounded)
    else:
        size = _fit_pixels(width, height, cell, limits)
    return _count_patches(groups, size, rule)


def _count_patches(times: int, size: tuple[int, int], rule: ImageRule) -> Grid:
    width, height = size
    return Grid(times, rows=height // rule.patch_size, columns=width // rule.patch_size)


def _fit_pixels(
    width: int,
    height: int,
    cell: int,
    limits: tuple[int, int],
    frames: int = 1,
    rounded_frames: int = 1,
) -> tuple[int, int]:
    """Return width and height in whole cells, within limits on the pixels of all frames.

    `rounded_frames` is `frames` rounded to whole patches.
    """
    ratio = max(width, height) / min(width, height)
    if ratio > MAX_ASPECT_RATIO:
        raise BadFile(
            f"is {ratio:.0f} times as long as it is wide, and may be {MAX_ASPECT_RATIO}; remove it"
        )
    sides = tuple(round(side / cell) * cell for side in (width, height))
    pixels, (min_pixels, max_pixels) = rounded_frames * sides[0] * sides[1], limits
    if pixels > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        sides = tuple(
            max(cell, math.floor(side / shrink / cell) * cell) for side in (width, height)
        )
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        sides = tuple(math.ceil(side * grow / cell) * cell for side in (width, height))
    return sides[0], sides[1]


def _enlarge(width: int, height: int, cell: int) -> tuple[int, int]:
    """Return both sides scaled up to at least one cell."""
    if min(width, height) >= cell:
        return width, height
    scale = max(cell / height, cell / width)
    return int(width * scale), int(height * scale)


def _pad_sides(width: int, height: int, rule: ImageRule) -> tuple[int, int]:
    """Return both sides shrunk to the max number of patches and padded to whole cells."""
    patch, cell = rule.patch_size, rule.cell_pixels
    patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(rule.max_pixels // patch**2 / patches))
    longest = rule.max_side_pixels
    if longest is not None:
        scale = min(scale, longest / width, longest / height)

    def pad(side: int) -> int:
        shrunk = max(1, int(side * scale))
        return -(-(shrunk if longest is None else min(shrunk, longest)) // cell) * cell

    return pad(width), pad(height)


def seen_frames(frames: int, video: VideoConfig) -> list[int]:
    """Return indices of up to `video.max_frames` frames, evenly spread from first to last.

    Example:
        >>> seen_frames(9, VideoConfig(max_frames=3))
        [0, 4, 8]
    """
    if frames <= video.max_frames:
        return list(range(frames))
    step = (frames - 1) / max(video.max_frames - 1, 1)
    return [round(step * place) for place in range(video.max_frames)]


def check_frames_of_patch(frames: int, rule: ImageRule) -> None:
    """Raise BadFile if a video has fewer frames than share a patch, as Qwen3-VL's processor."""
    together = rule.frames_per_patch
    if frames < together:
        raise BadFile(f"has {frames} frame(s), and {together} share a patch; name it as an image")


def sampled_frames(
    frames: int, frames_per_second: float, video: VideoConfig, rule: ImageRule
) -> list[int]:
    """Return indices of `video.frames_per_second` frames per second, as Qwen's processors sample.

    Equal steps from the first frame (Qwen2-VL), or even from first to last (Qwen3-VL). Raises
    BadFile if the video has fewer frames than share a patch.
    """
    check_frames_of_patch(frames, rule)
    together = rule.frames_per_patch
    wanted = frames / frames_per_second * video.frames_per_second
    if video.sampling == "ends":
        number = min(max(int(wanted), video.min_frames), video.max_frames, frames)
        return np.linspace(0, frames - 1, number).round().astype(int).tolist()
    limit = min(video.max_frames, frames) // together * together
    number = math.floor(min(max(wanted, video.min_frames), limit) / together) * together
    # float32 as in torch.arange, which may yield an extra frame past the end.
    steps = (np.arange(number) * (frames / number)).astype(np.float32)
    return steps.astype(int).tolist()


def repeated_tokens(rule: ImageRule) -> tuple[str, ...]:
    """Return the placeholder pieces of images and videos, each once."""
    pieces = (rule.image_text, *((rule.video.text,) if rule.video else ()))
    return tuple(dict.fromkeys(text.each for text in pieces))


ImageSize = Callable[[ImageFile], tuple[int, int]]  # upright width and height in pixels


@dataclass(frozen=True, slots=True)
class SeenVideo:
    """Frames of a video shown to the model."""

    frames: tuple[int, ...]  # indices of shown frames, from 0, ascending
    total: int  # frames of the whole video
    frames_per_second: float  # rate of the whole video; assumed for folders of frames

    def text(self, rule: ImageRule) -> str:
        """Return text with `count_places` placeholders; frames are images without rule.video."""
        video, together = rule.video, rule.frames_per_patch
        if video is None:
            return rule.image_text.text * len(self.frames)
        of_patch = video.text.text
        if video.times == "none":
            return video.around[0] + of_patch + video.around[1]
        seconds = [frame / self.frames_per_second for frame in self.frames]
        patches = [seconds[first : first + together] for first in range(0, len(seconds), together)]
        if video.times == "before":
            texts = [f"<{(patch[0] + patch[-1]) / 2:.1f} seconds>{of_patch}" for patch in patches]
        else:
            texts = [f"{of_patch}{int(patch[0])}" for patch in patches]
        return video.around[0] + "".join(texts) + video.around[1]

    def count_places(self, rule: ImageRule) -> int:
        """Count the placeholder tokens in the text."""
        if rule.video is None:
            return len(self.frames)
        return 1 if rule.video.times == "none" else -(-len(self.frames) // rule.frames_per_patch)


def seen_videos(sample: Sample, rule: ImageRule) -> list[SeenVideo]:
    """Return the frames shown of each of a sample's videos; raises UserError if unusable."""
    return [_choose_frames(video, sample, rule) for video in sample.videos]


def _choose_frames(video: Video, sample: Sample, rule: ImageRule) -> SeenVideo:
    if video.file is None and rule.video is None:
        total = len(video.frames)
        return SeenVideo(tuple(range(total)), total, 1.0)
    if rule.video is None:
        raise UserError(f"{sample.where}: shows {video} to a model of images; name its frames")
    try:
        if video.file is None:
            total, path = len(video.frames), video.frames[0].path
            if total == 1 and not path.is_file():
                why = "holds no frames; fill it" if path.is_dir() else "does not exist; correct it"
                raise BadFile(f"{why} or remove the sample")
            check_frames_of_patch(total, rule)
            shown = tuple(seen_frames(total, rule.video))
            return SeenVideo(shown, total, rule.video.frames_per_second)
        header = read_video_header(video.file)
        frames = sampled_frames(header.frames, header.frames_per_second, rule.video, rule)
    except BadFile as error:
        raise UserError(f"{sample.where}: video {video} {error}") from error
    return SeenVideo(tuple(frames), header.frames, header.frames_per_second)


def shown_of(sample: Sample, rule: ImageRule, image_size: ImageSize) -> list[Shown]:
    """Return images and videos in token order; frames are images without rule.video."""
    seen = iter(seen_videos(sample, rule))
    shown: list[Shown] = []
    for item in sample.shown_in_order:
        try:
            if isinstance(item, Video):
                shown += _list_video_patches(item, next(seen), sample, rule, image_size)
            else:
                shown.append(Shown(image_grid(*image_size(item), rule)))
        except BadFile as error:
            raise UserError(f"{sample.where}: {item} {error}; crop or remove it") from error
    return shown


def _list_video_patches(
    video: Video, seen: SeenVideo, sample: Sample, rule: ImageRule, image_size: ImageSize
) -> list[Shown]:
    if video.file is not None:
        header = read_video_header(video.file)
        size = header.width, header.height
    else:
        files = [video.frames[number] for number in seen.frames]
        sizes = [image_size(file) for file in files]
        if rule.video is None:
            return [Shown(image_grid(*size, rule)) for size in sizes]
        other = next((place for place, size in enumerate(sizes) if size != sizes[0]), None)
        if other is not None:
            raise UserError(
                f"{sample.where}: frame {files[other]} has {sizes[other]} pixels, and the video's "
                f"first {sizes[0]}; make frames equally large, or name them as images"
            )
        size = sizes[0]
    grid = video_grid(len(seen.frames), *size, rule)
    seen_per_second = len(seen.frames) / seen.total * seen.frames_per_second
    return [Shown(grid, rule.frames_per_patch / seen_per_second)]


def tokens_of_places(shown: Sequence[Shown], rule: ImageRule) -> list[int]:
    """Return the tokens of each placeholder: an image, a frame group or a whole video."""
    tokens: list[int] = []
    for grid, seconds in shown:
        cells = grid.rows * grid.columns // rule.merge_size**2
        apart = seconds is not None and rule.video is not None and rule.video.times != "none"
        tokens += [cells] * grid.times if apart else [cells * grid.times]
    return tokens
