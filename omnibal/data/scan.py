"""Scan of a dataset: items and tokens per sample, from headers and text.

Pixels are decoded only if a file's end looks wrong, and sound only at the end of a FLAC. Results do
not depend on the pool, its size or resumption.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from omnibal.base.errors import StorageError, UserError
from omnibal.base.files import atomic
from omnibal.base.printable import printable
from omnibal.base.version import VERSION
from omnibal.base.worker_pool import LocalPool, Pool
from omnibal.data.annotations import Annotations
from omnibal.data.chat import check_tokenizer, encode_sample, image_places, text_sha256
from omnibal.data.image_headers import image_size
from omnibal.data.lengths import Lengths, LengthsOrigin, check_positions
from omnibal.data.native_resolution import Segments, segments_of, shown_of, sizes_of
from omnibal.data.recordings import read_duration
from omnibal.data.sample import Sample
from omnibal.data.scan_journal import COUNTED, Counted, ScanJournal
from omnibal.data.stored_files import AudioFile, BadFile, ImageFile, StoredFile
from omnibal.data.tiling import tile_count
from omnibal.data.tokenizer import Tokenizer
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ImageRule, squares_of

Before = TypeVar("Before")
After = TypeVar("After")
File = TypeVar("File", bound=StoredFile)

OnError = Literal["stop", "skip"]  # at bad samples: raise with the first few, or skip all

_SAMPLES_PER_TASK = 256  # per process at a time
_MAX_MISTAKES = 5  # listed in an error
# Sample indices in the annotations, int64, and annotations of these samples.
_Task = tuple[np.ndarray, Annotations]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSample:
    index: int  # index in the annotations, with repeats
    where: str  # annotation file and line
    message: str  # error message, prefixed by `where`

    @property
    def reason(self) -> str:
        """Error message without `where`."""
        return self.message.removeprefix(self.where).lstrip(": ")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scan:
    lengths: Lengths
    skipped: tuple[BadSample, ...]  # skipped samples in annotation order


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
    """Count items and tokens of every sample. Raises UserError if all are bad, or one at "stop".

    Args:
        on_progress: called with the journal's number of samples, then with every task's.
        journal: opened with `scan_key`. Its samples are not scanned, and new samples are added.
    """
    check_tokenizer(model, tokenizer)
    parts = [journal.finished if journal is not None else Counted.join([])]
    bad: list[BadSample] = []
    left = np.setdiff1d(np.arange(len(annotations)), parts[0].rows["index"], assume_unique=True)
    on_progress(len(parts[0]))

    def tasks() -> Iterator[_Task]:
        # In order, so that the first mistakes are in tasks already submitted.
        for start in range(0, len(left), _SAMPLES_PER_TASK):
            if on_error == "stop" and len(_unique_messages(bad)) >= _MAX_MISTAKES:
                return
            indices = left[start : start + _SAMPLES_PER_TASK]
            yield indices, annotations.take(indices)

    count = -(-len(left) // _SAMPLES_PER_TASK)
    origin = LengthsOrigin.of_model(model, annotations.sha256, text_sha256(model, tokenizer))
    scanner = _Scanner(model, tokenizer, origin.images)
    with closing(pool.map_unordered(scanner, tasks(), count)) as results:
        for good, others in results:
            parts.append(good)
            bad += others
            if journal is not None and len(good):
                journal.append(good)
            on_progress(len(good) + len(others))
    bad.sort(key=lambda sample: sample.index)
    if bad and on_error == "stop":
        raise _summary_error(_unique_messages(bad))
    good = Counted.join(parts)
    if not len(good):
        raise UserError(f"every sample is bad; one at least must be good: {bad[0].message}")
    counts = {name: np.ascontiguousarray(good.rows[name]) for name in COUNTED.names or ()}
    if not counts["loss_tokens"].any():
        raise UserError(f'no token of {len(good):,} samples is learned; see "loss" of the messages')
    indices, sizes = counts["index"], good.image_sizes
    counts["image_tokens"] = sizes.tokens.astype(np.int32)
    is_native = model.images is not None
    lengths = Lengths(
        items={name: counts[name] for name in sorted(model.item_features)},
        squares={squares_of("image_tokens"): sizes.squares} if is_native else {},
        tokens=counts["tokens"],
        loss_tokens=counts["loss_tokens"],
        source=annotations.source[indices],
        source_names=annotations.sources,
        origin=origin,
        sample=indices if len(indices) < len(annotations) else None,
        image_sizes=sizes if is_native else None,
    )
    return Scan(lengths=lengths, skipped=tuple(bad))


def scan_key(model: ModelConfig, tokenizer: Tokenizer) -> str:
    """Return the SHA-256, in hex, of the settings that counts depend on."""
    origin = LengthsOrigin.of_model(model, "", text_sha256(model, tokenizer))
    inputs = (VERSION, origin.model_dump_json(), model.language.max_positions)
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def write_skipped(skipped: Sequence[BadSample], path: Path) -> None:
    """Write index, place and reason of every sample, tab-separated. Remove the file if none."""
    if not skipped:
        path.unlink(missing_ok=True)
        return
    fields = ((str(sample.index), sample.where, sample.reason) for sample in skipped)
    lines = ("\t".join(printable(" ".join(text.split())) for text in line) for line in fields)
    with atomic(path) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def skipped_notes(skipped: Sequence[BadSample], path: Path | None) -> list[str]:
    """Return notes: the number of skipped samples, the file that lists them, the first messages."""
    if not skipped:
        return []
    listed = "" if path is None else f", listed in {path}"
    shown = [f"  {' '.join(sample.message.split())}" for sample in skipped[:_MAX_MISTAKES]]
    return [f"skipped: {len(skipped):,} bad samples{listed}; the first:", *shown]


@dataclass(frozen=True, slots=True, eq=False)
class _Scanner:
    """Counts a task's samples, with a cache of file headers."""

    model: ModelConfig
    tokenizer: Tokenizer
    rule: ImageRule | None  # native-resolution rule of the model, None if absent
    # Size of an image in pixels, Duration of a recording, or an error message.
    headers: dict[StoredFile, Any] = field(default_factory=dict)

    def __call__(self, task: _Task) -> tuple[Counted, list[BadSample]]:
        indices, samples = task[0].tolist(), task[1]
        samples.check_unchanged()
        mistakes: dict[int, str] = {}
        places = {place: place for place in range(len(indices))}
        read = _apply_step(samples.__getitem__, places, mistakes)
        if self.rule is None:
            read = _apply_step(lambda sample: sample.shown(self.model.tiling), read, mistakes)
        texts = _apply_step(self._count_text, read, mistakes)
        counts = _apply_step(lambda text: self._count_items(*text), texts, mistakes)
        bad = [
            BadSample(index=indices[place], where=samples.where(place), message=message)
            for place, message in sorted(mistakes.items())
        ]
        rows = [(indices[place], *numbers) for place, (numbers, _) in counts.items()]
        shown = [segments for _, segments in counts.values()]
        samples.check_unchanged()
        return Counted(rows=np.array(rows, COUNTED), image_sizes=sizes_of(shown)), bad

    def _count_text(self, sample: Sample) -> tuple[Sample, int, int]:
        """Return the sample, its tokens without items' tokens, and its loss tokens."""
        # A native-resolution image takes 1 placeholder token here, subtracted below; others none.
        images = [1 if self.rule else 0] * image_places(sample, self.model)
        clips = [0] * len(sample.recordings)
        text = encode_sample(sample, images, self.model, self.tokenizer, clips)
        loss_tokens = np.count_nonzero(text.loss_mask)
        return sample, len(text.token_ids) - sum(images), int(loss_tokens)

    def _count_items(
        self, sample: Sample, tokens: int, loss_tokens: int
    ) -> tuple[tuple[int, ...], list[Segments]]:
        """Return COUNTED's fields but the index, and segments of native-resolution images."""
        tiles, clips, segments = 0, 0, list[Segments]()
        if self.rule is not None:
            shown = shown_of(sample, self.rule, lambda image: self._image_size(image, sample))
            segments = [segments_of(item.grid, self.rule) for item in shown]
            tokens += sum(segment.all_tokens for segment in segments)
        elif sample.images:
            vision = self.model.vision
            tiling = sample.tiling(vision.tiling)
            sizes = [self._image_size(image, sample) for image in sample.images]
            tiles = sum(tile_count(*size, tiling, vision.image_size) for size in sizes)
            tokens += tiles * vision.tokens_per_item
        for recording in sample.recordings:
            duration = self._read_header_once(recording, sample, read_duration)
            clips += duration.clips(self.model.audio.frames)
        if clips:
            tokens += clips * self.model.audio.tokens_per_item
        check_positions(tokens, self.model, f"{sample.where}: the sample")
        return (tiles, clips, tokens, loss_tokens), segments

    def _image_size(self, image: ImageFile, sample: Sample) -> tuple[int, int]:
        # As stored: EXIF rotation does not change the token count.
        return self._read_header_once(image, sample, image_size)

    def _read_header_once(self, file: File, sample: Sample, read: Callable[[File], After]) -> After:
        header = self.headers.get(file)
        if header is None:
            try:
                header = read(file)
            except BadFile as error:
                noun = "recording" if isinstance(file, AudioFile) else "image"
                header = f"{noun} {file} {error}"
            self.headers[file] = header
        if isinstance(header, str):
            raise UserError(f"{sample.where}: {header}")
        return header  # type: ignore[no-any-return]


def _apply_step(
    step: Callable[[Before], After], given: dict[int, Before], mistakes: dict[int, str]
) -> dict[int, After]:
    """Apply a step to all good samples of a task, and collect the mistakes of others."""
    # All samples of a step, not all steps of a sample: cache locality saves a fifth of the time.
    results = {}
    for place, value in given.items():
        try:
            results[place] = step(value)
        except StorageError:
            raise
        except UserError as error:
            mistakes[place] = str(error)
    return results


def _unique_messages(bad: Sequence[BadSample]) -> list[str]:
    return list(dict.fromkeys(sample.message for sample in bad))


def _summary_error(mistakes: list[str]) -> UserError:
    if len(mistakes) == 1:
        return UserError(f"{mistakes[0]}; or leave it out with --on-error skip")
    title = f"{len(mistakes)} bad samples were found"
    if len(mistakes) >= _MAX_MISTAKES:
        title = f"the scan stopped at the first {_MAX_MISTAKES} bad samples"
    numbered = enumerate(mistakes[:_MAX_MISTAKES], start=1)
    listed = " ".join(f"({number}) {text}" for number, text in numbered)
    return UserError(f"{title}: {listed}; or leave them out with --on-error skip")
