"""Samples of the training data, and what of them a model takes."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePath

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.stored_files import AudioFile, ImageFile, StoredFile, VideoFile
from omnibal.model.encoders import TilingConfig

IMAGE, VIDEO, AUDIO = "<image>", "<video>", "<audio>"
VIDEO_LINE = f"{VIDEO}\n"
"""Stands for all frames, in the first question of a sample about a video."""


_SHOWN = re.compile(f"{IMAGE}|{VIDEO}")


@dataclass(frozen=True, slots=True)
class Video:
    """A video: its frames, or the one file that it is in."""

    frames: tuple[ImageFile, ...] = ()
    file: VideoFile | None = None

    def __str__(self) -> str:
        return str(self.frames[0] if self.file is None else self.file)


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its reference answer.

    In the question each `<image>` stands for one image, each `<video>` for one video and each
    `<audio>` for one recording.
    """

    question: str
    answer: str
    kind: str | None
    """Kind of question that accuracy is reported by; from the record's optional "kinds"."""
    results: tuple[str, ...] = ()
    """What tools answered, in place of a question, which is then empty."""
    reasoning: str | None = None
    """What the model thinks before it answers, where the record has it apart from the answer."""
    calls: tuple[str, ...] = ()
    """Calls of tools that the answer makes, each a JSON object of "name" and "arguments"."""
    learned: bool = True
    """Whether the answer is trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One conversation about any number of images, videos and recordings."""

    identity: str
    """Source name and the record's "id" (its key or number where it has none)."""
    source: str
    where: str
    """File and line or number of the record, for error messages."""
    images: tuple[ImageFile, ...]
    """All images, in the order of their `<image>` in the questions."""
    turns: tuple[Turn, ...]
    videos: tuple[Video, ...] = ()
    """All videos, in the order of their `<video>` in the questions."""
    recordings: tuple[AudioFile, ...] = ()
    """All recordings, in the order of their `<audio>` in the questions."""
    system: str | None = None
    """System message that replaces the template's own."""
    greeting: str | None = None
    """Message of the model ("gpt") before the first question."""
    greeting_learned: bool = True
    """Whether it is trained on, in templates that write it."""
    tools: str | None = None
    """Tools that the model may call, a JSON list."""
    of_frames: bool = False
    """Whether the images are the frames of one video, as a model of tiles is shown them."""
    augment: bool = False
    """The meta's `data_augment`: in training, its tiles are degraded at random."""
    max_dynamic_patch: int | None = None
    """Most tiles of an image as the meta sets it; None for the model's own."""

    def tiling(self, tiling: TilingConfig) -> TilingConfig:
        """Tiling of each of the sample's images, by a model with this tiling.

        Several images share the most tiles of one; a frame is one tile. As InternVL does.
        """
        most = self.max_dynamic_patch or tiling.max_dynamic_patch
        return _limited(tiling, 1 if self.of_frames else max(1, most // max(1, len(self.images))))

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """All files that it shows and says."""
        of_videos = [video.frames if video.file is None else [video.file] for video in self.videos]
        return (*self.images, *(file for files in of_videos for file in files), *self.recordings)

    @property
    def shown_in_order(self) -> tuple[ImageFile | Video, ...]:
        """Images and videos in the order in which the questions show them."""
        if not self.videos:
            return self.images
        left: dict[str, list] = {IMAGE: [*self.images], VIDEO: [*self.videos]}
        marks = [mark for turn in self.turns for mark in _SHOWN.findall(turn.question)]
        return tuple(left[mark].pop(0) for mark in marks)

    def items_until(self, mark: str, turn: int) -> int:
        """Number of images, videos or recordings, by their mark, in the questions up to and
        including this turn."""
        # Without any, the marks of videos and recordings are text.
        if not {IMAGE: self.images, VIDEO: self.videos, AUDIO: self.recordings}[mark]:
            return 0
        return sum(asked.question.count(mark) for asked in self.turns[: turn + 1])

    def shown(self, tiling: TilingConfig | None) -> "Sample":
        """Put in place of a video the frames that a model of tiles sees, each named in the question
        and an image; images are unchanged.

        To do so again changes nothing.
        """
        shown = len(self.images) + len(self.videos)
        if shown and tiling is None:
            raise UserError(
                f"{self.where}: has {shown} image(s), but the model has no encoder for "
                "them; leave the sample out, or choose a model with a vision encoder"
            )
        if not self.videos or tiling is None:
            return self
        frames = self._frames_of_only_video()
        chosen = middle_frames(len(frames), tiling.max_frames_per_video)
        return self.with_frames(tuple(frames[frame] for frame in chosen))

    def _frames_of_only_video(self) -> tuple[ImageFile, ...]:
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
        return video.frames

    def with_frames(self, frames: tuple[ImageFile, ...]) -> "Sample":
        """Replace the video's frames, each named in the question as InternVL does."""
        first, *others = self.turns
        named = "".join(f"Frame-{number}: {IMAGE}\n" for number in range(1, len(frames) + 1))
        question = first.question.replace(VIDEO_LINE, VIDEO).replace(VIDEO, named)
        asked = replace(first, question=question)
        return replace(self, images=frames, videos=(), of_frames=True, turns=(asked, *others))


def middle_frames(frames: int, most: int) -> list[int]:
    """All frames, or the middle one of each of `most` intervals of equal length.

    Example:
        >>> middle_frames(9, 3)
        [1, 4, 7]
    """
    borders = np.linspace(0, frames, min(frames, most) + 1).astype(int)
    return ((borders[:-1] + borders[1:] - 1) // 2).tolist()


@lru_cache
def _limited(tiling: TilingConfig, most: int) -> TilingConfig:
    # InternVL finds no grid of fewer tiles than the least, and then takes one tile.
    least, most = (tiling.min_dynamic_patch, most) if tiling.min_dynamic_patch <= most else (1, 1)
    return tiling.model_copy(update={"min_dynamic_patch": least, "max_dynamic_patch": most})
