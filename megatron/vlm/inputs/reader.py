"""Reading of samples as model inputs: token ids, tiles or patches, frames of recordings.

Shapes: T tiles, C channels, P pixels per side; Y patches of X values; for frames C clips, B mel
bins, F frames; S packed tokens, M image tokens, N audio tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image, ImageOps

from omnibal.base.errors import StorageError, UserError
from omnibal.data.annotations import Annotations
from omnibal.data.chat import EncodedSample, answer_end, encode_prompt, encode_sample
from omnibal.data.image_headers import as_rgb, ends_as_whole, upright_size
from omnibal.data.lengths import check_positions
from omnibal.data.native_resolution import (
    Grid,
    Shown,
    repeated_tokens,
    seen_videos,
    segments_of,
    shown_of,
    tokens_of_places,
)
from omnibal.data.recordings import log_mel, read_clips, read_duration
from omnibal.data.rope_positions import rope_positions
from omnibal.data.sample import AUDIO, IMAGE, VIDEO, Sample, Video
from omnibal.data.stored_files import AudioFile, BadFile, ImageFile, StoredFile, why_unreadable
from omnibal.data.tiling import tile_count, tile_grid
from omnibal.data.tokenizer import Tokenizer
from omnibal.data.video_files import read_video_frames
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ImageRule, ImagesEncoder

# Mean and standard deviation of ImageNet, as in InternVL.
PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class UnreadableFile(UserError):
    """An image, video or recording is missing or broken, or not as planned."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """Model input before an answer: a question, with all text and items before it."""

    token_ids: np.ndarray  # token ids, int64 [tokens]
    items: Mapping[str, int]  # tiles, clips and image tokens up to the question, by feature
    shown: tuple[Shown, ...] = ()  # native-resolution images and videos up to the question


@dataclass(frozen=True, slots=True)
class SampleReader:
    """Reader of one dataset's samples for one model."""

    annotations: Annotations
    tokenizer: Tokenizer
    model: ModelConfig

    @property
    def answer_end(self) -> int:
        return answer_end(self.model, self.tokenizer)

    def shown_sample(self, sample: Sample) -> Sample:
        """Return the sample, with videos as frames if the model takes tiles."""
        return sample if self.model.images is not None else sample.shown(self.model.tiling)

    def tiles_per_image(self, sample: Sample) -> list[int]:
        """Return the number of tiles of each shown image, from file headers."""
        sample = sample.shown(self.model.tiling)
        if sample.of_frames or not sample.images:
            return [1] * len(sample.images)
        tiling, size = sample.tiling(self.model.vision.tiling), self.model.vision.image_size
        return [tile_count(*_image_size(image, sample), tiling, size) for image in sample.images]

    def clips_per_recording(self, sample: Sample) -> list[int]:
        """Return the number of clips of each recording (0 without audio), from file headers."""
        if not self.model.takes_audio:
            return [0] * len(sample.recordings)
        counts = []
        for recording in sample.recordings:
            with _name_bad_file(recording, sample):
                counts.append(read_duration(recording).clips(self.model.audio.frames))
        return counts

    def audio_positions(self, token_ids_S: torch.Tensor) -> torch.Tensor | None:
        """Return positions of audio tokens, int64 [N], or None without an audio encoder."""
        if not self.model.takes_audio:
            return None
        return (token_ids_S == self.tokenizer.audio_context).nonzero().squeeze(1)

    def image_positions(self, token_ids_S: torch.Tensor) -> torch.Tensor | None:
        """Return positions of image and video tokens, int64 [M], or None without an encoder."""
        rule = self.model.images
        if rule is not None:
            return self._item_kinds(token_ids_S.numpy(), rule).nonzero().squeeze(1)
        if not self.model.takes_images:
            return None
        return (token_ids_S == self.tokenizer.image_context).nonzero().squeeze(1)

    def rope_positions(
        self, token_ids: np.ndarray, shown: Sequence[Shown], answered: int = 0
    ) -> np.ndarray:
        """Return time, row and column of every token of one sample, int64 [3, S].

        Args:
            shown: images and videos in token order.
            answered: number of generated tokens at the end. They count as text.
        """
        rule = self.model.images
        if rule is None:
            return np.broadcast_to(np.arange(len(token_ids)), (3, len(token_ids)))
        return rope_positions(self._item_kinds(token_ids, rule).numpy(), shown, rule, answered)

    def _item_kinds(self, token_ids: np.ndarray, rule: ImageRule) -> torch.Tensor:
        """Return each token's kind of item, from 1 (0: text), int64 [S]."""
        kinds = np.zeros(len(token_ids), np.int64)
        for kind, piece in enumerate(repeated_tokens(rule), 1):
            kinds[token_ids == self.tokenizer.require_id(piece)] = kind
        return torch.from_numpy(kinds)

    def list_shown(self, sample: Sample) -> list[Shown]:
        """Return native-resolution images and videos in token order, from headers; may be empty."""
        if self.model.images is None:
            return []
        try:
            return shown_of(
                sample, self.model.images, lambda image: _image_size(image, sample, upright=True)
            )
        except (UnreadableFile, StorageError):
            raise
        except UserError as error:
            raise UnreadableFile(f"{error}, and plan again") from error

    def patches(
        self, sample: Sample, shown: Sequence[Shown], times: Sequence[range] | None = None
    ) -> torch.Tensor:
        """Return patch values in order, float32 [Y, X]; Y may be 0.

        Args:
            shown: result of `list_shown`, or its beginning.
            times: frame groups to read of every image and video, or None for all.
        """
        encoder = self.model.images
        assert encoder is not None, "the model takes native-resolution images"
        times = [range(item.grid.times) for item in shown] if times is None else times
        parts_YX = [torch.zeros((0, encoder.values_per_patch))]
        grids = [
            item.grid._replace(times=len(t)) for item, t in zip(shown, times, strict=True) if t
        ]
        for grid, frames in zip(grids, shown_frames(sample, encoder, times), strict=True):
            parts_YX.append(cut_patches(frames, grid, encoder))
        return torch.cat(parts_YX)

    def encode(
        self, sample: Sample, tiles: int, clips: int = 0, shown: Sequence[Shown] = ()
    ) -> EncodedSample:
        """Return token ids and loss mask, given planned tiles and clips, or images `shown`."""
        rule = self.model.images
        if rule is not None:
            per_recording = self.clips_per_recording(sample)
            places = tokens_of_places(shown, rule)
            return encode_sample(sample, places, self.model, self.tokenizer, per_recording)
        sample.shown(self.model.tiling)  # raises if the model cannot take its images or videos
        if sample.videos:
            # The planned number of frames, even if some are missing: reading them raises.
            sample = sample.with_frames(sample.videos[0].frames[:1] * tiles)
            per_image = [1] * tiles
        else:
            # Only several images need their headers, to divide the tiles.
            several = len(sample.images) > 1
            per_image = self.tiles_per_image(sample) if several else [tiles] * len(sample.images)
        single = len(sample.recordings) == 1
        per_recording = [clips] if single else self.clips_per_recording(sample)
        return encode_sample(sample, per_image, self.model, self.tokenizer, per_recording)

    def prompt(self, sample: Sample, turn: int, room: int, chatting: bool = False) -> Prompt:
        """Return the prompt of a turn: all text and items before its answer.

        Args:
            room: maximum tokens of the answer. UserError if the model has too few positions.
            chatting: whether to encode as InternVL's `chat`, whose system message differs.
        """
        rule, shown = self.model.images, self.list_shown(sample)
        sample = self.shown_sample(sample)
        tiles = [] if rule is not None else self.tiles_per_image(sample)
        per_image = tiles if rule is None else tokens_of_places(shown, rule)
        clips = self.clips_per_recording(sample)
        token_ids = encode_prompt(
            sample, turn, per_image, self.model, self.tokenizer, chatting, clips
        )
        check_positions(
            len(token_ids) + room,
            self.model,
            f"{sample.where}: a question with {room:,} tokens for its answer",
            "shorten the question, or allow its answer fewer tokens",
        )
        videos = sample.items_until(VIDEO, turn)
        if rule is not None and rule.video is None:  # each sampled frame is an image
            videos = sum(len(video.frames) for video in seen_videos(sample, rule)[:videos])
        shown = shown[: sample.items_until(IMAGE, turn) + videos]
        cells = [segments_of(grid, rule).all_tokens for grid, _ in shown if rule is not None]
        items = {
            "tiles": sum(tiles[: sample.items_until(IMAGE, turn)]),
            "clips": sum(clips[: sample.items_until(AUDIO, turn)]),
            "image_tokens": sum(cells),
        }
        return Prompt(token_ids=token_ids, items=items, shown=tuple(shown))

    def check_images(self, sample: Sample, tiles: int) -> None:
        """Raise UnreadableFile unless all shown images decode and a video has `tiles` frames."""
        sample = sample.shown(self.model.tiling)
        check_frame_count(sample, tiles)
        for image in sample.images:
            _read_image(image, sample)

    def check_recordings(self, sample: Sample) -> None:
        """Raise UnreadableFile unless all recordings decode."""
        counts = self.clips_per_recording(sample)
        for recording, count in zip(sample.recordings, counts, strict=True):
            for clip in range(count):  # one at a time in memory
                _read_clip(recording, sample, clip, self.model.audio.frames)

    def clips(self, sample: Sample, wanted: range | None = None) -> np.ndarray:
        """Return log-mel frames of clips, float32 [C, B, F]: all, or `wanted` of all recordings."""
        audio = self.model.audio
        parts = [np.zeros((0, audio.mel_bins, audio.frames), np.float32)]
        counts = self.clips_per_recording(sample)
        wanted = range(sum(counts)) if wanted is None else wanted
        starts = accumulate(counts, initial=0)
        for recording, start, count in zip(sample.recordings, starts, counts, strict=False):
            for clip in range(max(wanted.start - start, 0), min(wanted.stop - start, count)):
                wave_S = _read_clip(recording, sample, clip, audio.frames)  # S samples of sound
                parts.append(log_mel(wave_S, audio.mel_bins)[None])
        return np.concatenate(parts)

    def tiles(self, sample: Sample) -> list[np.ndarray]:
        """Return all tiles of shown images in order, uint8 [P, P, C]."""
        sample = sample.shown(self.model.vision.tiling)
        return [tile for image in sample.images for tile in self._cut_tiles(image, sample)]

    def some_tiles(self, sample: Sample, wanted: range) -> list[np.ndarray]:
        """Return tiles `wanted` of all images, uint8 [P, P, C]; decodes no other images."""
        sample = sample.shown(self.model.vision.tiling)
        tiles: list[np.ndarray] = []
        ends = list(accumulate(self.tiles_per_image(sample)))
        for image, start, end in zip(sample.images, (0, *ends[:-1]), ends, strict=True):
            first, stop = max(wanted.start, start), min(wanted.stop, end)
            if first < stop:
                tiles += self._cut_tiles(image, sample)[first - start : stop - start]
        return tiles

    def _cut_tiles(self, image: ImageFile, sample: Sample) -> list[np.ndarray]:
        """Return InternVL's tiles, uint8 [P, P, C]: row by row, then the thumbnail."""
        tiling, size = sample.tiling(self.model.vision.tiling), self.model.vision.image_size
        pixels, bicubic = _read_image(image, sample), Image.Resampling.BICUBIC
        columns, rows = tile_grid(*pixels.size, tiling, size)
        resized = np.asarray(pixels.resize((columns * size, rows * size), bicubic))
        order = "(row p1) (col p2) c -> (row col) p1 p2 c"
        tiles = list(rearrange(resized, order, p1=size, p2=size))
        if tiling.use_thumbnail and len(tiles) > 1:
            tiles.append(np.asarray(pixels.resize((size, size), bicubic)))
        return tiles

    def pixels(self, sample: Sample) -> torch.Tensor:
        """Return all tiles of the sample in order, float32 [T, C, P, P]; T may be 0."""
        return torch.from_numpy(normalize_tiles(self.tiles(sample), self.model.vision.image_size))


def cut_patches(frames_FHWC: np.ndarray, grid: Grid, encoder: ImagesEncoder) -> torch.Tensor:
    """Return patch values of an image (one frame) or video, float32 [Y, X], from RGB uint8.

    Equal to Qwen's processors in Transformers. Patches are by cell, then row by row; values by
    channel, frame, row and column. The last frame is repeated to fill patches.
    """
    frames = torch.from_numpy(np.ascontiguousarray(frames_FHWC)).permute(0, 3, 1, 2).contiguous()
    # Scale mean and std, not pixels: Transformers fuses both steps, and so rounds once.
    scale = 1 / encoder.pixel_scale
    mean_C, std_C = (
        torch.tensor(color) * scale for color in (encoder.pixel_mean, encoder.pixel_std)
    )
    size = grid.rows * encoder.patch_size, grid.columns * encoder.patch_size
    if frames.shape[-2:] != size:  # on uint8: the filter rounds to 8 bits, as in Transformers
        frames = F.interpolate(frames, size, mode="bicubic", antialias=True)
    values = frames.to(torch.float32)
    values = values.sub_(mean_C[:, None, None]).div_(std_C[:, None, None])
    missing = grid.times * encoder.frames_per_patch - len(values)
    values = torch.cat([values, values[-1:].expand(missing, -1, -1, -1)])
    return rearrange(
        values,
        "(t f) c (r m p) (q n w) -> (t r q m n) (c f p w)",
        t=grid.times,
        m=encoder.merge_size,
        n=encoder.merge_size,
        p=encoder.patch_size,
        w=encoder.patch_size,
    ).contiguous()


def normalize_tiles(tiles: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Return the uint8 tiles [P, P, C] normalized, float32 [T, C, P, P]."""
    mean, std = np.array(PIXEL_MEAN, np.float32), np.array(PIXEL_STD, np.float32)
    pixels_TCPP = np.zeros((len(tiles), 3, size, size), np.float32)
    for pixels_CPP, tile in zip(pixels_TCPP, tiles, strict=True):
        scaled = (tile.astype(np.float32) / 255 - mean) / std
        pixels_CPP[:] = rearrange(scaled, "row column c -> c row column")
    return pixels_TCPP


@contextmanager
def _open_image(image: ImageFile, sample: Sample) -> Iterator[BinaryIO]:
    """Open the file. Any failure in the body, except of storage, raises UnreadableFile."""
    try:
        with image.open() as file:
            yield file
    except StorageError:
        raise
    except Exception as error:  # Pillow's errors of broken files have no common type
        raise UnreadableFile(
            f"{image}: cannot read this image ({why_unreadable(error)}); it is an image of "
            f"{sample.where}; restore the file, or take the sample out and plan again"
        ) from error


def _image_size(image: ImageFile, sample: Sample, *, upright: bool = False) -> tuple[int, int]:
    with _open_image(image, sample) as file:
        if upright:
            return upright_size(file)
        with Image.open(file) as header:
            return header.size


def _read_image(image: ImageFile, sample: Sample, *, upright: bool = False) -> Image.Image:
    with _open_image(image, sample) as file, Image.open(file) as pixels:
        ends_as_whole(pixels, file)
        return as_rgb(ImageOps.exif_transpose(pixels) if upright else pixels)


def shown_frames(sample: Sample, rule: ImageRule, times: Sequence[range]) -> Iterator[np.ndarray]:
    """Yield each image's or video's frames, uint8 [F, H, W, C], decoded lazily.
    As Transformers' `load_image`: EXIF orientation applied, alpha dropped.

    Args:
        times: frame groups to read of the first images and videos; an empty range skips its item.
    """

    def read(image: ImageFile) -> np.ndarray:
        return np.array(_read_image(image, sample, upright=True))

    for (item, frames), own in zip(_shown_items(sample, rule), times, strict=False):
        wanted = frames[own.start * rule.frames_per_patch : own.stop * rule.frames_per_patch]
        if not own:
            continue
        if isinstance(item, ImageFile):
            yield read(item)[None]
        elif item.file is None:
            yield np.stack([read(item.frames[number]) for number in wanted])
        else:
            with _name_bad_file(item.file, sample):
                decoded = read_video_frames(item.file, wanted)
            yield decoded


def _shown_items(
    sample: Sample, rule: ImageRule
) -> Iterator[tuple[ImageFile | Video, tuple[int, ...]]]:
    """Yield each shown image or video with the numbers of its sampled frames."""
    videos = iter(seen_videos(sample, rule))
    for item in sample.shown_in_order:
        if isinstance(item, ImageFile):
            yield item, ()
            continue
        frames = next(videos).frames
        if rule.video is None:  # each sampled frame is an image
            yield from ((item.frames[number], ()) for number in frames)
        else:
            yield item, frames


@contextmanager
def _name_bad_file(file: StoredFile, sample: Sample) -> Iterator[None]:
    """Turn the errors of a recording or video into UnreadableFile."""
    try:
        yield
    except BadFile as error:
        noun = "recording" if isinstance(file, AudioFile) else "video"
        raise UnreadableFile(f"{sample.where}: {noun} {file} {error}, and plan again") from error


def _read_clip(recording: AudioFile, sample: Sample, clip: int, frames: int) -> np.ndarray:
    with _name_bad_file(recording, sample):
        [wave_S] = read_clips(recording, range(clip, clip + 1), frames)
        return wave_S


def check_frame_count(sample: Sample, planned: int) -> None:
    """Raise UnreadableFile unless a video has the planned number of frames."""
    if sample.of_frames and len(sample.images) != planned:
        raise UnreadableFile(
            f"{sample.images[0].path}: {len(sample.images)} frame(s) where the plan counted "
            f"{planned}; they are frames of {sample.where}; restore them, or take the sample out "
            "and plan again"
        )


def check_count(count: int, planned: int, name: str, sample: Sample) -> None:
    """Raise UserError unless a sample's number of items called `name` equals the plan's."""
    if count != planned:
        raise UserError(
            f"{sample.where}: {count} {name} where the plan counted {planned}; the data "
            "changed after it was planned: run `omnibal lengths` and `omnibal plan` again"
        )
