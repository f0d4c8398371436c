"""Samples of an annotation file or a meta JSON, read on access.

    {source: {"root": folder of files, "annotation": file.jsonl, "repeat_time": 1, ...}}
    {source: {"annotation": array.json, ...}}       LLaVA: an array of records
    {source: {"annotation": texts.jsonl}}           texts need no folder
    {source: {"file_name": array.json, "formatting": "sharegpt"}}   LLaMA-Factory's dataset_info
    {source: {"shards": "train-{000..003}.tar"}}    webdataset's notation
    {source: {"energon": folder, "split": "train"}}

The meta is InternVL's. Relative paths start at its folder. Only record positions stay in memory.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from omnibal.base import remote_path as remote
from omnibal.base.arrays import rows_of
from omnibal.base.block_cache import BlockCache
from omnibal.base.errors import StorageError, UserError
from omnibal.base.files import read_json_model, real_path
from omnibal.data.data_index import DataIndex, Holds
from omnibal.data.forms import Naming
from omnibal.data.messages import InvalidRecordError, Medium
from omnibal.data.parquet_rows import ParquetRow, RowPlace, is_rows
from omnibal.data.record_files import RecordIndex, holds_records, is_array
from omnibal.data.records import RecordMedia, read_record
from omnibal.data.sample import Sample, Video
from omnibal.data.stored_files import (
    IMAGE_SUFFIXES,
    AudioFile,
    ImageFile,
    VideoFile,
    is_video_file,
    natural_order,
)
from omnibal.data.tar_shards import Shard, energon_shards, read_shard_sample, webdataset_shards

# Noun for a record in messages.
_RECORD_NOUNS: dict[Holds, str] = {
    "lines": "line",
    "array": "sample",
    "rows": "row",
    "shard": "sample",
}
_MAX_REPEATS = 10_000  # more is a mistake, and would fill memory with indices


class SourceMeta(Naming):
    annotation: str | None = None  # or `file_name`, `shards` or `energon`
    file_name: str | None = None  # record file of LLaMA-Factory
    ranking: bool = False  # preference data, which is refused
    shards: str | None = None  # pattern of tar or Parquet shards
    energon: str | None = None  # folder of an Energon dataset
    root: str | None = None  # folder of media files
    split: str | None = None  # of the Energon dataset
    data_augment: bool = False
    max_dynamic_patch: PositiveInt | None = None  # max tiles per image, None for the model's
    repeat_time: float = Field(default=1, gt=0, le=_MAX_REPEATS, strict=True)
    length: PositiveInt | None = None  # number of records, checked if given

    @model_validator(mode="after")
    def _check_fields(self) -> "SourceMeta":
        places = (self.annotation, self.file_name, self.shards, self.energon)
        if sum(place is not None for place in places) != 1:
            raise ValueError('one of "annotation", "shards" and "energon" must be given')
        if (self.formatting or self.columns or self.tags) and self.file_name is None:
            raise ValueError('"formatting", "columns" and "tags" go with "file_name" alone')
        if self.ranking:
            raise ValueError('"ranking" marks preference data, and answers alone are learned')
        if self.root is not None and self.in_file is None:
            raise ValueError('"root", the folder of the files, goes with "annotation" alone')
        if self.split is not None and self.energon is None:
            raise ValueError('"split" goes with "energon" alone')
        return self

    @property
    def in_file(self) -> str | None:
        """Annotation file as the meta names it, None for shards."""
        return self.annotation or self.file_name

    def media_folder(self, folder: Path) -> Path:
        """Return the folder of media or shards; relative paths start at `folder`."""
        return folder / (self.root or self.energon or Path(self.shards or "").parent)

    @property
    def names(self) -> dict[str, Any] | None:
        """Key and role names of a LLaMA-Factory source, else None."""
        return None if self.file_name is None else self.model_dump(include={"columns", "tags"})


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    name: str
    root: Path  # folder of its media or shards
    unit: str  # noun for a record in messages
    in_shards: bool  # whether records are members of tar shards
    meta: SourceMeta
    below: Path | None  # Folder that media must be in. None for any.


@dataclass(frozen=True, slots=True)
class StoredRecord:
    content: bytes  # JSON, perhaps with surrounding white space
    name: str  # key in a shard, otherwise the record number from 1
    in_shard: bool


@dataclass(frozen=True, slots=True)
class _Folder(RecordMedia):
    """Media in files outside the record."""

    root: Path
    cache: BlockCache | None
    below: Path | None

    def find(self, medium: Medium, name: str) -> ImageFile | Video | AudioFile:
        path = remote.kept_below(remote.named_from(self.root, name, self.cache), self.below)
        if medium != "video":
            return ImageFile(path) if medium == "image" else AudioFile(path)
        video = video_at(path)
        for frame in video.frames:
            remote.kept_below(frame.path, self.below)
        return video


def video_at(path: Path) -> Video:
    """Return the video of a file, or of a folder of frames in numeric order."""
    try:
        if is_video_file(path.name) or path.is_file():
            return Video(file=VideoFile(path))
        files = list(path.iterdir()) if path.is_dir() else []
    except OSError:  # reported when the image is read
        files = []
    # macOS writes hidden metadata files next to frames.
    shown = (file for file in files if not file.name.startswith("."))
    frames = [file for file in shown if file.suffix.lower() in IMAGE_SUFFIXES]
    frames.sort(key=lambda file: natural_order(file.name))
    # An empty video is handled like a bad image: reported or skipped.
    return Video(frames=tuple(map(ImageFile, frames)) or (ImageFile(path),))


@contextmanager
def _name_record_errors(where: str) -> Iterator[None]:
    """Raise errors of reading a record as UserError that begins with `where`."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{where} cannot be read ({error}); restore the file") from error
    except InvalidRecordError as error:
        raise UserError(f"{where} {error}") from None
    except (ValueError, RecursionError) as error:  # including huge numbers and deep nesting
        raise UserError(f"{where} is not JSON ({error}); mend or remove it") from error


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Annotations:
    """Samples of all sources in meta-file order, with repeats. Safe to share between processes.

    Only positions of records are held; arrays are [samples].
    """

    entries: tuple[_Source, ...]  # sources, in meta-file order
    # Of source names, repeats, `max_dynamic_patch`, key names, annotation bytes, and names and
    # sizes of shard members. Folders, pixels and `data_augment` change no length.
    sha256: str
    cache: BlockCache | None
    files: tuple[Path, ...]
    versions: tuple[str, ...]  # file versions when indexed
    keys: tuple[bytes, ...]  # hash by file of all inputs of its counts but model and tokenizer
    source: np.ndarray  # index into `sources`, int32
    file: np.ndarray  # index into `files`, int32
    number: np.ndarray  # record number in its file, from 0, int64
    start: np.ndarray  # first byte, int64
    size: np.ndarray  # bytes, int64

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)

    @property
    def augmented_sources(self) -> tuple[str, ...]:
        """Names of sources with tile augmentation."""
        return tuple(entry.name for entry in self.entries if entry.meta.data_augment)

    @classmethod
    def open(
        cls,
        meta_path: Path,
        index: DataIndex | None = None,
        cache: BlockCache | None = None,
        below: Path | None = None,
    ) -> "Annotations":
        """Return the samples of a meta or an annotation file. Records are checked on access.

        Args:
            index: known record positions; unknown files are read, or refused if it is `complete`.
            below: folder or bucket that must contain all files, links resolved.
        """
        if isinstance(meta_path, remote.RemotePath):
            meta_path = remote.location(str(meta_path), cache)
        entries = read_meta(meta_path)
        digest = hashlib.sha256()
        sources: list[_Source] = []
        indexes: list[RecordIndex] = []
        keys: list[bytes] = []
        chosen: list[np.ndarray] = []
        of_files: list[int] = []
        for name, entry in entries.items():
            folder = meta_path.parent
            source, parts = _open_source(name, entry, folder, index or DataIndex(), cache, below)
            # Hash of records, independent of how samples are spread over shards.
            sha256 = parts[0].digest.hex()
            if source.in_shards or len(parts) > 1:
                sha256 = hashlib.sha256(b"".join(part.digest for part in parts)).hexdigest()
            records = sum(map(len, parts))
            if entry.length not in (None, records):
                more = f" and {len(parts) - 1} more shard(s)" if parts[1:] else ""
                raise UserError(
                    f"{parts[0].path}{more}: holds {records} {source.unit}s, but {meta_path} "
                    f"states length {entry.length} for {name!r}; complete or correct it"
                )
            chosen.append(sum(map(len, indexes)) + _repeat_indices(records, entry.repeat_time))
            of_files += [len(sources)] * len(parts)
            sources.append(source)
            indexes += parts
            root = real_path(source.root)
            keys += [_hash_count_inputs(part, source, root) for part in parts]
            # Without data_augment, which changes no length and is checked by the trainer.
            limit = [] if entry.max_dynamic_patch is None else [entry.max_dynamic_patch]
            names = [] if entry.names is None else [entry.names]
            digest.update(json.dumps([name, entry.repeat_time, sha256, *limit, *names]).encode())
        if not sum(map(len, chosen)):
            raise UserError(f"{meta_path}: leaves no sample; raise a repeat_time or add a source")
        lengths = [len(index) for index in indexes]
        indexed = cls(
            entries=tuple(sources),
            sha256=digest.hexdigest(),
            cache=cache,
            files=tuple(index.path for index in indexes),
            versions=tuple(index.version for index in indexes),
            keys=tuple(keys),
            source=np.repeat(np.array(of_files, np.int32), lengths),
            file=np.repeat(np.arange(len(indexes), dtype=np.int32), lengths),
            number=np.concatenate([np.arange(length) for length in lengths]),
            start=np.concatenate([index.start for index in indexes]),
            size=np.concatenate([index.size for index in indexes]),
        )
        return indexed.take(np.concatenate(chosen))

    def __len__(self) -> int:
        return len(self.file)

    def take(self, indices: np.ndarray) -> "Annotations":
        """Return these samples, without unused files: small enough to send to a process."""
        used, file = np.unique(self.file[indices], return_inverse=True)
        return replace(
            rows_of(self, indices),
            files=tuple(self.files[index] for index in used),
            versions=tuple(self.versions[index] for index in used),
            keys=tuple(self.keys[index] for index in used),
            file=file.astype(np.int32),
        )

    def check_unchanged(self) -> None:
        """Raise StorageError if a file changed since it was indexed, or cannot be read."""
        try:
            now = remote.versions_of(self.files)
        except OSError as error:
            raise StorageError(
                f"{error.filename}: cannot be read ({error.strerror}); restore the file"
            ) from error
        for path, then, version in zip(self.files, self.versions, now, strict=True):
            if then != version:
                raise remote.change_error(path)

    def where(self, index: int) -> str:
        """Return file and record number, the prefix of error messages."""
        unit = self.entries[self.source[index]].unit
        return f"{self.files[self.file[index]]}: {unit} {self.number[index] + 1}"

    def __getitem__(self, index: int) -> Sample:
        source = self.entries[self.source[index]]
        where = self.where(index)
        with _name_record_errors(where):
            content, media, name = self._read_content(index)
            record = json.loads(content)
            if not isinstance(record, dict):
                raise InvalidRecordError(f"is a JSON {type(record).__name__}; it must be an object")
            if source.meta.file_name is not None:
                record = source.meta.rename_keys(record)
            return read_record(
                record,
                media,
                identity=f"{source.name}/{record.get('id', name)}",
                source=source.name,
                where=where,
                augment=source.meta.data_augment,
                max_dynamic_patch=source.meta.max_dynamic_patch,
            )

    def read_stored(self, index: int) -> StoredRecord:
        """Return a record's JSON, unchecked. Raise UserError for a Parquet row with media."""
        in_shard = self.entries[self.source[index]].in_shards
        with _name_record_errors(self.where(index)):
            content, media, name = self._read_content(index)
        if isinstance(media, ParquetRow) and media.holds_files:
            raise UserError(f"{self.where(index)} has media inside; scan them as files")
        return StoredRecord(content, name, in_shard)

    def _read_content(self, index: int) -> tuple[bytes, RecordMedia, str]:
        """Return JSON, media and name of a record."""
        source, version = self.entries[self.source[index]], self.versions[self.file[index]]
        path, start, size = self.files[self.file[index]], int(self.start[index]), self.size[index]
        # Local files are not checked: a stat per record costs too much. Remote versions are cached.
        if isinstance(path, remote.RemotePath):
            path.check_version(version)
        if source.in_shards:
            sample = read_shard_sample(path, start, int(size))
            return sample.record(), sample, sample.key
        media, name = _Folder(source.root, self.cache, source.below), str(self.number[index] + 1)
        if is_rows(path):
            place = RowPlace(path, version, start)
            row = ParquetRow(place, place.values(), media)
            return row.record(), row, name
        with path.open("rb") as file:
            file.seek(start)
            return file.read(int(size)), media, name


def read_meta(path: Path) -> dict[str, SourceMeta]:
    """Return the entries of a meta by source name, one entry for an annotation file."""
    remedy = "pass an annotation file (no pipe or device), or the JSON that names some"
    try:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "no such file"
            raise UserError(f"{path}: {what}; {remedy}")
        if holds_records(path):
            # Without the query of a URL, which may hold a secret.
            return {Path(path.name.partition("?")[0]).stem: SourceMeta(annotation=path.name)}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    entries = read_json_model(
        dict[str, SourceMeta],
        path,
        "a meta maps each source name to "
        '{"root", "annotation"}, {"shards"} or {"energon", "split": "train"}, and may add '
        '"data_augment", "max_dynamic_patch", "repeat_time" and "length"; '
        "an annotation file instead is a JSON list of samples, or has one on each line",
    )
    if not entries:
        raise UserError(f"{path}: names no source; at least one must be given")
    return entries


def _open_source(
    name: str,
    entry: SourceMeta,
    folder: Path,
    index: DataIndex,
    cache: BlockCache | None,
    below: Path | None,
) -> tuple[_Source, list[RecordIndex]]:
    """Return a source and the records of its files."""
    if entry.file_name is not None:
        entry.check_names(name)
    if entry.in_file is not None:
        shards = [Shard(remote.named_from(folder, entry.in_file, cache))]
    elif entry.energon is not None:
        dataset = remote.kept_below(remote.named_from(folder, entry.energon, cache), below)
        shards = energon_shards(dataset, entry.split or "train")
    else:
        shards = webdataset_shards(entry.shards or "", folder, cache)
    for shard in shards:
        remote.kept_below(shard.path, below)
    holds: Holds = "shard"
    path, root = shards[0].path, shards[0].path.parent
    try:
        if all(is_rows(shard.path) for shard in shards):
            holds = "rows"
        elif entry.in_file is not None:
            holds = "array" if is_array(path) else "lines"
        indexes = index.find_records(shards, holds)
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: cannot be read ({error.strerror}); restore the file"
        ) from error
    if entry.in_file is not None:
        root = remote.named_from(folder, entry.root or "", cache)
    # Blank lines are skipped, so that samples have other numbers than lines.
    first = indexes[0]
    gaps = first.start > np.append(0, first.start + first.size)[:-1]
    source = _Source(
        name=name,
        root=root,
        unit=_RECORD_NOUNS["array" if gaps.any() else holds],
        in_shards=holds == "shard",
        meta=entry,
        below=below,
    )
    return source, indexes


def _hash_count_inputs(index: RecordIndex, source: _Source, root: Path) -> bytes:
    """Hash all inputs of a file's counts except model and tokenizer."""
    meta = source.meta
    inputs = (
        *(str(index.path.absolute()), str(root)),
        hashlib.sha256(index.digest).hexdigest(),
        *(source.name, meta.max_dynamic_patch),
        meta.names,
    )
    return hashlib.sha256(json.dumps(inputs).encode()).digest()


def _repeat_indices(records: int, repeat_time: float) -> np.ndarray:
    """Return indices of records for `repeat_time` passes, the last one partial, int64.

    Example:
        >>> _repeat_indices(4, 1.5).tolist()
        [0, 1, 2, 3, 0, 1]
    """
    # As InternVL below 1 and for whole numbers; it rejects other fractions.
    return np.arange(int(records * repeat_time)) % records
