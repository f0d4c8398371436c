"""Scan of a dataset: items and tokens of every sample, from headers and text alone.

No pixel is decoded, except of a file whose end looks wrong, and no sound but the last of a FLAC.
Neither where the work is done, nor by how many, nor where an earlier scan was killed changes the
result.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from omnibal import __version__
from omnibal.base.errors import StorageError, UserError
from omnibal.base.files import atomic
from omnibal.base.worker_pool import LocalPool, Pool
from omnibal.data.annotations import Annotations
from omnibal.data.chat import (
    WrittenSample,
    check_tokenizer,
    encode_written,
    image_places,
    text_sha256,
    write_sample,
)
from omnibal.data.image_headers import BadImage, image_size
from omnibal.data.lengths import (
    Lengths,
    LengthsOrigin,
    check_positions,
    clip_sizes,
    image_rule,
    tile_sizes,
)
from omnibal.data.native_resolution import Segments, segments_of, sizes_of
from omnibal.data.recordings import BadRecording, Duration, read_duration
from omnibal.data.sample import Sample
from omnibal.data.scan_journal import COUNTED, Counted, ScanJournal
from omnibal.data.shown import shown_of
from omnibal.data.stored_files import AudioFile, ImageFile
from omnibal.data.tiling import tile_count
from omnibal.data.tokenizer import Tokenizer
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import SQUARED_FEATURES, ImageRule, squares_of
from omnibal.model.limits import words

Before = TypeVar("Before")
After = TypeVar("After")

OnError = Literal["stop", "skip"]
"""Treatment of bad samples: raise an error that names the first few, or leave them all out."""

_SAMPLES_PER_TASK = 256  # handed to a process at a time
_MAX_MISTAKES = 5  # that an error names
_Task = tuple[np.ndarray, Annotations]
"""Indices of samples in the annotations, int64, and annotations of these samples alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSample:
    """A sample that cannot be trained on."""

    index: int
    """Index in the annotations, repeats included."""
    where: str
    """Annotation file and line of the sample."""
    message: str
    """Error message, which begins with `where`."""

    @property
    def reason(self) -> str:
        """Error message without the place of the sample."""
        return self.message.removeprefix(self.where).lstrip(": ")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scan:
    """Result of a scan."""

    lengths: Lengths
    skipped: tuple[BadSample, ...]
    """Bad samples left out, in the order of the annotations."""


def scan_lengths(
    annotations: Annotations,
    model: ModelConfig,
    tokenizer: Tokenizer,
    on_progress: Callable[[int], None],
    *,
    pool: Pool = LocalPool(),  # noqa: B008 (immutable)
    on_error: OnError = "stop",
    journal: ScanJournal | None = None,
) -> Scan:
    """Items, tokens and loss tokens of every sample; what stands for images and recordings is
    counted, not built.

    Args:
        on_progress: called now and then with the number of samples done since the last call.
        journal: of these annotations, opened with `scan_key`; what it holds is not scanned again,
            and good samples are added to it as they are scanned.

    Raises:
        StorageError: data cannot be reached, or has changed since its samples were found.
    """
    _check_counted(model)
    check_tokenizer(model, tokenizer)
    parts = [journal.finished if journal is not None else Counted.joined([])]
    bad: list[BadSample] = []
    left = np.setdiff1d(np.arange(len(annotations)), parts[0].rows["index"], assume_unique=True)
    on_progress(len(parts[0]))

    def tasks() -> Iterator[_Task]:
        # In order and without gaps, so that the first mistakes are among what was handed out.
        for start in range(0, len(left), _SAMPLES_PER_TASK):
            if on_error == "stop" and len(_messages(bad)) >= _MAX_MISTAKES:
                return
            indices = left[start : start + _SAMPLES_PER_TASK]
            yield indices, annotations.take(indices)

    count = -(-len(left) // _SAMPLES_PER_TASK)
    scanner = _Scanner(model, tokenizer, image_rule(model))
    with closing(pool.map_unordered(scanner, tasks(), count)) as results:
        for good, others in results:
            parts.append(good)
            bad += others
            if journal is not None and len(good):
                journal.append(good)
            on_progress(len(good) + len(others))
    bad.sort(key=lambda sample: sample.index)
    if bad and on_error == "stop":
        raise _all_of(_messages(bad))
    good = Counted.joined(parts)
    if not len(good):
        raise UserError(f"every sample is bad; one at least must be good: {bad[0].message}")
    return Scan(lengths=_lengths(good, annotations, model, tokenizer), skipped=tuple(bad))


def scan_key(model: ModelConfig, tokenizer: Tokenizer) -> str:
    """Hash of all that the counts depend on beside the data."""
    given = (
        __version__,
        _origin("", model, tokenizer).model_dump_json(),
        model.language.max_positions,
    )
    return hashlib.sha256(json.dumps(given).encode()).hexdigest()


def write_skipped(skipped: Sequence[BadSample], path: Path) -> None:
    """Write one line a sample, of index, place and reason with tabs between; none: no file."""
    if not skipped:
        path.unlink(missing_ok=True)
        return
    fields = ((str(sample.index), sample.where, sample.reason) for sample in skipped)
    lines = ("\t".join(" ".join(text.split()) for text in line) + "\n" for line in fields)
    with atomic(path) as temporary:
        # A name that is no Unicode may be just what is wrong with a sample.
        temporary.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def skipped_notes(skipped: Sequence[BadSample], path: Path | None) -> list[str]:
    """Lines that tell the user about skipped samples, and about the file that lists them if any."""
    if not skipped:
        return []
    listed = "" if path is None else f", listed in {path}"
    shown = [f"  {' '.join(sample.message.split())}" for sample in skipped[:_MAX_MISTAKES]]
    return [f"skipped: {len(skipped):,} bad samples{listed}; the first:", *shown]


@dataclass(frozen=True, slots=True, eq=False)
class _Scanner:
    """Scans samples, and caches what the headers of files say."""

    model: ModelConfig
    tokenizer: Tokenizer
    rule: ImageRule | None
    """How images at their native resolution become tokens; None where the model takes none."""
    size_of: dict[ImageFile, tuple[int, int] | str] = field(default_factory=dict)
    """Width and height of an image in pixels, or what is wrong with it."""
    duration_of: dict[AudioFile, Duration | str] = field(default_factory=dict)
    """Length of a recording, or what is wrong with it."""

    def __call__(self, task: _Task) -> tuple[Counted, list[BadSample]]:
        given, samples = task
        samples.check_unchanged()
        mistakes: dict[int, str] = {}
        places = {place: place for place in range(len(given))}
        read = _each(lambda place: self._read(samples, place), places, mistakes)
        texts = _each(
            lambda sample: write_sample(sample, self.model, self.tokenizer), read, mistakes
        )
        counted = _each(self._text_tokens, texts, mistakes)
        counts = _each(lambda text: self._counts(*text), counted, mistakes)
        indices = given.tolist()
        bad = [
            BadSample(index=indices[place], where=samples.where(place), message=message)
            for place, message in sorted(mistakes.items())
        ]
        rows = [(indices[place], *numbers) for place, (numbers, _) in counts.items()]
        shown = [segments for _, segments in counts.values()]
        samples.check_unchanged()
        return Counted(rows=np.array(rows, COUNTED), image_sizes=sizes_of(shown)), bad

    def _read(self, samples: Annotations, place: int) -> Sample:
        sample = samples[place]
        return sample.shown(self.model.tiling) if self.rule is None else sample

    def _text_tokens(self, written: WrittenSample) -> tuple[Sample, int, int]:
        """The sample, and tokens of its text without items, and loss tokens."""
        sample = written.sample
        places = image_places(sample, self.model)
        # One token stands for every image at its native resolution, none for one of tiles.
        standing = [1 if self.rule else 0] * places
        silent = [0] * len(sample.recordings)
        text = encode_written(written, standing, self.model, self.tokenizer, silent)
        loss_tokens = np.count_nonzero(text.loss_mask)
        return sample, len(text.token_ids) - sum(standing), int(loss_tokens)

    def _counts(
        self, sample: Sample, tokens: int, loss_tokens: int
    ) -> tuple[tuple[int, ...], list[Segments]]:
        """The fields of COUNTED but the index, and images and videos at their native resolution."""
        tiles, segments = self._tiles(sample), list[Segments]()
        if tiles:
            tokens += tiles * self.model.vision.tokens_per_item
        if self.rule is not None:
            shown = shown_of(sample, self.rule, lambda image: self._image_size(image, sample))
            segments = [segments_of(each.grid, self.rule) for each in shown]
        image_tokens = sum(segment.all_tokens for segment in segments)
        squares = sum(segment.squares for segment in segments)
        clips = 0
        if sample.recordings:
            audio = self.model.audio
            durations = [self._duration(recording, sample) for recording in sample.recordings]
            clips = sum(duration.clips(audio.frames) for duration in durations)
            tokens += clips * audio.tokens_per_item
        tokens += image_tokens
        check_positions(tokens, self.model, f"{sample.where}: the sample")
        return (squares, tiles, clips, image_tokens, tokens, loss_tokens), segments

    def _tiles(self, sample: Sample) -> int:
        """Tiles of all images; none where the model takes them at their native resolution."""
        if not sample.images or self.rule is not None:
            return 0
        vision = self.model.vision
        tiling = sample.tiling(vision.tiling)
        sizes = [self._image_size(image, sample) for image in sample.images]
        return sum(tile_count(*size, tiling, vision.image_size) for size in sizes)

    def _duration(self, recording: AudioFile, sample: Sample) -> Duration:
        if recording not in self.duration_of:
            try:
                self.duration_of[recording] = read_duration(recording)
            except BadRecording as error:
                self.duration_of[recording] = f"{error.wrong}; {error.remedy}"
        found = self.duration_of[recording]
        if isinstance(found, str):
            raise UserError(f"{sample.where}: recording {recording} {found}")
        return found

    def _image_size(self, image: ImageFile, sample: Sample) -> tuple[int, int]:
        found = self.size_of.get(image)
        if found is None:
            try:
                # As it is stored: one that EXIF turns has as many tokens as before.
                found = image_size(image)
            except IsADirectoryError as error:
                of_video = sample.of_frames or any(image in v.frames for v in sample.videos)
                wrong = "holds no frames; fill it" if of_video else "is no image; name one"
                raise UserError(
                    f"{sample.where}: folder {image} {wrong} or remove the sample"
                ) from error
            except BadImage as error:
                found = str(error)
            self.size_of[image] = found
        if isinstance(found, str):
            raise UserError(f"{sample.where}: {found}")
        return found


def _each(
    step: Callable[[Before], After], given: dict[int, Before], mistakes: dict[int, str]
) -> dict[int, After]:
    """What a step makes of every sample that is good so far, by its place; mistakes are added.

    A step goes over all samples of a task before the next begins: what it needs then stays in a
    core's cache, which saves a fifth of the time.
    """
    found = {}
    for place, value in given.items():
        try:
            found[place] = step(value)
        except StorageError:
            raise
        except UserError as error:
            mistakes[place] = str(error)
    return found


def _check_counted(model: ModelConfig) -> None:
    """Refuse a model with items that no scan counts."""
    assert COUNTED.names is not None
    others = [name for name in model.item_features if name not in COUNTED.names]
    if others:
        raise UserError(
            f"{model.name} takes {words(others)}, which no scan counts: plan with lengths of your "
            "own, in Parquet or JSON files with a column of each"
        )


def _lengths(
    good: Counted, annotations: Annotations, model: ModelConfig, tokenizer: Tokenizer
) -> Lengths:
    columns = {str(name): np.ascontiguousarray(good.rows[name]) for name in COUNTED.names or ()}
    indices, names = columns["index"], model.item_features
    squares = [squares_of(name) for name in names if squares_of(name) in SQUARED_FEATURES]
    return Lengths(
        items={name: columns[name] for name in sorted(names)},
        squares={name: columns[name] for name in squares},
        tokens=columns["tokens"],
        loss_tokens=columns["loss_tokens"],
        source=annotations.source[indices],
        source_names=annotations.sources,
        origin=_origin(annotations.sha256, model, tokenizer),
        sample=indices if len(indices) < len(annotations) else None,
        image_sizes=None if model.images is None else good.image_sizes,
    )


def _origin(data_sha256: str, model: ModelConfig, tokenizer: Tokenizer) -> LengthsOrigin:
    image_size, tokens_per_tile = tile_sizes(model)
    return LengthsOrigin(
        data_sha256=data_sha256,
        tokenizer_sha256=text_sha256(model, tokenizer),
        image_size=image_size,
        tokens_per_tile=tokens_per_tile,
        tiling=model.tiling,
        clips=clip_sizes(model),
        images=image_rule(model),
        chat_template=model.chat_template,
        system_message=model.system_message,
    )


def _messages(bad: Sequence[BadSample]) -> list[str]:
    """Messages in the order of the samples, each once even if a sample is repeated."""
    return list(dict.fromkeys(sample.message for sample in bad))


def _all_of(mistakes: list[str]) -> UserError:
    if len(mistakes) == 1:
        return UserError(f"{mistakes[0]}; or leave it out with --on-error skip")
    found = f"{len(mistakes)} bad samples were found"
    if len(mistakes) >= _MAX_MISTAKES:
        found = f"the scan stopped at the first {_MAX_MISTAKES} bad samples"
    numbered = enumerate(mistakes[:_MAX_MISTAKES], start=1)
    listed = " ".join(f"({number}) {text}" for number, text in numbered)
    return UserError(f"{found}: {listed}; or leave them out with --on-error skip")
