"""Resumable journal of a scan, a log keyed by the settings.

Records group samples by file: a changed file loses only its own counts, repeats are free.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from omnibal.base.record_log import RecordLog
from omnibal.data.annotations import Annotations
from omnibal.data.image_sizes import IMAGE, ImageSizes, numbers_of_runs

_COUNTS = ("tiles", "clips", "image_tokens", "tokens", "loss_tokens")
_SQUARES = ("squared_image_tokens",)
COUNTED = np.dtype(
    [("index", "<i8"), *((name, "<i8") for name in _SQUARES), *((name, "<i4") for name in _COUNTS)]
)
"""Scanned sample: annotation index and counts."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Counted:
    rows: np.ndarray
    """COUNTED [samples]."""
    image_sizes: ImageSizes

    @classmethod
    def join(cls, parts: Sequence["Counted"]) -> "Counted":
        """Join samples, ascending by index, without duplicates."""
        rows = np.concatenate([np.empty(0, COUNTED), *(part.rows for part in parts)])
        _, first = np.unique(rows["index"], return_index=True)
        sizes = ImageSizes.join([part.image_sizes for part in parts])
        return cls(rows=rows[first], image_sizes=sizes.take(first))

    def __len__(self) -> int:
        return len(self.rows)


_TITLE = b"omnibal scan journal "
_FORM = b"6 "
"""Record format version; other formats are discarded."""
_NAMED = "a journal of `omnibal lengths`, which keeps there what it has finished"
_SUMS = [*_SQUARES, *_COUNTS]
_STORED = np.dtype([("file", "<i4"), ("number", "<i8"), *COUNTED.descr[1:]])
"""Stored sample: file index in the record, number in the file, counts."""
_NUMBERS = struct.Struct("<III")
_KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScanJournal:
    """Samples finished by an earlier scan. The file exists from first `append` to `remove`."""

    log: RecordLog
    data: Annotations
    finished: Counted
    """Finished samples, ascending by index, unique."""
    discarded: bool
    """Whether a journal of other data or settings was discarded."""
    changed: int
    """Samples dropped because their files changed or are no longer used."""

    @classmethod
    def open(cls, path: Path, key: str, data: Annotations) -> "ScanJournal":
        """Read the samples finished with this key, up to the first torn record."""
        log = RecordLog(path, _TITLE, _FORM + key.encode())
        records, discarded = log.read(_NAMED)
        numbers = {key: number for number, key in enumerate(data.keys)}
        parts = [_decode(record, numbers, data) for record in records]
        read = Counted.join(parts)
        if not len(read):
            log.begin([])
            discarded = discarded or bool(records)
            return cls(log=log, data=data, finished=read, discarded=discarded, changed=0)
        log.begin(records)
        # `_places` index each sample once, and the journal all its repeats.
        places = _places(data, data.file, data.number)
        order = np.argsort(places, kind="stable")
        wanted = read.rows["index"]
        first, stop = (np.searchsorted(places[order], wanted, end) for end in ("left", "right"))
        row = np.repeat(np.arange(len(read)), stop - first)
        rows = read.rows[row]
        rows["index"] = order[numbers_of_runs(first, stop - first)]
        repeated = Counted(rows=rows, image_sizes=read.image_sizes.take(row))
        stored = sum(_NUMBERS.unpack_from(record)[1] for record in records)
        return cls(
            log=log,
            data=data,
            finished=Counted.join([repeated]),
            discarded=discarded,
            changed=stored - sum(map(len, parts)),
        )

    @property
    def path(self) -> Path:
        return self.log.path

    def notes(self, samples: int) -> list[str]:
        """Messages on resumed or discarded samples."""
        notes = []
        if self.discarded:
            notes.append(f"note: {self.path} is of other data or settings; the scan begins anew")
        if self.changed:
            notes.append(
                f"note: {self.changed:,} samples in {self.path} are of files that have changed or "
                "are not named any more"
            )
        if len(self.finished):
            finished = f"{len(self.finished):,} of {samples:,}"
            notes.append(f"resumed: {finished} samples were already scanned")
        return notes

    def append(self, samples: Counted) -> None:
        self.log.append(_encode(samples, self.data))

    def remove(self) -> None:
        self.log.remove()


def _decode(record: memoryview, numbers: dict[bytes, int], data: Annotations) -> Counted:
    """Samples of a record that belong to current files, indexed by `_places`."""
    files, samples, images = _NUMBERS.unpack_from(record)
    parts = (
        *(_NUMBERS.size, files * _KEY_BYTES, samples * _STORED.itemsize),
        *(8 * samples, images * IMAGE.itemsize),
    )
    keys, stored, counts, shown = (record[a:b] for a, b in pairwise(np.cumsum(parts)))
    rows = np.frombuffer(stored, _STORED)
    sizes = ImageSizes(images=np.frombuffer(shown, IMAGE), counts=np.frombuffer(counts, "<i8"))
    named = (bytes(keys[first:][:_KEY_BYTES]) for first in range(0, len(keys), _KEY_BYTES))
    file = np.array([numbers.get(key, -1) for key in named], np.int64)[rows["file"]]
    kept = np.flatnonzero(file >= 0)
    read = np.empty(len(kept), COUNTED)
    read["index"] = _places(data, file[kept], rows["number"][kept])
    read[_SUMS] = rows[_SUMS][kept]
    return Counted(rows=read, image_sizes=sizes.take(kept))


def _places(data: Annotations, file: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Unique number per record of all files, int64."""
    return file.astype(np.int64) * (int(data.number.max()) + 1) + number


def _encode(samples: Counted, data: Annotations) -> bytes:
    """Encode a record: files, samples and images."""
    rows, sizes = samples.rows, samples.image_sizes
    files, file = np.unique(data.file[rows["index"]], return_inverse=True)
    stored = np.empty(len(rows), _STORED)
    stored["file"], stored["number"] = file, data.number[rows["index"]]
    stored[_SUMS] = rows[_SUMS]
    return b"".join(
        (
            _NUMBERS.pack(len(files), len(rows), len(sizes.images)),
            *(data.keys[file] for file in files),
            stored.tobytes(),
            sizes.counts.astype("<i8").tobytes(),
            sizes.images.tobytes(),
        )
    )
