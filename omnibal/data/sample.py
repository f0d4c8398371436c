"""Samples to train on: conversations with images, videos and recordings."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePath

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.stored_files import AudioFile, ImageFile, StoredFile, VideoFile
from omnibal.model.encoders import TilingConfig

IMAGE, VIDEO, AUDIO = "<image>", "<video>", "<audio>"
VIDEO_LINE = f"{VIDEO}\n"  # a video's mark with its line end, which frame lines replace
_SHOWN_MARK = re.compile(f"{IMAGE}|{VIDEO}")


@dataclass(frozen=True, slots=True)
class Video:
    """Frames of a video, or its file: exactly one is given."""

    frames: tuple[ImageFile, ...] = ()
    file: VideoFile | None = None

    def __str__(self) -> str:
        return str(self.frames[0] if self.file is None else self.file)


@dataclass(frozen=True, slots=True)
class Turn:
    """Question, with a mark (`<image>`, `<video>`, `<audio>`) per item, and reference answer."""

    question: str
    answer: str
    kind: str | None  # question kind for reported accuracy, from the record's "kinds"
    results: tuple[str, ...] = ()  # tool results instead of a question, which is then empty
    reasoning: str | None = None  # separate reasoning before the answer, if any
    calls: tuple[str, ...] = ()  # tool calls, as JSON objects with "name" and "arguments"
    learned: bool = True  # whether the answer is trained on


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Conversation and its media, each medium in the order of its marks in the questions."""

    identity: str  # source name and record "id" (key or number if absent)
    source: str
    where: str  # file and record number for messages
    images: tuple[ImageFile, ...]
    turns: tuple[Turn, ...]
    videos: tuple[Video, ...] = ()
    recordings: tuple[AudioFile, ...] = ()
    system: str | None = None  # system message, overrides the template's
    greeting: str | None = None  # assistant message before the first question
    greeting_learned: bool = True  # whether the greeting is trained on, if the template writes it
    tools: str | None = None  # tools that the assistant may call, as a JSON list
    of_frames: bool = False  # whether `images` are a video's frames (`shown`)
    augment: bool = False  # `data_augment` of the meta: degrade tiles at random in training
    max_dynamic_patch: int | None = None  # max tiles of an image, None for the model's

    @property
    def extras(self) -> list[str]:
        """Words that a chat template contains if it writes what else the sample has."""
        has = {
            "tools": self.tools is not None,
            "tool_calls": any(turn.calls for turn in self.turns),
            "tool": any(turn.results for turn in self.turns),
            "reasoning_content": any(turn.reasoning is not None for turn in self.turns),
        }
        return [word for word, is_given in has.items() if is_given]

    @property
    def text(self) -> str:
        """All texts, on separate lines."""
        texts = [self.system or "", self.greeting or "", self.tools or ""]
        for turn in self.turns:
            texts += [turn.question, turn.answer, *turn.results, turn.reasoning or "", *turn.calls]
        return "\n".join(texts)

    def tiling(self, tiling: TilingConfig) -> TilingConfig:
        """Return an image's tiling: images share max tiles unless `by_processor`; a frame has 1."""
        max_tiles = self.max_dynamic_patch or tiling.max_dynamic_patch
        images = 1 if tiling.by_processor else max(1, len(self.images))
        return _limit_tiles(tiling, 1 if self.of_frames else max(1, max_tiles // images))

    @property
    def files(self) -> tuple[StoredFile, ...]:
        of_videos = [video.frames if video.file is None else [video.file] for video in self.videos]
        return (*self.images, *(file for files in of_videos for file in files), *self.recordings)

    @property
    def shown_in_order(self) -> tuple[ImageFile | Video, ...]:
        if not self.videos:
            return self.images
        left: dict[str, list] = {IMAGE: [*self.images], VIDEO: [*self.videos]}
        marks = [mark for turn in self.turns for mark in _SHOWN_MARK.findall(turn.question)]
        return tuple(left[mark].pop(0) for mark in marks)

    def items_until(self, mark: str, turn: int) -> int:
        """Count `mark` in questions 0 to `turn`, or 0 if no item has it, as it is text then."""
        if not {IMAGE: self.images, VIDEO: self.videos, AUDIO: self.recordings}[mark]:
            return 0
        return sum(asked.question.count(mark) for asked in self.turns[: turn + 1])

    def shown(self, tiling: TilingConfig | None) -> "Sample":
        """For a tiling model, replace a video by frames as images; idempotent. Raises UserError
        without a vision encoder, or if a tiling model cannot show the videos."""
        images = len(self.images) + len(self.videos)
        if images and tiling is None:
            raise UserError(
                f"{self.where}: has {images} image(s), but the model has no encoder for "
                "them; leave the sample out, or choose a model with a vision encoder"
            )
        if not self.videos or tiling is None:
            return self
        [video, *others] = self.videos
        if others or self.images or VIDEO not in self.turns[0].question:
            raise UserError(
                f"{self.where}: shows {len(self.videos)} video(s) and {len(self.images)} image(s); "
                "to a model of tiles it may show one video in its first question, and nothing else"
            )
        if video.file is not None:
            name = video.file.name or str(video.file.path)
            folder = PurePath(name).with_suffix("")
            raise UserError(
                f"{self.where} has the video file {name}, and the model takes frames; extract them "
                f"first, as with `mkdir -p {folder} && ffmpeg -i {name} -vf fps=2 "
                f"{folder}/%05d.jpg`, and name {folder} instead"
            )
        chosen = middle_frames(len(video.frames), tiling.max_frames_per_video)
        return self.with_frames(tuple(video.frames[frame] for frame in chosen))

    def with_frames(self, frames: tuple[ImageFile, ...]) -> "Sample":
        """Replace the video by `frames`, and its mark by their lines, as InternVL does."""
        first, *others = self.turns
        question = first.question.replace(VIDEO_LINE, VIDEO)
        first = replace(first, question=question.replace(VIDEO, frame_lines(len(frames))))
        return replace(self, images=frames, videos=(), of_frames=True, turns=(first, *others))


def frame_lines(frames: int) -> str:
    """Return InternVL's text for a video: a numbered line with `<image>` per frame."""
    return "".join(f"Frame-{number}: {IMAGE}\n" for number in range(1, frames + 1))


def middle_frames(frames: int, most: int) -> list[int]:
    """Return indices of the frames in the middle of `most` equal intervals, or of all if fewer.

    Example:
        >>> middle_frames(9, 3)
        [1, 4, 7]
    """
    borders = np.linspace(0, frames, min(frames, most) + 1).astype(int)
    return ((borders[:-1] + borders[1:] - 1) // 2).tolist()


@lru_cache
def _limit_tiles(tiling: TilingConfig, most: int) -> TilingConfig:
    # With a max below the min, InternVL finds no grid and uses a single tile.
    least, most = (tiling.min_dynamic_patch, most) if tiling.min_dynamic_patch <= most else (1, 1)
    return tiling.model_copy(update={"min_dynamic_patch": least, "max_dynamic_patch": most})
