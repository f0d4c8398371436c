"""Journal of a scan, to resume it: a log of samples' counts under one hash of settings.

Records group samples by file, so that a changed file loses only its own counts.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from omnibal.base.arrays import expand_ranges
from omnibal.base.record_log import RecordLog
from omnibal.data.annotations import Annotations
from omnibal.data.image_sizes import IMAGE, ImageSizes

_COUNTS = ["tiles", "clips", "tokens", "loss_tokens"]
# Scanned sample: annotation index and counts.
COUNTED = np.dtype([("index", "<i8"), *((name, "<i4") for name in _COUNTS)])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Counted:
    """Counts of scanned samples."""

    rows: np.ndarray  # COUNTED [samples]
    image_sizes: ImageSizes

    @classmethod
    def join(cls, parts: Sequence["Counted"]) -> "Counted":
        rows = np.concatenate([np.empty(0, COUNTED), *(part.rows for part in parts)])
        _, first = np.unique(rows["index"], return_index=True)
        sizes = ImageSizes.join([part.image_sizes for part in parts])
        return cls(rows=rows[first], image_sizes=sizes.take(first))

    def __len__(self) -> int:
        return len(self.rows)


_TITLE = b"omnibal scan journal "
_FORM = b"7 "  # record format version; other formats are discarded
_JOURNAL_NOUN = "a journal of `omnibal lengths`, which keeps there what it has finished"
# Stored sample: file index in the record, number in the file, counts.
_STORED_SAMPLE = np.dtype([("file", "<i4"), ("number", "<i8"), *COUNTED.descr[1:]])
_SAMPLES_HEAD = struct.Struct("<III")
_KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScanJournal:
    """Samples finished by an earlier scan. The file exists from first `append` to `remove`."""

    log: RecordLog
    data: Annotations
    finished: Counted  # finished samples, ascending by index, unique
    discarded: bool  # whether a journal of other data or settings was discarded
    changed: int  # samples dropped because their files changed or are no longer used

    @classmethod
    def open(cls, path: Path, key: str, data: Annotations) -> "ScanJournal":
        """Read samples finished under settings hash `key`, up to the log's first torn record."""
        log = RecordLog(path, _TITLE, _FORM + key.encode())
        records, discarded = log.read(_JOURNAL_NOUN)
        numbers = {key: number for number, key in enumerate(data.keys)}
        parts = [_decode_samples(record, numbers, data) for record in records]
        read = Counted.join(parts)
        if not len(read):
            log.begin([])
            discarded = discarded or bool(records)
            return cls(log=log, data=data, finished=read, discarded=discarded, changed=0)
        log.begin(records)
        # The log has each record of the data once; all samples that repeat it are finished.
        records_of_samples = _number_records(data, data.file, data.number)
        order = np.argsort(records_of_samples, kind="stable")
        ascending, wanted = records_of_samples[order], read.rows["index"]
        first, stop = (np.searchsorted(ascending, wanted, side) for side in ("left", "right"))
        row, place = expand_ranges(first, stop - first)
        rows = read.rows[row]
        rows["index"] = order[place]
        repeated = Counted(rows=rows, image_sizes=read.image_sizes.take(row))
        stored = sum(_SAMPLES_HEAD.unpack_from(record)[1] for record in records)
        return cls(
            log=log,
            data=data,
            finished=Counted.join([repeated]),
            discarded=discarded,
            changed=stored - sum(map(len, parts)),
        )

    def notes(self, samples: int) -> list[str]:
        notes, path = [], self.log.path
        if self.discarded:
            notes.append(f"note: {path} is of other data or settings; the scan starts again")
        if self.changed:
            notes.append(
                f"note: {self.changed:,} samples in {path} are of changed or unnamed files"
            )
        if len(self.finished):
            finished = f"{len(self.finished):,} of {samples:,}"
            notes.append(f"resumed: {finished} samples were already scanned")
        return notes

    def append(self, samples: Counted) -> None:
        self.log.append(_encode_samples(samples, self.data))

    def remove(self) -> None:
        self.log.remove()


def _decode_samples(record: memoryview, numbers: dict[bytes, int], data: Annotations) -> Counted:
    """Return a log entry's samples of current files, with `_number_records` as index."""
    files, samples, images = _SAMPLES_HEAD.unpack_from(record)
    parts = (
        *(_SAMPLES_HEAD.size, files * _KEY_BYTES, samples * _STORED_SAMPLE.itemsize),
        *(8 * samples, images * IMAGE.itemsize),
    )
    keys, stored, counts, shown = (record[a:b] for a, b in pairwise(np.cumsum(parts)))
    rows = np.frombuffer(stored, _STORED_SAMPLE)
    sizes = ImageSizes(images=np.frombuffer(shown, IMAGE), counts=np.frombuffer(counts, "<i8"))
    file_keys = (bytes(keys[first:][:_KEY_BYTES]) for first in range(0, len(keys), _KEY_BYTES))
    file = np.array([numbers.get(key, -1) for key in file_keys], np.int64)[rows["file"]]
    kept = np.flatnonzero(file >= 0)
    read = np.empty(len(kept), COUNTED)
    read["index"] = _number_records(data, file[kept], rows["number"][kept])
    read[_COUNTS] = rows[_COUNTS][kept]
    return Counted(rows=read, image_sizes=sizes.take(kept))


def _number_records(data: Annotations, file: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return a number per sample, unique per data record, int64, from file and place in it."""
    return file.astype(np.int64) * (int(data.number.max()) + 1) + number


def _encode_samples(samples: Counted, data: Annotations) -> bytes:
    rows, sizes = samples.rows, samples.image_sizes
    files, file = np.unique(data.file[rows["index"]], return_inverse=True)
    stored = np.empty(len(rows), _STORED_SAMPLE)
    stored["file"], stored["number"] = file, data.number[rows["index"]]
    stored[_COUNTS] = rows[_COUNTS]
    return b"".join(
        (
            _SAMPLES_HEAD.pack(len(files), len(rows), len(sizes.images)),
            *(data.keys[file] for file in files),
            stored.tobytes(),
            sizes.counts.astype("<i8").tobytes(),
            sizes.images.tobytes(),
        )
    )
