"""Patch grids of a sample's native-resolution images and videos, from headers alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omnibal.base.errors import UserError
from omnibal.data.native_resolution import (
    OddImage,
    Shown,
    check_frames,
    image_grid,
    sampled_frames,
    seen_frames,
    video_grid,
    video_text,
)
from omnibal.data.sample import Sample, Video
from omnibal.data.stored_files import ImageFile
from omnibal.data.video_files import BadVideo, read_video_header
from omnibal.model.encoders import ImageRule

ImageSize = Callable[[ImageFile], tuple[int, int]]
"""Upright width and height in pixels."""


@dataclass(frozen=True, slots=True)
class SeenVideo:
    """Part of a video shown to the model."""

    frames: tuple[int, ...]
    """Indices of shown frames, from 0, ascending."""
    total: int
    """Frames of the whole video."""
    frames_per_second: float
    """Rate of the whole video."""

    def text(self, rule: ImageRule) -> str:
        """Text of the video, with a token per run."""
        return video_text(self.frames, rule, self.frames_per_second)


def seen_videos(sample: Sample, rule: ImageRule) -> list[SeenVideo]:
    """Videos of a sample as shown to the model."""
    return [_seen(video, sample, rule) for video in sample.videos]


def _seen(video: Video, sample: Sample, rule: ImageRule) -> SeenVideo:
    rate = 1.0 if rule.video is None else rule.video.frames_per_second
    if video.file is None and rule.video is None:
        total = len(video.frames)
        return SeenVideo(tuple(seen_frames(total, None)), total, rate)
    if rule.video is None:
        raise UserError(
            f"{sample.where}: shows the video file {video}, and the model takes images alone; "
            "extract its frames and name them as images"
        )
    try:
        if video.file is None:
            total, path = len(video.frames), video.frames[0].path
            if total == 1 and not path.is_file():
                why = "holds no frames; fill it" if path.is_dir() else "does not exist; correct it"
                raise BadVideo(f"{why} or remove the sample")
            check_frames(total, rule)
            return SeenVideo(tuple(seen_frames(total, rule.video)), total, rate)
        header = read_video_header(video.file)
        frames = sampled_frames(header.frames, header.frames_per_second, rule.video, rule)
    except (BadVideo, OddImage) as error:
        raise UserError(f"{sample.where}: video {video} {error}") from error
    return SeenVideo(tuple(frames), header.frames, header.frames_per_second)


def shown_of(sample: Sample, rule: ImageRule, image_size: ImageSize) -> list[Shown]:
    """Patches of images and videos in token order. Videos without a rule are images per frame."""
    seen = iter(seen_videos(sample, rule))
    found: list[Shown] = []
    for item in sample.shown_in_order:
        try:
            if isinstance(item, Video):
                found += _shown_video(item, next(seen), sample, rule, image_size)
            else:
                found.append(Shown(image_grid(*image_size(item), rule)))
        except OddImage as error:
            raise UserError(
                f"{sample.where}: {item} {error}; crop it or remove the sample"
            ) from error
    return found


def _shown_video(
    video: Video, seen: SeenVideo, sample: Sample, rule: ImageRule, image_size: ImageSize
) -> list[Shown]:
    if video.file is not None:
        header = read_video_header(video.file)
        size = header.width, header.height
    else:
        files = [video.frames[number] for number in seen.frames]
        sizes = [image_size(file) for file in files]
        if rule.video is None:
            return [Shown(image_grid(*each, rule)) for each in sizes]
        other = next((place for place, each in enumerate(sizes) if each != sizes[0]), None)
        if other is not None:
            raise UserError(
                f"{sample.where}: frame {files[other]} has {sizes[other]} pixels, and the video's "
                f"first {sizes[0]}; frames of a video must be equally large: make them so, or name "
                "them as images"
            )
        size = sizes[0]
    grid = video_grid(len(seen.frames), *size, rule)
    seen_per_second = len(seen.frames) / seen.total * seen.frames_per_second
    return [Shown(grid, rule.frames_per_patch / seen_per_second)]


def tokens_of_places(shown: Sequence[Shown], rule: ImageRule) -> list[int]:
    """Tokens of each placeholder in the text."""
    tokens: list[int] = []
    for grid, seconds in shown:
        cells = grid.rows * grid.columns // rule.merge_size**2
        apart = seconds is not None and rule.video is not None and rule.video.times != "none"
        tokens += [cells] * grid.times if apart else [cells * grid.times]
    return tokens
