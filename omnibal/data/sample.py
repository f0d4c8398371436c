"""Samples of the training data, and what of them a model takes."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.stored_files import AudioFile, ImageFile
from omnibal.model.encoders import TilingConfig

IMAGE, VIDEO, AUDIO = "<image>", "<video>", "<audio>"
VIDEO_LINE = f"{VIDEO}\n"
"""Stands for all frames, in the first question of a sample about a video."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its reference answer.

    In the question each `<image>` stands for one image, and each `<audio>` for one recording.
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
    """One conversation about any number of images or a video, and any number of recordings."""

    identity: str
    """Source name and the record's "id" (its key or number where it has none)."""
    source: str
    where: str
    """File and line or number of the record, for error messages."""
    images: tuple[ImageFile, ...]
    """All images, or all frames of the video."""
    turns: tuple[Turn, ...]
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
    video: bool = False
    """Whether the images are the frames of one video."""
    augment: bool = False
    """The meta's `data_augment`: in training, its tiles are degraded at random."""
    max_dynamic_patch: int | None = None
    """Most tiles of an image as the meta sets it; None for the model's own."""

    def tiling(self, tiling: TilingConfig) -> TilingConfig:
        """Tiling of each of the sample's images, by a model with this tiling.

        Several images share the most tiles of one; a frame is one tile. As InternVL does.
        """
        most = self.max_dynamic_patch or tiling.max_dynamic_patch
        return _limited(tiling, 1 if self.video else max(1, most // max(1, len(self.images))))

    def images_until(self, turn: int) -> int:
        """Number of images in the questions up to and including this turn."""
        return sum(asked.question.count(IMAGE) for asked in self.turns[: turn + 1])

    def recordings_until(self, turn: int) -> int:
        """Number of recordings in the questions up to and including this turn."""
        if not self.recordings:
            return 0
        return sum(asked.question.count(AUDIO) for asked in self.turns[: turn + 1])

    def shown(self, tiling: TilingConfig | None) -> "Sample":
        """Keep the frames that the model sees, each named in the question; images are unchanged.

        To do so again changes nothing.

        Args:
            tiling: of the model; None if it takes no images.

        Raises:
            UserError: the sample has an image, and the model takes none.
        """
        if self.images and tiling is None:
            raise UserError(
                f"{self.where}: has {len(self.images)} image(s), but the model has no encoder for "
                "them; leave the sample out, or choose a model with a vision encoder"
            )
        if not self.video or tiling is None:
            return self
        chosen = middle_frames(len(self.images), tiling.max_frames_per_video)
        return self.with_frames(tuple(self.images[frame] for frame in chosen))

    def with_frames(self, frames: tuple[ImageFile, ...]) -> "Sample":
        """Replace the video's frames, each named in the question as InternVL does."""
        first, *others = self.turns
        named = "".join(f"Frame-{number}: {IMAGE}\n" for number in range(1, len(frames) + 1))
        question = first.question.replace(VIDEO_LINE, VIDEO).replace(VIDEO, named)
        asked = replace(first, question=question)
        return replace(self, images=frames, turns=(asked, *others))


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
